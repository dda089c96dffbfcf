"""``spade bench sandbox``: spawns, steps and memory of the sandbox on this machine."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio
import msgspec

from engine.bench.harness import Load, LoadMeter, own_cpu_seconds, quantile
from engine.machine import Machine, describe

if TYPE_CHECKING:
    from sandbox import Instance, SandboxPool


class SandboxOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The number of sequential spawns and steps and of live instances, the length of each throughput."""

    spawns: int = 300
    steps: int = 1000
    seconds: float = 3.0
    live: int = 500


class SandboxFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the sandbox in milliseconds, per second, and MB (2**20 bytes).

    ``spawn_*``: from the call to the first observation, in sequence. ``spawns_per_s``: spawn, reset and kill
    with several in parallel; ``spawn_cpu_ms``: CPU time of one of those in all processes, which load
    distorts least. ``step_*``: a round trip. ``mb_per_env``:
    the fall of the host's available memory per instance.
    """

    spawn_p50_ms: float
    spawn_p99_ms: float
    spawns_per_s: float
    spawn_cpu_ms: float
    step_p50_ms: float
    step_p99_ms: float
    steps_per_s: float
    live: int
    mb_per_env: float
    machine: Machine
    load: Load


def _programs() -> list[str]:
    """Return built-in games of the size that a model writes."""
    from engine.nano import seeds

    return [
        episode.source
        for suite in seeds.SUITES
        for episode in seeds.held_out(suite, 2 * len(seeds.BUILT_IN), 20)
    ]


async def measure(work: SandboxOptions | None = None) -> SandboxFigures:
    """Measure the sandbox with its default settings. Raises SandboxUnavailable."""
    from sandbox import SandboxPool, SandboxSettings, host

    work = work or SandboxOptions()
    programs = _programs()
    meter = LoadMeter()
    async with SandboxPool(SandboxSettings(max_live=work.live + 64)) as pool:
        spawn = await _spawn_times(pool, programs, work.spawns)
        rate, cpu = await _spawn_rate(pool, programs, work.seconds)
        steps, steps_rate = await _step_times(pool, work)
        before = host.memory_available()
        live = range(min(work.live, pool.max_live))
        crowd = await asyncio.gather(*(pool.spawn(programs[k % len(programs)], seed=k) for k in live))
        fallen = (before - host.memory_available()) / len(crowd)
        async with anyio.create_task_group() as group:
            for one in crowd:
                group.start_soon(one.close)
    return SandboxFigures(
        spawn_p50_ms=_ms(quantile(spawn, 0.5)),
        spawn_p99_ms=_ms(quantile(spawn, 0.99)),
        spawns_per_s=round(rate, 1),
        spawn_cpu_ms=_ms(cpu),
        step_p50_ms=_ms(quantile(steps, 0.5)),
        step_p99_ms=_ms(quantile(steps, 0.99)),
        steps_per_s=round(steps_rate, 1),
        live=len(crowd),
        mb_per_env=round(fallen / (1 << 20), 2),
        machine=describe(("numpy", "uvloop")),
        load=meter.stop(),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


async def _spawn_times(pool: SandboxPool, programs: Sequence[str], count: int) -> list[float]:
    times = []
    for number, source in zip(range(count), itertools.cycle(programs), strict=False):
        began = time.perf_counter()
        instance = await pool.spawn(source, seed=number)
        times.append(time.perf_counter() - began)
        await instance.close()
    return times


async def _spawn_rate(pool: SandboxPool, programs: Sequence[str], seconds: float) -> tuple[float, float]:
    """Spawn, reset and close in parallel; return spawns per second and CPU seconds per spawn."""
    done, before = 0, own_cpu_seconds()
    began = time.perf_counter()
    numbers = itertools.count()

    async def work() -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            number = next(numbers)
            instance = await pool.spawn(programs[number % len(programs)], seed=number)
            await instance.close()
            done += 1

    async with anyio.create_task_group() as group:
        for _ in range(4 * len(os.sched_getaffinity(0))):
            group.start_soon(work)
    rate = done / (time.perf_counter() - began)
    return rate, (own_cpu_seconds() - before) / done


_ECHO = """class EchoEnv:
    def reset(self, seed):
        return "say something"
    def step(self, action):
        return action, 0.5, False, False, {}
"""


async def _step_times(pool: SandboxPool, work: SandboxOptions) -> tuple[list[float], float]:
    """Return sequential round trips in seconds, and steps per second with up to 64 instances in parallel."""
    times = []
    async with await pool.spawn(_ECHO) as instance:
        for _ in range(work.steps):
            began = time.perf_counter()
            await instance.step("7")
            times.append(time.perf_counter() - began)
    crowd = [await pool.spawn(_ECHO) for _ in range(min(64, pool.max_live))]
    done = 0
    began = time.perf_counter()

    async def play(instance: Instance) -> None:
        nonlocal done
        while time.perf_counter() - began < work.seconds:
            await instance.step("7")
            done += 1

    async with anyio.create_task_group() as group:
        for instance in crowd:
            group.start_soon(play, instance)
    rate = done / (time.perf_counter() - began)
    for instance in crowd:
        await instance.close()
    return times, rate
