"""The pool: zygotes, admission, strikes, figures.

``async with SandboxPool(settings) as pool`` owns every process it starts and leaves none behind. All waits
are bounded; all queues are counted in :meth:`SandboxPool.statistics`.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup, TaskStatus

from sandbox import frames, host, probes, protection
from sandbox.errors import (
    EnvError,
    EnvFailure,
    EnvQuarantined,
    InstanceClosed,
    SandboxError,
    SandboxUnavailable,
    SpawnRefused,
)
from sandbox.instance import Instance, plain
from sandbox.protection import ProtectionReport
from sandbox.settings import SandboxSettings
from sandbox.zygote_client import Keeper

_FIRST_DELAY, _LAST_DELAY, _HEALTHY = 0.1, 5.0, 60.0
_WATCH_SECONDS = 1.0
_STRIKES_KEPT = 4096
_SAMPLES = 512
_MAX_LIVE = 4096
_POOLS = itertools.count()
_STRIDE = 1511  # so that the uids of pools of one process lie apart
_FILTERED = 2  # the least level at which a program cannot send signals


class SandboxPool:
    """Runs programs in confined processes. ``report`` says how well they are confined.

    ``launcher`` is a command prefix for the zygotes. Entering raises SandboxUnavailable when the host does
    not reach the level that ``settings`` require.
    """

    report: ProtectionReport

    def __init__(self, settings: SandboxSettings | None = None, *, launcher: Sequence[str] = ()) -> None:
        self.settings = settings or SandboxSettings()
        self.bounds = frames.Bounds(
            reply=self.settings.max_reply_bytes,
            observation=self.settings.max_observation_bytes,
            output=self.settings.max_output_bytes,
        )
        self._launcher = tuple(launcher)
        self._uids = os.getpid() + _STRIDE * next(_POOLS)
        self._keepers: dict[int, Keeper] = {}
        self._live: dict[int, Instance] = {}
        self._numbers = itertools.count(1)
        self._strikes: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._waiting = self.max_live = self.calls = 0
        self._fault = ""
        self._closed = True
        self._spawn_seconds: deque[float] = deque(maxlen=_SAMPLES)
        self._queue_seconds: deque[float] = deque(maxlen=_SAMPLES)

    async def __aenter__(self) -> SandboxPool:
        if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
            raise SandboxUnavailable("generated programs can be confined on Linux 5.3 or newer only")
        settings, cores = self.settings, host.cores()
        host.raise_file_limit()
        self.bounds_of_live = {**host.bounds(), "sandbox.max_live": settings.max_live or _MAX_LIVE}
        self.max_live = max(1, min(*self.bounds_of_live.values(), _MAX_LIVE))
        self._oom_kills = (host.oom_kills(),) * 2
        self._places = asyncio.Semaphore(self.max_live)
        self._loads = asyncio.Semaphore(2 * cores)
        self.turns = asyncio.Semaphore(settings.in_flight or 4 * cores)
        self._roomy, self._standing = asyncio.Event(), asyncio.Event()
        self._roomy.set()
        self._group: TaskGroup = await anyio.create_task_group().__aenter__()
        self._scopes = [anyio.CancelScope() for _ in range(1 + (settings.zygotes or max(1, cores // 2)))]
        try:
            found = [await self._group.start(self._tend, *pair) for pair in enumerate(self._scopes[1:])]
        except BaseException:
            await self.__aexit__()
            raise
        self.report = min(found, key=lambda report: report.level)
        self._group.start_soon(self._watch, self._scopes[0])
        self._closed = False
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        # who waits for memory or for a zygote sees that there will be none
        self._roomy.set()
        self._standing.set()
        for instance in list(self._live.values()):
            instance.expire(InstanceClosed("the pool was closed"))
        # not the group's own scope: that would cancel the task that is leaving, too
        for scope in self._scopes:
            scope.cancel()
        # what the body raised goes on as it is, not inside an exception group
        await self._group.__aexit__(None, None, None)

    async def spawn(
        self,
        source: str,
        *,
        seed: int = 0,
        kwargs: Mapping[str, Any] | None = None,
        apart_from: Instance | None = None,
    ) -> Instance:
        """Start ``source`` in a process of its own and reset it with ``seed``.

        ``kwargs`` go to the constructor as far as it takes them; ``apart_from`` asks for another zygote than
        that instance's, where there are several. Raises EnvError when the program raises and the other
        errors of the package; there is no instance then.
        """
        request = {"op": "load", "source": plain(source), "seed": seed, "kwargs": dict(kwargs or {})}
        instance, reply = await self._start(source, request, apart_from)
        try:
            instance.describe(reply)
        except BaseException:
            await instance.close()
            raise
        return instance

    async def lint(self, source: str) -> None:
        """Check ``source`` by the static rules in a process of its own, which never runs it.

        Raises EnvError, with phase ``parse`` or ``lint``, when the program breaks them, and the other errors
        of the package.
        """
        instance, _ = await self._start(source, {"op": "lint", "source": plain(source)})
        await instance.close()

    async def _start(
        self, source: str, request: Mapping[str, Any], apart_from: Instance | None = None
    ) -> tuple[Instance, frames.Reply]:
        """Return an instance that has answered ``request``, and its answer."""
        program = self._admissible(source)
        frame = frames.pack({"i": 1, **request, "limits": self.bounds})
        await self._admit()
        try:
            await self._loads.acquire()
        except BaseException:
            self._places.release()
            raise
        try:
            if self._closed:
                raise SandboxUnavailable("the sandbox pool is closed")
            keeper = await self._choose(apart_from)
            instance = Instance(self, keeper, next(self._numbers), program)
        except BaseException as error:
            self._loads.release()
            self._places.release()
            if isinstance(error, OSError):
                raise SpawnRefused(f"no channel: {error}") from error
            raise
        instance.hold(self._loads)
        return await self._begin(instance, frame)

    async def replay(
        self,
        source: str,
        seed: int,
        actions: Sequence[str],
        *,
        kwargs: Mapping[str, Any] | None = None,
        apart_from: Instance | None = None,
    ) -> probes.Transcript:
        """Play ``actions`` in a fresh instance that was reset with ``seed``; stops at the episode's end."""
        instance = await self.spawn(source, seed=seed, kwargs=kwargs, apart_from=apart_from)
        async with instance:
            return await probes.play(instance, instance.first, iter(actions))

    def statistics(self) -> dict[str, float]:
        """Gauges and counters; ``*_ms`` are over the last 512 spawns."""
        live = list(self._live.values())
        return {
            "live": float(len(live)),
            "max_live": float(self.max_live),
            "waiting": float(self._waiting),
            "calls": float(self.calls),
            "busy": float(sum(instance.busy for instance in live)),
            "zygotes": float(sum(keeper.ready for keeper in self._keepers.values())),
            "spawn_p50_ms": _quantile(self._spawn_seconds, 0.5) * 1e3,
            "spawn_p99_ms": _quantile(self._spawn_seconds, 0.99) * 1e3,
            "queue_p99_ms": _quantile(self._queue_seconds, 0.99) * 1e3,
            "quarantined_programs": float(sum(map(self._struck_out, self._strikes))),
            **{name: float(count) for name, count in sorted(self._counts.items())},
        }

    def ended(self, instance: Instance, error: SandboxError) -> None:
        """An instance came to its end by ``error``. For the instance."""
        if isinstance(error, InstanceClosed):
            return
        self._counts[type(error).__name__] += 1
        if isinstance(error, EnvFailure):
            self._strikes[instance.program] = self._strikes.pop(instance.program, 0) + 1
            if len(self._strikes) > _STRIKES_KEPT:
                del self._strikes[next(iter(self._strikes))]

    def killed_from_outside(self) -> SandboxError | None:
        """Judge a SIGKILL that is not ours: None when the program may have sent it. For the instance.

        Behind the filter a program cannot kill itself, and its limits keep it from exhausting a host: then
        it is the host's doing, with no verdict on the program.
        """
        # a notice may be overtaken by the watch's look, so the count is compared with the look before it
        if host.oom_kills() > self._oom_kills[0]:
            self._counts["oom_kills"] += 1
            return InstanceClosed("the host ran out of memory and its kernel killed this instance")
        if self.report.level >= _FILTERED:
            self._counts["outside_kills"] += 1
            return InstanceClosed("somebody outside the sandbox killed this instance")
        return None

    def departed(self, instance: Instance) -> None:
        """An instance's process is reaped: its place is free. For the instance."""
        if self._live.pop(instance.number, None) is not None:
            self._places.release()

    def _struck_out(self, program: str) -> bool:
        return 0 < self.settings.strikes <= self._strikes.get(program, 0)

    def _admissible(self, source: str) -> str:
        """Return the program's hash, or raise why it is not started at all."""
        if self._closed:
            raise SandboxUnavailable("the sandbox pool is closed")
        data = source.encode("utf-8", "replace")
        if len(data) > self.settings.max_source_bytes:
            message = f"{len(data)} bytes of source, at most {self.settings.max_source_bytes} are taken"
            raise EnvError("SourceTooLong", message, phase="parse")
        program = hashlib.sha256(data).hexdigest()
        if self._struck_out(program):
            raise EnvQuarantined(f"the program had to be killed {self._strikes[program]} times")
        return program

    async def _admit(self) -> None:
        """Wait for a place, in order of arrival."""
        if self._waiting >= self.settings.queue:
            raise SpawnRefused(f"{self._waiting} spawns are waiting already")
        began = time.monotonic()
        self._waiting += 1
        try:
            with anyio.fail_after(self.settings.queue_seconds):
                await self._roomy.wait()
                await self._places.acquire()
        except TimeoutError:
            what = "free memory" if not self._roomy.is_set() else f"one of {self.max_live} places"
            raise SpawnRefused(f"no {what} within {self.settings.queue_seconds:g} s") from None
        finally:
            self._waiting -= 1
        self._queue_seconds.append(time.monotonic() - began)

    async def _choose(self, apart_from: Instance | None) -> Keeper:
        """Return the zygote with the fewest children, waiting for one where all are down."""
        while not (ready := [keeper for keeper in self._keepers.values() if keeper.ready]):
            if self._fault or self._closed:
                raise SandboxUnavailable(self._fault or "the sandbox pool is closed")
            self._standing.clear()
            try:
                with anyio.fail_after(self.settings.start_seconds):
                    await self._standing.wait()
            except TimeoutError:
                raise SandboxUnavailable("no zygote came up again") from None
        others = [keeper for keeper in ready if apart_from is None or keeper is not apart_from.keeper]
        return min(others or ready, key=lambda keeper: len(keeper.tenants))

    async def _begin(self, instance: Instance, frame: bytes) -> tuple[Instance, frames.Reply]:
        self._live[instance.number] = instance
        began = time.monotonic()
        try:
            reply = await instance.load(frame)
        except BaseException as error:
            self._counts["EnvError"] += isinstance(error, EnvError)
            await instance.close()
            raise
        finally:
            instance.let_go()
        self._counts["spawns"] += 1
        self._spawn_seconds.append(time.monotonic() - began)
        return instance, reply

    async def _tend(
        self, index: int, scope: anyio.CancelScope, *, task_status: TaskStatus[ProtectionReport]
    ) -> None:
        """Keep zygote ``index`` alive until ``scope`` is cancelled."""
        with scope:
            await self._keep_up(index, task_status)

    async def _keep_up(self, index: int, task_status: TaskStatus[ProtectionReport]) -> None:
        """Start zygote ``index`` again and again, with growing pauses between starts that fail."""
        delay, announced = _FIRST_DELAY, False
        while True:
            keeper = self._keepers[index] = Keeper(
                self.settings, index, self._uids, self.max_live, self._launcher
            )
            try:
                found = protection.report(await keeper.start(), self.max_live, self.bounds_of_live)
                protection.require(found, self.settings)
                keeper.ready = not keeper.lost.is_set()
                self._fault = ""
                self._standing.set()
                if not announced:
                    task_status.started(found)
                    announced = True
                elif found.level < self.report.level:
                    # accepted still, yet no longer what was reported
                    self.report = found
                began = time.monotonic()
                await keeper.lost.wait()
                delay = _FIRST_DELAY if time.monotonic() - began > _HEALTHY else delay
            except SandboxUnavailable as error:
                if not announced:
                    raise
                self._fault = str(error)
                self._standing.set()
            finally:
                await keeper.stop()
            self._counts["zygote_restarts"] += 1
            await anyio.sleep(delay)
            delay = min(2 * delay, _LAST_DELAY)

    async def _watch(self, scope: anyio.CancelScope) -> None:
        """Once a second, look after instances and memory, until ``scope`` is cancelled."""
        with scope:
            while True:
                await anyio.sleep(_WATCH_SECONDS)
                self._look_after()

    def _look_after(self) -> None:
        """End what nobody uses, and stop admission while memory is short."""
        oldest = time.monotonic() - self.settings.idle_seconds
        for instance in list(self._live.values()):
            if not instance.busy and instance.used < oldest:
                instance.expire(InstanceClosed(f"idle for {self.settings.idle_seconds:g} s"))
        self._oom_kills = (self._oom_kills[1], host.oom_kills())
        if host.available_share() >= self.settings.low_memory_share:
            self._roomy.set()
            return
        self._roomy.clear()
        live = [instance for instance in self._live.values() if instance.pid and instance.error is None]
        if live:
            largest = max(live, key=lambda instance: host.resident(instance.pid))
            # Its own limit it has kept: what the host lacks is not the program's fault, nor its reward.
            largest.expire(InstanceClosed("the host is short of memory and this was the largest one"))
            self._counts["memory_evictions"] += 1


def _quantile(values: deque[float], share: float) -> float:
    """The empirical quantile, 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
