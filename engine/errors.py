"""Errors that a user reads: what happened, where, and what to do next."""

from __future__ import annotations


class SpadeError(Exception):
    """A fault with a remedy. ``exit_code`` 2 is bad input (nothing was started), 1 anything else."""

    exit_code = 1

    def __init__(self, what: str, *, where: str = "", remedy: str = "") -> None:
        self.what, self.where, self.remedy = what, where, remedy
        super().__init__(" ".join(part for part in (what, f"({where})" if where else "", remedy) if part))


class ConfigError(SpadeError):
    """The recipe, an override or the command line is wrong."""

    exit_code = 2


Problem = tuple[str, str]
"""A key of the recipe, and the complaint about its value."""
