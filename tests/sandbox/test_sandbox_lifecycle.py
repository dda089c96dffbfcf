"""Births, deaths, cancellations, nothing left behind (docs/sandbox.md, cases 25, 29)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from sandbox_siege import family, until_dead
from scenes.programs import ECHO, PEAK, SPIN
from scenes.sandboxes import alive

from sandbox import (
    EnvQuarantined,
    EnvTimeout,
    InfraFailure,
    Instance,
    InstanceClosed,
    SandboxError,
    SandboxPool,
    SandboxSettings,
    SandboxUnavailable,
    SpawnRefused,
    host,
)

pytestmark = pytest.mark.slow


async def test_a_closed_pool_says_so() -> None:
    """It leaves nothing, as test_sandbox_interrupted.py shows."""
    async with SandboxPool() as pool:
        closed, left = await pool.spawn(PEAK), await pool.spawn(PEAK)
        await closed.close()
        await closed.close()
    for instance in (closed, left):
        with pytest.raises(InstanceClosed):
            await instance.step("1")
    with pytest.raises(SandboxUnavailable):
        await pool.spawn(PEAK)


async def test_a_task_group_that_failed_in_the_body_passes_through() -> None:
    """The cancellation that such a group leaves on its task must not be taken for one of the pool."""

    async def fail() -> None:
        raise ZeroDivisionError

    async def body(*, caught: bool) -> None:
        async with SandboxPool():
            with contextlib.ExitStack() as stack:
                if caught:
                    stack.enter_context(pytest.raises(ExceptionGroup))
                async with asyncio.TaskGroup() as group:
                    group.create_task(fail())
                    group.create_task(asyncio.Event().wait())

    with pytest.raises(ExceptionGroup):
        await asyncio.create_task(body(caught=False))
    await asyncio.create_task(body(caught=True))


async def test_pools_of_one_process_share_nothing() -> None:
    async with SandboxPool() as one, SandboxPool() as other:
        mine, theirs = await one.spawn(ECHO), await other.spawn(ECHO)
        if one.report.uid_mode == "own":
            assert os.stat(f"/proc/{mine.pid}").st_uid != os.stat(f"/proc/{theirs.pid}").st_uid


@pytest.mark.parametrize(
    ("message", "word"),
    [
        (b'{"op":"spawned","id":9999}', "without a request"),
        (b'{"op":"nonsense"}', "control message"),
        (b"\xff", "control message"),
    ],
)
async def test_a_zygote_that_talks_nonsense_is_given_up(
    message: bytes, word: str, open_files: Callable[[], int]
) -> None:
    async with SandboxPool(SandboxSettings(zygotes=1)) as pool:
        zygote, before = pool.zygotes[0], open_files()
        given = os.open("/dev/null", os.O_RDONLY)
        zygote._dispatch(message, [given])
        assert word in zygote.reason
        assert open_files() < before, "nothing that came along is kept"
        async with await pool.spawn(ECHO) as instance:
            assert (await instance.step("x")).observation == "1 x"


async def test_stopped_zygote_is_replaced() -> None:
    async with SandboxPool(SandboxSettings(zygotes=1, spawn_seconds=0.5)) as pool:
        pids = family(pool.zygotes[0].pid)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(SandboxUnavailable, match="did not fork"):
            await pool.spawn(ECHO)
        await until_dead(pids)
        async with await pool.spawn(ECHO) as instance:
            assert (await instance.step("x")).observation == "1 x"


async def test_engine_killed() -> None:
    script = f"""
import asyncio, sys
from sandbox import SandboxPool
async def main():
    async with SandboxPool() as pool:
        spin = [await pool.spawn({SPIN!r}) for _ in range(2)]
        calls = [asyncio.create_task(i.step("x")) for i in spin]
        await pool.spawn({ECHO!r})
        print(*(k.pid for k in pool.zygotes.values()), flush=True)
        await asyncio.gather(*calls)
