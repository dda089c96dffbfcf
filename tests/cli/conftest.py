"""The fixture ``spade`` for every test of the command."""

from scenes.cli import spade

__all__ = ["spade"]
