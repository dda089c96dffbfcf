"""A crowd of live programs for a long time: does the engine's loop stay free, does memory stay flat?"""

from __future__ import annotations

import itertools
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import anyio
import msgspec
import psutil

from engine.bench.figures import quantile, slope
from engine.bench.machine import Load, Machine, Meter, describe
from engine.bench.sandbox import sample, zygotes

if TYPE_CHECKING:
    from sandbox import Instance, SandboxPool

_TURNS = 25
_BEAT = 0.01
_WARM = 0.25
TARGET_LAG_MS = 50.0
TARGET_MB_PER_MINUTE = 1.0


class Soaked(msgspec.Struct, frozen=True, kw_only=True):
    """What a soak showed. Milliseconds, MB (2**20 bytes), MB a minute.

    ``lag_*`` is how late the engine's event loop woke, asked every 10 ms. The slopes are Theil-Sen
    estimates over the time after the first quarter; ``spread`` is the 95 % interval of the engine's.
    ``errors`` counts what instances ended by other than their episodes' end, by class. ``leftovers`` are
    processes and descriptors more than before, after the pool was closed; ``shared_memory`` objects too.
    ``missed`` names what :func:`missed` found; ``within_target`` says that it found nothing.
    """

    level: int
    live: int
    seconds: float
    ramp_seconds: float
    think_seconds: float
    spawns: int
    spawns_per_s: float
    steps: int
    steps_per_s: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    engine_rss_mb: float
    engine_rss_slope: float
    engine_rss_spread: tuple[float, float]
    zygote_rss_mb: float
    zygote_rss_slope: float
    instance_rss_mb: float
    available_mb_slope: float
    zygote_restarts: int
    errors: dict[str, int]
    leftovers: dict[str, int]
    within_target: bool
    missed: tuple[str, ...]
    statistics: dict[str, float]
    machine: Machine
    load: Load


class _Soak:
    """The players, and what they have done so far."""

    def __init__(self, pool: SandboxPool, live: int, think: float, seconds: float) -> None:
        self.pool, self.think = pool, think
        self.wanted = live
        self.programs = sample()
        self.numbers = itertools.count()
        self.standing = 0
        self.full = anyio.Event()
        self.spawns = self.steps = 0
        self.errors: Counter[str] = Counter()
        # made at its full size, and touched, so that our own book-keeping does not look like a leak
        self._lags = array("d", bytes(8 * (int(seconds / _BEAT) + 1)))
        self._beats = 0
        self.rows: list[tuple[float, float, float, float, float]] = []

    async def play(self) -> None:
        """Play one episode after the other, each in a new instance, for ever."""
        from sandbox import EnvError, SandboxError

        first = True
        while True:
            number = next(self.numbers)
            try:
                source, _ = self.programs[number % len(self.programs)]
                instance = await self.pool.spawn(source, seed=number)
            except SandboxError as error:
                self.errors[type(error).__name__] += 1
                await anyio.sleep(0.1)
                continue
            self.spawns += 1
            self.standing += first
            first = False
            if self.standing == self.wanted:
                self.full.set()
            async with instance:
                try:
                    await self._episode(instance, Random(number))
                except EnvError as error:
                    # a guess that the program does not take for an action ends the episode, as in training
                    self.errors[f"EnvError {error.type}"] += 1
                except SandboxError as error:
                    self.errors[type(error).__name__] += 1

    async def _episode(self, instance: Instance, source: Random) -> None:
        from sandbox import probes

        found = probes.plausible(instance.first)
        # our programs take numbers: words would only end the episode early
        actions = [action for action in found if action.lstrip("-").isdigit()] or list(found)
        for _ in range(_TURNS):
            # the time that a model would take to answer
            await anyio.sleep(source.expovariate(1 / self.think) if self.think else 0)
            result = await instance.step(source.choice(actions))
            self.steps += 1
            if result.done:
                return

    async def beat(self) -> None:
        """Record how late the loop wakes us."""
        while self._beats < len(self._lags):
            due = time.perf_counter() + _BEAT
            await anyio.sleep(_BEAT)
            self._lags[self._beats] = time.perf_counter() - due
            self._beats += 1

    @property
    def lags(self) -> Sequence[float]:
        """Seconds too late, beat by beat."""
        return self._lags[: self._beats]

    async def watch(self, period: float) -> None:
        """Record resident memory: ours, the zygotes', one instance's, and what the host has left."""
        from sandbox import host

        began = time.perf_counter()
        parents = zygotes(self.pool)
        while True:
            live = [one.pid for one in list(self.pool._live.values())[:20] if one.pid]
            self.rows.append(
                (
                    time.perf_counter() - began,
                    _mb(host.resident(os.getpid())),
                    _mb(sum(map(host.resident, parents))),
                    _mb(sum(map(host.resident, live)) / max(1, len(live))),
                    _mb(host.memory().get("MemAvailable", 0)),
                )
            )
            await anyio.sleep(period)


