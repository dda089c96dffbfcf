"""Helpers for tests of a bus in trouble: a server of their own, kills, waits, lost messages."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from bus_examples import example

from bus import Bus, ServerHandle, connect, provision, serve
from bus import server as serving
from bus.messages import DesignRejected

RUN = "trouble"


@asynccontextmanager
async def served(
    directory: Path, *, role: str = "x", sync: str = "100ms", **options: Any
) -> AsyncIterator[tuple[ServerHandle, Bus]]:
    """A server of our own, provisioned, and one client of it."""
    async with serve(directory, run=RUN, store_gb=0.25, sync=sync) as handle:
        await provision(handle.url, run=RUN, token=handle.token, store_gb=0.25)
        login = {"run": RUN, "role": role, "instance": "1", "token": handle.token}
        async with connect(handle.url, **login, **options) as bus:
            yield handle, bus


async def kill(handle: ServerHandle) -> None:
    """Kill the server with SIGKILL and wait until it was started again."""
    wanted = handle.restarts + 1
    os.kill(handle.pid, signal.SIGKILL)
    await until(lambda: handle.restarts >= wanted, "the restart", 15)


def delay_restarts(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a server that died stay away for so long at least."""
    monkeypatch.setattr(serving, "_YOUNG_SECONDS", math.inf)
    monkeypatch.setattr(serving, "_PAUSE_SECONDS", seconds)


async def until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Wait for something that has no event of its own, or fail."""
    with anyio.move_on_after(seconds):
        while not condition():  # noqa: ASYNC110 (a figure in statistics has no event)
            await anyio.sleep(0.005)
        return
    raise AssertionError(f"{what} did not happen within {seconds:g} s")


def freeze(pid: int) -> None:
    """Stop a child process; when this returns none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def drop_once(monkeypatch: pytest.MonkeyPatch, bus: Bus) -> list[bytes]:
    """Let the next message of this connection be lost on its way."""
    lost: list[bytes] = []
    real = bus.connection.write

    def write(subject: str, payload: bytes, reply: str = "", head: bytes = b"") -> bool:
        if lost:
            return real(subject, payload, reply, head)
        lost.append(payload)
        return True

    monkeypatch.setattr(bus.connection, "write", write)
    return lost


def rejected(attempt: int, size: int) -> DesignRejected:
    """Return an event of about ``size`` bytes."""
    return example(DesignRejected, attempt=attempt, reason="x" * size)


async def consumers_of(bus: Bus, kind: str) -> list[str]:
    """Return the names of the consumers a stream has on the server."""
    answer = await bus.connection.api(f"CONSUMER.NAMES.{bus.names.stream(kind)}")
    return list(answer["consumers"] or [])
