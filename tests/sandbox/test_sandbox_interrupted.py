"""Cancellation and the death of a zygote at every place where somebody waits (docs/sandbox.md, case 25)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import pytest_asyncio
from sandbox_siege import HOSTS, belongings, family, until_dead
from scenes.programs import ECHO, PEAK, SPIN
from scenes.sandboxes import alive, emulated, replay

from sandbox import InfraFailure, SandboxError, SandboxPool, SandboxSettings, SandboxUnavailable

pytestmark = pytest.mark.slow


@pytest_asyncio.fixture
async def quiet() -> AsyncIterator[None]:
    """Fails the test when a callback raised, or an exception was never looked at."""
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    yield
    gc.collect()
    await asyncio.sleep(0)
    assert seen == []


async def ticks(count: int) -> None:
    """Let the event loop turn ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)


def children() -> set[int]:
    """Processes of ours that have not ended."""
    listed = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {pid for pid in map(int, listed) if alive(pid)}


@contextlib.contextmanager
def unchanged(pool: SandboxPool) -> Iterator[None]:
    """The pool holds the same before and after."""
    before = belongings(pool)
    yield
    assert belongings(pool) == before
    assert pool.statistics()["waiting"] == pool.statistics()["busy"] == pool.statistics()["live"] == 0


async def settled(task: asyncio.Task[Any]) -> Any:
    """The task's result, or None when it was cancelled or refused for our own reasons."""
    try:
        return await task
    except (asyncio.CancelledError, InfraFailure):
        return None


async def test_spawns_cancelled_at_any_turn(quiet: None) -> None:
    async with SandboxPool(SandboxSettings(zygotes=1)) as pool:
        async with await pool.spawn(PEAK):
            pass
        with unchanged(pool):
            for turn in (*range(30), *range(30, 600, 19)):
                task = asyncio.create_task(pool.spawn(PEAK))
                await ticks(turn)
                task.cancel()
                if (instance := await settled(task)) is not None:
                    await instance.close()
        assert pool.statistics().get("EnvProtocolError", 0) == 0


async def test_crowds_cancelled_together(quiet: None) -> None:
    """Places are waited for by some, held by others; all come back."""
    async with SandboxPool(SandboxSettings(zygotes=1, max_live=3, queue_seconds=10.0)) as pool:
        with unchanged(pool):
            for turn in (0, 1, 2, 5, 20, 100, 300):
                tasks = [asyncio.create_task(pool.spawn(PEAK)) for _ in range(9)]
                await ticks(turn)
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    if (instance := await settled(task)) is not None:
                        await instance.close()
        for instance in [await pool.spawn(PEAK) for _ in range(3)]:
            await instance.close()


async def test_steps_cancelled_at_any_turn(quiet: None) -> None:
    async with SandboxPool(SandboxSettings(zygotes=1)) as pool:
        with unchanged(pool):
            for turn in range(40):
                instance = await pool.spawn(ECHO)
                task = asyncio.create_task(instance.step("x"))
                await ticks(turn)
                task.cancel()
                await settled(task)
                closing = asyncio.create_task(instance.close())
                await ticks(1 + turn % 7)
                closing.cancel()
                await asyncio.wait_for(instance.gone.wait(), 10)
                await settled(closing)
        assert not any(name.startswith("Env") for name in pool.statistics())


@pytest.mark.parametrize("turn", [0, 20, 100])
async def test_pool_left_while_everything_goes_on(
    quiet: None, turn: int, open_files: Callable[[], int]
) -> None:
    files, processes = open_files(), children()
    async with SandboxPool(SandboxSettings(zygotes=2, max_live=4)) as pool:
        spinning = await pool.spawn(SPIN)
        work = [asyncio.create_task(spinning.step("x"))]
        work += [asyncio.create_task(pool.spawn(PEAK)) for _ in range(6)]
        pids = [pid for zygote in pool.zygotes.values() for pid in family(zygote.pid)]
        await ticks(turn)
    for task in work:
        with contextlib.suppress(SandboxError):
            await asyncio.wait_for(task, 10)
    assert [pid for pid in pids if alive(pid)] == []
    assert children() == processes
    assert open_files() == files


@pytest.mark.parametrize("short_of", ["memory", "zygotes", "places"])
async def test_who_waits_when_the_pool_is_left_is_told(quiet: None, short_of: str) -> None:
    settings = SandboxSettings(zygotes=1, max_live=1 if short_of == "places" else 4, queue_seconds=600.0)
    async with SandboxPool(settings) as pool:
        if short_of == "memory":
            pool._roomy.clear()
        elif short_of == "zygotes":
            pool.zygotes[0].ready = False
        else:
            await pool.spawn(ECHO)
        waiting = [asyncio.create_task(pool.spawn(PEAK)) for _ in range(3)]
        await ticks(5)
    for task in waiting:
        with pytest.raises(InfraFailure):
            await asyncio.wait_for(task, 5)


