"""Sandbox pools for tests: on this host or a poorer one, what they run and what they leave behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from sandbox import SandboxPool, SandboxSettings, probes

_EMULATE = str(Path(__file__).parent / "poorer_host.py")


async def replay(pool: SandboxPool, source: str, seed: int, actions: Sequence[str]) -> probes.Transcript:
    """Play ``actions`` in a fresh instance until the episode ends."""
    async with await pool.spawn(source, seed=seed) as instance:
        return await probes.play(instance, instance.first, iter(actions))


def status(pid: int, field: str) -> str:
    """Return the first word of a field of /proc/PID/status."""
    text = Path(f"/proc/{pid}/status").read_text()
    return text.partition(f"\n{field}:")[2].split()[0]


def alive(pid: int) -> bool:
    """Return True while ``pid`` is a process that has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in ("Z", "X")


def emulated(*features: str) -> tuple[str, ...]:
    """A launcher prefix that takes ``features`` away from the zygote."""
    return (sys.executable, "-P", _EMULATE, *features, "--") if features else ()


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
