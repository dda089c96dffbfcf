"""Turns an exception into an error text that says what to do."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from bus import BusError
from engine.errors import SpadeError
from engine.files import free_mb
from sandbox import SandboxError

FULL_MB = 16
_AGAIN = "Run the same command again: it goes on where it stopped."


class RoleFailed(Exception):
    """A role raised; its exception is the cause."""

    def __init__(self, role: str) -> None:
        self.role = role
        super().__init__(role)


def explain(error: BaseException, directory: Path) -> SpadeError:
    """Return the error to show for ``error``: the first cause that says what to do, else the first one.

    A full disk under ``directory`` explains whatever was raised.
    """
    leaves = list(_leaves(error, None))
    if any(isinstance(leaf, OSError) and leaf.errno == errno.ENOSPC for leaf, _ in leaves) or (
        free_mb(directory) < FULL_MB
    ):
        return SpadeError(
            f"The disk under the run directory {directory} is full.", remedy=f"Free some space. {_AGAIN}"
        )
    known = [(leaf, role) for leaf, role in leaves if isinstance(leaf, (SpadeError, BusError, SandboxError))]
    leaf, role = (known or leaves)[0]
    who = f"The role {role} failed: " if role else ""
    if isinstance(leaf, SpadeError):
        if not role:
            return leaf
        told = SpadeError(f"{who}{leaf.what}", where=leaf.where, remedy=leaf.remedy)
        told.exit_code = leaf.exit_code
        return told
    if isinstance(leaf, (BusError, SandboxError)):
        remedy = str(getattr(leaf, "remedy", "")) or _AGAIN
        return SpadeError(f"{who}{getattr(leaf, 'what', None) or leaf}.", remedy=remedy)
    if isinstance(leaf, sqlite3.Error):
        return SpadeError(f"{who}the run's database failed: {leaf}.", remedy=_AGAIN)
    return SpadeError(
        f"{who}{type(leaf).__name__}: {leaf}",
        remedy=f"This is a defect or an unknown fault; {_trace(directory)}. {_AGAIN}",
    )


def _trace(directory: Path) -> str:
    logs = directory / "logs"
    return f"the trace is in {logs}" if logs.is_dir() else "SPADE_TRACE=1 shows the trace"


def _leaves(error: BaseException, role: str | None) -> Iterator[tuple[BaseException, str | None]]:
    """Yield the exceptions of nested groups, each with the role it came from."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner, role)
    elif isinstance(error, RoleFailed) and error.__cause__ is not None:
        yield from _leaves(error.__cause__, error.role)
    else:
        yield error, role
