"""Deadlines, crashes, recursion, floods (docs/sandbox.md, cases 13-19)."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import time

import pytest
from attacks.resources import ENDLESS, EXITS
from scenes.programs import ECHO, attack
from scenes.sandboxes import alive, held_pool, status

from sandbox import (
    EnvCrashed,
    EnvError,
    EnvFailure,
    EnvProtocolError,
    EnvTimeout,
    Instance,
    SandboxPool,
    SandboxSettings,
)
from sandbox.instance import cause_of_death, overdue

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize(
    ("elapsed", "cpu", "asleep", "judged"),
    [
        (2.0, 2.0, False, "cpu"),
        (2.0, 0.5, False, 0.25),
        (9.95, 0.0, True, 0.05),
        (10.0, 0.1, True, "wall"),
        # a starved one is not to blame, and is looked at no later than its budget ends
        (10.0, 1.99, False, 0.01),
        (10.0, 1.9999, False, 0.002),
        (29.99, 0.1, False, 0.01),
        (10.0, None, False, "wall"),
        (30.0, 0.1, False, "wall"),
    ],
)
async def test_deadlines_go_by_cpu_first(
    elapsed: float, cpu: float | None, asleep: bool, judged: str | float
) -> None:
    found = overdue(elapsed, cpu, asleep, budget=2.0, soft=10.0, hard=30.0)
    assert found == (judged if isinstance(judged, str) else pytest.approx(judged))


@pytest.mark.parametrize(
    ("status", "cpu", "cause"),
    [
        (signal.SIGSYS, 0.0, "EnvViolation: the program made a forbidden system call"),
        (signal.SIGXCPU, 30.0, "EnvTimeout: all calls together used"),
        (signal.SIGKILL, 31.0, "EnvTimeout: all calls together used"),
        (signal.SIGKILL, 1.0, "EnvCrashed: the process died by signal 9"),
        (7 << 8, 1.0, "EnvCrashed: the process exited with code 7"),
    ],
)
async def test_the_wait_status_tells_the_cause_of_a_death(status: int, cpu: float, cause: str) -> None:
    found = cause_of_death(status, cpu, 30)
    assert f"{type(found).__name__}: {found}".startswith(cause)


async def spawn(pool: SandboxPool, body: str) -> Instance:
    return await pool.spawn(attack(body))


@pytest.mark.parametrize("name", ["loop", "regular expression", "exception text that loops"])
async def test_endless_work_is_killed_at_its_deadline(pool: SandboxPool, name: str) -> None:
    instance = await spawn(pool, ENDLESS[name].body)
    pid = instance.pid
    with pytest.raises(EnvTimeout) as caught:
        await instance.step("go")
    assert caught.value.clock == "cpu"
    await instance.close()
    assert not alive(pid)
    assert 0.3 <= instance.cpu < 1.0


async def test_sleep_is_killed_by_the_wall_clock(pool: SandboxPool) -> None:
    async with await spawn(pool, "return libc.sleep(10 ** 6)") as instance:
        began = time.monotonic()
        with pytest.raises(EnvTimeout) as caught:
            await instance.step("go")
        assert caught.value.clock == "wall"
        assert 0.9 <= time.monotonic() - began < 10.0


@pytest.mark.slow
async def test_starved_programs_are_not_blamed() -> None:
    settings = SandboxSettings(cpu_call_seconds=3.0, wall_call_seconds=0.3, wall_hard_seconds=30.0, nice=0)
    work = "total = 0\nfor i in range(2_000_000): total += i\nreturn total"
    async with held_pool(settings) as pool:
        crowd = [await spawn(pool, work) for _ in range(8)]
        results = await asyncio.gather(*(instance.step("go") for instance in crowd))
        assert {result.observation for result in results} == {"1999999000000"}
        await asyncio.gather(*(instance.close() for instance in crowd))


@pytest.mark.slow
async def test_cpu_of_a_whole_life_is_bounded() -> None:
    settings = SandboxSettings(cpu_life_seconds=1, cpu_call_seconds=60.0, nice=0)
    async with held_pool(settings) as pool:
        instance = await spawn(pool, "while True: pass")
        with pytest.raises(EnvTimeout) as caught:
            await instance.step("go")
        assert caught.value.clock == "life"


@pytest.mark.parametrize(
    ("body", "code", "number"),
    [
        ("os._exit(7)", 7, 0),
        ("os._exit(99)", 99, 0),
        ("os._exit(0)", 0, 0),
        ("ctypes.string_at(0)", 0, signal.SIGSEGV),
        (EXITS["recursion in C"].body, 0, signal.SIGSEGV),
    ],
    ids=["exit", "exit as if unconfined", "exit zero", "null", "C stack"],
)
async def test_crashes_are_named(pool: SandboxPool, body: str, code: int, number: int) -> None:
    async with await spawn(pool, body) as instance:
        with pytest.raises(EnvCrashed) as caught:
            await instance.step("go")
    assert (caught.value.code, caught.value.signal) == (code, number)


async def test_floods_are_cut(pool: SandboxPool) -> None:
    body = """
    if action == "observation": return "x" * (200 << 20)
    if action == "escapes": return "\\0" * (1 << 20)
    if action == "print":
        for _ in range(200): print("y" * 100_000)
    if action == "descriptor":
        for _ in range(100): os.write(1, b"z" * 100_000)
    return "done"
    """
    async with await spawn(pool, body) as instance:
        assert len((await instance.step("observation")).observation) == pool.settings.max_observation_bytes
        assert 0 < len((await instance.step("escapes")).observation) <= pool.settings.max_observation_bytes
        assert (await instance.step("print")).observation == "done"
        assert len(instance.output) == pool.settings.max_output_bytes
        assert (await instance.step("descriptor")).observation == "done"
        assert instance.output == ""


async def test_oversized_input_is_refused(pool: SandboxPool) -> None:
    with pytest.raises(EnvError, match="SourceTooLong"):
        await pool.spawn(ECHO + "#" * pool.settings.max_source_bytes)
    async with await pool.spawn(ECHO) as instance:
        step = await instance.step("a" * (1 << 20) + "\ud800")
    assert len(step.observation) <= pool.settings.max_action_bytes + 2


async def test_large_source_goes_through(pool: SandboxPool) -> None:
    filler = "".join(f'# {i} \u00e9\u4e2d \\ " line of filler\n' for i in range(3500))
    async with await pool.spawn(filler + ECHO) as instance:
        assert (await instance.step("x")).observation == "1 x"


async def test_a_memory_bomb_gets_no_more_than_its_share(pool: SandboxPool) -> None:
    body = """
    keep = []
    try:
        while True: keep.append(b"x" * (1 << 20))
    except MemoryError:
        keep.clear()
    """
    async with await spawn(pool, body) as instance:
        before = int(status(instance.pid, "VmSize")) << 10
        await instance.step("go")
        peak = int(status(instance.pid, "VmHWM")) << 10
    assert pool.settings.memory_mb << 19 < peak <= before + (pool.settings.memory_mb << 20)


async def test_floods_leave_the_engine_as_small_as_it_was(pool: SandboxPool) -> None:
    body = """
    if action == "observation": return "x" * (100 << 20)
    for _ in range(100): print("y" * (1 << 20))
    return "\\U0001F600" * (1 << 20)
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for action in ("observation", "print") * 3:
        async with await spawn(pool, body) as instance:
            with contextlib.suppress(EnvFailure):
                await instance.step(action)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10


@pytest.mark.parametrize("data", ['b"\\xff" * 100_000', "(1 << 18).to_bytes(4, 'little') + b'[' * (1 << 18)"])
async def test_forgery_costs_the_engine_nothing(pool: SandboxPool, data: str) -> None:
    spent = []
    for _ in range(5):
        instance = await spawn(pool, f"while True: os.write(3, {data})")
        began = time.thread_time()
        with pytest.raises(EnvProtocolError):
            await instance.step("go")
        spent.append(time.thread_time() - began)
        await instance.close()
    # the best of them, because garbage collection of the tests may come between
    assert min(spent) < 0.005
