"""Guarded child processes: they end with their owner, and so does all that they started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import anyio
import structlog
from anyio.abc import Process

from engine.inference import subprocess_guard

GUARDED = "SPADE_GUARDED"
"""The environment variable of a child that a guard started."""
GRACE_SECONDS = 5.0
_REAP_SECONDS = 10.0
# A folder of the working directory must not be taken for one of our packages.
_OURS = {GUARDED: "1", "PYTHONSAFEPATH": "1"}

log = structlog.get_logger("spade.inference")


@asynccontextmanager
async def guarded(
    command: Sequence[str],
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    inherit: bool = True,
    grace: float = GRACE_SECONDS,
    piped: bool = False,
) -> AsyncIterator[Process]:
    """Start ``command`` with its output appended to ``log``; at the end of the context it is gone.

    ``environment`` is laid over ours, or without ``inherit`` is the whole of it. With ``piped`` its standard
    output is the process's ``stdout`` stream, and only errors are logged. ``grace`` is how many seconds it
    gets after SIGTERM. Its exit status is the process's ``returncode`` (128 + number when a signal ended it).
    """
    program = [sys.executable, "-I", str(Path(subprocess_guard.__file__)), str(grace), *command]
    with _appending(log) as output:
        process = await anyio.open_process(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if piped else output,
            stderr=output,
            env={**(os.environ if inherit else {}), **(environment or {}), **_OURS},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process, grace)


def end_of(path: Path, size: int) -> str:
    """Return at most the last ``size`` bytes of a file that grows for weeks. Raises OSError."""
    with path.open("rb") as stream:
        stream.seek(max(0, os.fstat(stream.fileno()).st_size - size))
        return stream.read().decode(errors="replace")


def _appending(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


async def _end(process: Process, grace: float) -> None:
    """Close the guard's pipe, which makes it end the command; kill the guard if it does not follow."""
    if process.stdin is not None:
        await process.stdin.aclose()
    with anyio.move_on_after(grace + _REAP_SECONDS):
        await process.wait()
    if process.returncode is None:
        log.warning("guardian_killed", pid=process.pid)
        process.kill()
        await process.wait()