async def soak(
    live: int = 1000, seconds: float = 600.0, think: float = 2.0, say: Callable[[str], None] | None = None
) -> Soaked:
    """Keep ``live`` instances playing at random for ``seconds``, each ended episode replaced.

    ``think`` is the mean pause before an action. Raises SandboxUnavailable, and SpadeError when the host
    carries fewer instances.
    """
    from engine.errors import SpadeError
    from sandbox import SandboxPool, SandboxSettings

    before = _resources()
    strangers = set(psutil.Process().children(recursive=True))
    meter = Meter()
    async with SandboxPool(SandboxSettings(max_live=live, queue=live + 64)) as pool:
        if pool.max_live < live:
            bound = min(pool.report.bounds, key=lambda name: pool.report.bounds[name])
            raise SpadeError(
                f"This host carries {pool.max_live} live instances (bound: {bound}), {live} were asked for.",
                remedy="Ask for fewer with --live, or give the host more of it.",
            )
        run = _Soak(pool, live, think, seconds)
        began = time.perf_counter()
        async with anyio.create_task_group() as group:
            for _ in range(live):
                group.start_soon(run.play)
            await run.full.wait()
            ramp = time.perf_counter() - began
            if say:
                say(f"{live} instances live after {ramp:.1f} s; playing for {seconds:g} s")
            spawns, steps = run.spawns, run.steps
            group.start_soon(run.beat)
            group.start_soon(run.watch, max(0.5, seconds / 300))
            began = time.perf_counter()
            await anyio.sleep(seconds)
            spent = time.perf_counter() - began
            spawns, steps = run.spawns - spawns, run.steps - steps
            # looking at all processes holds up the loop: what it did until here counts
            lags = run.lags
            family = set(psutil.Process().children(recursive=True)) - strangers
            group.cancel_scope.cancel()
        figures, level = pool.statistics(), pool.report.level
    load = meter.stop()
    after = _resources()
    # who lost its parent is no child of ours any more, but still there
    after["processes"] = sum(member.is_running() for member in family)
    times, own, zygote, instance, available = zip(*_after_warm_up(run.rows, seconds), strict=True)
    engine_slope, *spread = slope(times, own)
    zygote_slope = slope(times, zygote)[0]
    lag = round(1e3 * quantile(lags, 0.99), 2)
    leftovers = {name: after[name] - before[name] for name in before}
    failed = missed(lag, {"engine": engine_slope, "zygotes": zygote_slope}, leftovers, run.errors)
    return Soaked(
        level=level,
        live=live,
        seconds=round(spent, 1),
        ramp_seconds=round(ramp, 2),
        think_seconds=think,
        spawns=spawns,
        spawns_per_s=round(spawns / spent, 1),
        steps=steps,
        steps_per_s=round(steps / spent, 1),
        lag_p50_ms=round(1e3 * quantile(lags, 0.5), 2),
        lag_p99_ms=lag,
        lag_max_ms=round(1e3 * max(lags), 2),
        engine_rss_mb=round(own[-1], 1),
        engine_rss_slope=engine_slope,
        engine_rss_spread=(spread[0], spread[1]),
        zygote_rss_mb=round(zygote[-1], 1),
        zygote_rss_slope=zygote_slope,
        instance_rss_mb=round(instance[-1], 2),
        available_mb_slope=slope(times, available)[0],
        zygote_restarts=int(figures.get("zygote_restarts", 0)),
        errors=dict(sorted(run.errors.items())),
        leftovers=leftovers,
        within_target=not failed,
        missed=failed,
        statistics=figures,
        machine=describe(("numpy", "uvloop")),
        load=load,
    )


def missed(
    lag_p99_ms: float, slopes: Mapping[str, float], leftovers: Mapping[str, int], errors: Mapping[str, int]
) -> tuple[str, ...]:
    """What misses the target, by name: the loop's lag, memory that grows (MB a minute), leftovers, errors."""
    late = ("lag",) if not lag_p99_ms < TARGET_LAG_MS else ()
    grown = tuple(name for name, rate in slopes.items() if not rate < TARGET_MB_PER_MINUTE)
    left = tuple(name for name, count in leftovers.items() if count > 0)
    return (*late, *grown, *left, *(f"error {name}" for name, count in errors.items() if count))


def _mb(size: float) -> float:
    return size / (1 << 20)


def _after_warm_up(rows: Sequence[tuple[float, ...]], seconds: float) -> list[tuple[float, ...]]:
    late = [row for row in rows if row[0] >= _WARM * seconds]
    return late if len(late) > 1 else list(rows)


def _resources() -> dict[str, int]:
    """Count what a pool could leave behind: processes of its own, descriptors, shared memory."""
    return {
        "processes": 0,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared_memory": len(Path("/proc/sysvipc/shm").read_text().splitlines()),
    }