@pytest.mark.parametrize("seconds", [0.0, 0.02, 0.1])
async def test_start_cancelled(quiet: None, seconds: float, open_files: Callable[[], int]) -> None:
    files, processes = open_files(), children()
    with anyio.move_on_after(seconds):
        async with SandboxPool(SandboxSettings(zygotes=2)):
            pass
    assert children() == processes
    assert open_files() == files


@pytest.mark.parametrize("who", ["outer", "inner", "all"])
@pytest.mark.parametrize("turn", [3, 60])
async def test_zygote_dies_at_any_turn_of_a_spawn(quiet: None, turn: int, who: str) -> None:
    async with SandboxPool(SandboxSettings(zygotes=1)) as pool:
        idle = await pool.spawn(ECHO)
        task = asyncio.create_task(pool.spawn(PEAK))
        await ticks(turn)
        pids = family(pool.zygotes[0].pid)
        for pid in {"outer": pids[:1], "inner": pids[1:2], "all": pids}[who]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if (instance := await settled(task)) is not None:
            await instance.close()
        await asyncio.wait_for(idle.gone.wait(), 10)
        assert isinstance(idle.error, InfraFailure)
        async with await pool.spawn(ECHO) as instance:
            assert (await instance.step("x")).observation == "1 x"
        assert pool.statistics()["live"] == 0
        assert [pid for pid in pids if alive(pid)] == []


async def test_zygotes_that_die_again_and_again(quiet: None, open_files: Callable[[], int]) -> None:
    async with SandboxPool(SandboxSettings(zygotes=1)) as pool:
        async with await pool.spawn(ECHO):
            files = open_files()
        for _ in range(3):
            async with await pool.spawn(ECHO) as instance:
                os.kill(instance.zygote.pid, signal.SIGKILL)
                await asyncio.wait_for(instance.zygote.lost.wait(), 10)
        async with await pool.spawn(ECHO):
            assert open_files() == files
        assert pool.statistics()["zygote_restarts"] == 3


@pytest.mark.parametrize("features", HOSTS)
async def test_deaths_on_this_host_and_on_poorer_ones(quiet: None, features: tuple[str, ...]) -> None:
    """Lives, deaths and replays, also where namespaces or uids of one's own are missing."""
    async with SandboxPool(SandboxSettings(zygotes=2), launcher=emulated(*features)) as pool:
        one, other = await replay(pool, PEAK, 3, ["1", "2"]), await replay(pool, PEAK, 3, ["1", "2"])
        assert one.fingerprint() == other.fingerprint()
        spinning = await pool.spawn(SPIN)
        neighbour = await pool.spawn(ECHO, apart_from=spinning)
        pids = family(spinning.zygote.pid)
        task = asyncio.create_task(spinning.step("x"))
        await ticks(3)
        os.kill(pids[0], signal.SIGKILL)
        assert await settled(task) is None
        await until_dead(pids)
        assert isinstance(spinning.error, SandboxUnavailable)
        assert (await neighbour.step("on")).observation == "1 on"
        cancelled = await pool.spawn(SPIN)
        task = asyncio.create_task(cancelled.step("x"))
        await ticks(3)
        task.cancel()
        assert await settled(task) is None
        await asyncio.wait_for(cancelled.gone.wait(), 10)
        last = await pool.spawn(SPIN)
        tasks = [asyncio.create_task(last.step("x"))]
        await ticks(3)
        pids = [pid for zygote in pool.zygotes.values() for pid in family(zygote.pid)]
        assert last.pid in pids
    assert [pid for pid in pids if alive(pid)] == []
    assert await settled(tasks[0]) is None


async def test_five_hundred_lives_in_few_places(open_files: Callable[[], int]) -> None:
    """Slots, and the uids that hang on them, are used again and again; nothing grows."""
    async with SandboxPool(SandboxSettings(max_live=8)) as pool:
        async with await pool.spawn(PEAK):
            files = open_files()

        async def live(seed: int) -> None:
            async with await pool.spawn(PEAK, seed=seed) as instance:
                await instance.step("4")

        for block in range(5):
            await asyncio.gather(*(live(100 * block + k) for k in range(100)))
            resident = [_resident(zygote.pid) for zygote in pool.zygotes.values()]
            if block == 0:
                settled_at = resident
        async with await pool.spawn(PEAK):
            assert open_files() == files
        assert all(now <= then + (2 << 20) for now, then in zip(resident, settled_at, strict=True))
        assert pool.statistics()["spawns"] == 502


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
