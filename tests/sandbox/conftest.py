from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox import SandboxPool, SandboxSettings

_EMULATE = str(Path(__file__).with_name("sandbox_emulate.py"))


def emulated(*features: str) -> tuple[str, ...]:
    """A launcher prefix that takes ``features`` away from the zygote."""
    return (sys.executable, "-P", _EMULATE, *features, "--") if features else ()


def alive(pid: int) -> bool:
    """Whether ``pid`` is a process that has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


@asynccontextmanager
async def held_pool(settings: SandboxSettings, *features: str) -> AsyncIterator[SandboxPool]:
    """A pool entered and left by a task of its own, as fixtures of a module need it."""
    ready: asyncio.Future[SandboxPool] = asyncio.get_running_loop().create_future()
    done = asyncio.Event()

    async def hold() -> None:
        async with SandboxPool(settings, launcher=emulated(*features)) as pool:
            ready.set_result(pool)
            await done.wait()

    task = asyncio.create_task(hold())
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        yield ready.result()
    finally:
        done.set()
        await task


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    """One pool of the module with short deadlines; strikes are off, because attacks share it."""
    settings = SandboxSettings(
        cpu_call_seconds=0.3, cpu_load_seconds=1.0, wall_call_seconds=1.0, strikes=0, nice=0
    )
    async with held_pool(settings) as pool:
        yield pool


@pytest.fixture
def open_files() -> Callable[[], int]:
    """Count of this process's descriptors."""
    return lambda: len(os.listdir("/proc/self/fd"))
