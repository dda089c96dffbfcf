"""Subcommands of ``spade``, one module a group; heavy imports stand inside the functions."""
