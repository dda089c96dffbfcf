"""A role that works in forks: a kill costs no imports, and each end of the fork is one of the process."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import psutil
import pytest
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from engine.running import warm_restart

WORK = """
import os, signal, sys, time
from engine.running.warm_restart import live

class Role:
    @classmethod
    def preload(cls):
        return {allows}

first = os.getpid()
own, ended = live(Role)
{before}
line = f"{{os.getpid()}} {{own or '-'}} {{ended or '-'}} {{os.getpid() == first}}"
os.write(1, f"{{line}}\\n".encode())
{then}
"""
WAIT = "time.sleep(60)"


@asynccontextmanager
async def working(then: str, *, before: str = "", allows: bool = True) -> AsyncIterator[Process]:
    words = [sys.executable, "-P", "-c", WORK.format(then=then, before=before, allows=allows)]
    with anyio.fail_after(50):
        async with await anyio.open_process(words, stderr=None) as process:
            yield process
            if process.returncode is None:
                process.kill()


async def lives(process: Process) -> AsyncIterator[list[str]]:
    """Yield what each life prints: its pid, its name, that of the one before, and whether it is no fork."""
    assert process.stdout is not None
    async for text in TextReceiveStream(process.stdout):
        for line in text.splitlines():
            yield line.split()


async def test_a_killed_fork_is_followed_by_one_that_knows_whom_it_follows() -> None:
    seen: list[list[str]] = []
    async with working(WAIT) as process:
        async for life in lives(process):
            seen.append(life)
            psutil.Process(int(life[0])).kill()
        assert await process.wait() == 128 + signal.SIGKILL
    assert len(seen) == warm_restart.FORKS
    assert [life[2] for life in seen] == ["-", *(life[1] for life in seen[:-1])]
    assert len({life[1] for life in seen}) == len(seen)
    assert all(life[3] == "False" for life in seen)


@pytest.mark.parametrize("status", [0, 1, 2])
async def test_the_process_ends_as_its_fork_ended(status: int) -> None:
    async with working(f"sys.exit({status})") as process:
        assert [life[2] async for life in lives(process)] == ["-"]
        assert await process.wait() == status


@pytest.mark.parametrize(
    ("before", "status"),
    [("signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))", 0), ("", 128 + signal.SIGTERM)],
)
async def test_a_signal_to_the_process_ends_its_fork_for_good(before: str, status: int) -> None:
    seen = []
    async with working(WAIT, before=before) as process:
        async for life in lives(process):
            seen.append(life)
            process.terminate()
        assert await process.wait() == status
    assert len(seen) == 1


async def test_a_fork_does_not_outlive_the_process() -> None:
    async with working(WAIT) as process:
        async for life in lives(process):
            fork = psutil.Process(int(life[0]))
            process.kill()
        assert await process.wait() == -signal.SIGKILL
    fork.wait(timeout=10)


async def test_a_role_that_allows_no_fork_works_in_the_process_itself() -> None:
    async with working("", allows=False) as process:
        assert [life[1:] async for life in lives(process)] == [["-", "-", "True"]]
        assert await process.wait() == 0