asyncio.run(main())
"""
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    engine = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=subprocess.PIPE, env=environment
    )
    assert engine.stdout is not None
    zygotes = (await engine.stdout.readline()).split()
    pids = [pid for zygote in zygotes for pid in family(int(zygote))]
    assert len(pids) >= 4
    engine.kill()
    await engine.wait()
    await until_dead(pids)
    assert not any(map(alive, pids))


async def test_the_kernels_kill_for_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with SandboxPool() as pool:
        idle = await pool.spawn(ECHO)
        monkeypatch.setattr(host, "oom_kills", lambda: 1 << 40)
        os.kill(idle.pid, signal.SIGKILL)
        await asyncio.wait_for(idle.gone.wait(), 5)
        with pytest.raises(InstanceClosed, match="ran out of memory"):
            await idle.step("x")
        assert pool.statistics()["oom_kills"] == 1


async def test_one_call_at_a_time() -> None:
    async with SandboxPool() as pool, await pool.spawn(ECHO) as instance:
        first = asyncio.create_task(instance.step("x"))
        await asyncio.sleep(0)
        with pytest.raises(SandboxError, match="another call"):
            await instance.step("y")
        assert (await first).observation == "1 x"


async def test_strikes() -> None:
    settings = SandboxSettings(cpu_call_seconds=0.05, strikes=2)
    async with SandboxPool(settings) as pool:
        for _ in range(2):
            async with await pool.spawn(SPIN) as instance:
                with pytest.raises(EnvTimeout):
                    await instance.step("x")
        with pytest.raises(EnvQuarantined) as caught:
            await pool.spawn(SPIN)
        assert caught.value.kind == "quarantined"
        assert pool.statistics()["quarantined_programs"] == 1
        async with await pool.spawn(ECHO) as instance:
            await instance.step("x")


async def test_places_are_waited_for_in_order_and_not_for_ever() -> None:
    async with SandboxPool(SandboxSettings(max_live=1, queue=1, queue_seconds=0.3)) as pool:
        first = await pool.spawn(ECHO)
        second = asyncio.create_task(pool.spawn(ECHO))
        await asyncio.sleep(0)
        assert pool.statistics()["waiting"] == 1
        with pytest.raises(SpawnRefused, match="waiting already"):
            await pool.spawn(ECHO)
        await first.close()
        async with await second:
            with pytest.raises(SpawnRefused, match="1 places"):
                await pool.spawn(ECHO)


async def test_idle_instances_are_closed() -> None:
    async with SandboxPool(SandboxSettings(idle_seconds=0.1)) as pool:
        instance = await pool.spawn(ECHO)
        await asyncio.wait_for(instance.gone.wait(), 5)
        with pytest.raises(InstanceClosed, match="idle"):
            await instance.step("x")


GREEDY = ECHO.replace("self.t = 0", "self.t = 0; self.keep = bytearray(60 << 20)")


async def test_memory_shortage_stops_admission_and_takes_the_largest() -> None:
    async with SandboxPool(
        SandboxSettings(low_memory_share=1.1, queue_seconds=0.1, zygotes=1, strikes=1)
    ) as pool:
        small, large = await pool.spawn(ECHO), await pool.spawn(GREEDY)
        await asyncio.wait_for(large.gone.wait(), 5)
        assert isinstance(large.error, InfraFailure), "a fault of the host has no reward and is no strike"
        assert pool.statistics()["memory_evictions"] == 1
        assert pool.statistics()["quarantined_programs"] == 0
        assert not small.gone.is_set()
        with pytest.raises(SpawnRefused, match="memory"):
            await pool.spawn(ECHO)


async def test_a_memory_hog_is_to_blame_the_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended without a verdict once; others are admitted as soon as it is gone."""
    hogs = list[Instance]()
    monkeypatch.setattr(
        host, "memory_shortage", lambda share: sum(20 << 20 for one in hogs if one.error is None) - 1
    )
    async with SandboxPool(SandboxSettings(zygotes=1, strikes=2)) as pool:
        honest = [await pool.spawn(ECHO) for _ in range(3)]
        errors = list[str]()
        for _ in range(3):
            hogs.append(await pool.spawn(GREEDY))
            await asyncio.wait_for(hogs[-1].gone.wait(), 5)
            errors.append(type(hogs[-1].error).__name__)
            honest.append(await asyncio.wait_for(pool.spawn(ECHO), 5))
        assert errors == ["InstanceClosed", "EnvMemory", "EnvMemory"]
        with pytest.raises(EnvQuarantined):
            await pool.spawn(GREEDY)
        assert [instance.error for instance in honest] == [None] * 6


async def test_half_of_a_life_makes_an_instance_worn() -> None:
    works = ECHO.replace("self.t += 1", "self.t += 1; sum(range(5 * 10**6)) if a == 'work' else 0")
    settings = SandboxSettings(cpu_life_seconds=2, cpu_call_seconds=60.0)
    async with SandboxPool(settings) as pool, await pool.spawn(works) as instance:
        assert not instance.worn
        with anyio.fail_after(50):
            while not instance.worn:
                await instance.step("work")
        # it can go on all the same
        await instance.step("rest")


@pytest.mark.parametrize(
    ("preload", "word"),
    [
        (("threading_starter",), "threads"),
        (("no_such_module",), "ModuleNotFoundError"),
        (("torch",), "has loaded torch"),
    ],
)
async def test_unfit_zygotes_refuse(preload: tuple[str, ...], word: str, tmp_path: Path) -> None:
    module = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "threading_starter.py").write_text(module)
    (tmp_path / "torch.py").touch()
    launcher = ("/usr/bin/env", f"PYTHONPATH={tmp_path}:{os.getcwd()}")
    with pytest.raises(SandboxUnavailable, match=word):
        async with SandboxPool(SandboxSettings(preload=preload), launcher=launcher):
            pass


@pytest.mark.parametrize(
    ("launcher", "word"),
    [
        (("/no/such/command",), "cannot be started"),
        (("/bin/false",), "ended|control"),
        (("/bin/sh", "-c", "exec sleep 60", "sh"), "no report within 1 s"),
    ],
)
async def test_launch_failures_are_told(launcher: tuple[str, ...], word: str) -> None:
    with anyio.fail_after(20), pytest.raises(SandboxUnavailable, match=word):
        async with SandboxPool(SandboxSettings(start_seconds=1.0), launcher=launcher):
            pass


def test_another_event_loop() -> None:
    async def main() -> None:
        async with SandboxPool() as pool:
            async with await pool.spawn(ECHO) as instance:
                assert (await instance.step("x")).observation == "1 x"
            spinning = await pool.spawn(SPIN)
            with anyio.move_on_after(0.1):
                await spinning.step("x")
            assert spinning.gone.is_set() or spinning.error is not None

    anyio.run(main, backend_options={"use_uvloop": True})
