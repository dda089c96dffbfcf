from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_pools import emulated as emulated
from sandbox_pools import held_pool as held_pool

from sandbox import SandboxPool, SandboxSettings


def alive(pid: int) -> bool:
    """Whether ``pid`` is a process that has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


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
