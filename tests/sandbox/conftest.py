from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from scenes.sandboxes import held_pool

from sandbox import SandboxPool, SandboxSettings


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    """One pool of the module with short deadlines; strikes are off, because attacks share it."""
    settings = SandboxSettings(
        cpu_call_seconds=0.3, cpu_load_seconds=1.0, wall_call_seconds=1.0, strikes=0, nice=0
    )
    async with held_pool(settings) as pool:
        yield pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[SandboxPool]:
    """A pool of the module with two zygotes, as judging wants them: addresses differ between them."""
    settings = SandboxSettings(
        zygotes=2, cpu_call_seconds=0.2, cpu_load_seconds=0.5, wall_call_seconds=1.0, strikes=0, nice=0
    )
    async with held_pool(settings) as pool:
        yield pool


@pytest.fixture
def open_files() -> Callable[[], int]:
    """Count of this process's descriptors."""
    return lambda: len(os.listdir("/proc/self/fd"))
