"""The pool: zygotes, admission, strikes, statistics.

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
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
from anyio.abc import TaskGroup, TaskStatus

from sandbox import frames, host, protection
from sandbox.errors import (
    EnvError,
    EnvFailure,
    EnvMemory,
    EnvQuarantined,
    InstanceClosed,
    SandboxError,
    SandboxUnavailable,
    SpawnRefused,
)
from sandbox.instance import Instance, plain
from sandbox.protection import ProtectionReport
from sandbox.settings import SandboxSettings
from sandbox.zygote_client import ZygoteClient

_FIRST_DELAY, _LAST_DELAY, _HEALTHY = 0.1, 5.0, 60.0
_WATCH_SECONDS = 1.0
_HOG = 8  # an instance that holds so many times the usual memory is to blame when it runs out
_PROGRAMS_KEPT = 4096
_MAX_LIVE = 4096
_POOLS = itertools.count()
_STRIDE = 1511  # so that the uids of pools of one process lie apart


class SandboxPool:
    """Runs programs in confined processes; ``report`` is the protection that was observed.

    ``bounds`` are the live instances that each scarce resource allows, ``max_live`` the least of them.
    ``launcher`` is a command prefix for the zygotes. Entering raises SandboxUnavailable when programs cannot
    be confined on this host.
    """

    report: ProtectionReport

    def __init__(self, settings: SandboxSettings | None = None, *, launcher: Sequence[str] = ()) -> None:
        self.settings = settings or SandboxSettings()
        self.zygotes: dict[int, ZygoteClient] = {}
        self._launcher = tuple(launcher)
        self._uids = os.getpid() + _STRIDE * next(_POOLS)
        self._live: dict[int, Instance] = {}
        self._numbers = itertools.count(1)
        self._strikes: dict[str, int] = {}
        self._hogs: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        self._waiting = self.max_live = 0
        self._fault = ""
        self._closed = True

    async def __aenter__(self) -> SandboxPool:
        if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
            raise SandboxUnavailable("generated programs can be confined on Linux 5.3 or newer only")
        settings = self.settings
        host.raise_file_limit()
        self.bounds = {**host.bounds(), "sandbox.max_live": min(settings.max_live or _MAX_LIVE, _MAX_LIVE)}
        self.max_live = max(1, min(self.bounds.values()))
        self._oom_kills = (host.oom_kills(),) * 2
        self._places = asyncio.Semaphore(self.max_live)
        self._roomy, self._standing = asyncio.Event(), asyncio.Event()
        self._roomy.set()
        self._group: TaskGroup = await anyio.create_task_group().__aenter__()
        zygotes = settings.zygotes or max(1, host.cores() // 2)
        self._scopes = [anyio.CancelScope() for _ in range(1 + zygotes)]
        # a zygote forks one child after the other
        self._forks = asyncio.Semaphore(4 * zygotes)
        try:
            found = [await self._group.start(self._tend, *pair) for pair in enumerate(self._scopes[1:])]
        except BaseException:
            await self.__aexit__()
            raise
        self.report = max(found, key=_weakness)
        self._group.start_soon(self._watch, self._scopes[0])
        self._closed = False
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        # spawns that wait for memory or for a zygote see that there will be none
        self._roomy.set()
        self._standing.set()
        for instance in list(self._live.values()):
            instance.end(InstanceClosed("the pool was closed"))
        # not the group's own scope: that would cancel the task that is leaving, too
        for scope in self._scopes:
            scope.cancel()
        # an exception of the body goes on as it is, not inside an exception group
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

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters."""
        live = list(self._live.values())
        return {
            "live": float(len(live)),
            "max_live": float(self.max_live),
            "waiting": float(self._waiting),
            "busy": float(sum(instance.busy for instance in live)),
            "zygotes": float(sum(zygote.ready for zygote in self.zygotes.values())),
            "quarantined_programs": float(sum(map(self._struck_out, self._strikes))),
            **{name: float(count) for name, count in sorted(self._counts.items())},
        }

    def ended(self, instance: Instance, error: SandboxError) -> None:
        """Count the end of an instance by ``error``, with a strike when the program caused it."""
        if isinstance(error, InstanceClosed):
            return
        self._counts[type(error).__name__] += 1
        if isinstance(error, EnvFailure):
            _count(self._strikes, instance.program)

    def killed_from_outside(self) -> SandboxError | None:
        """Judge a SIGKILL that is not ours: None when the program may have sent it.

        Behind the filter a program cannot kill itself, and its limits keep it from exhausting a host: then
        the host or its user did it, with no verdict on the program.
        """
        # the watch may look between the kill and its notice, so the look before that counts
        if host.oom_kills() > self._oom_kills[0]:
            self._counts["oom_kills"] += 1
            return InstanceClosed("the host ran out of memory and its kernel killed this instance")
        if not self.report.holes:
            self._counts["outside_kills"] += 1
            return InstanceClosed("a process outside the sandbox killed this instance")
        return None

    def departed(self, instance: Instance) -> None:
        """Take back the place of an instance whose process is reaped."""
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

    async def _start(
        self, source: str, request: Mapping[str, Any], apart_from: Instance | None = None
    ) -> tuple[Instance, frames.RunnerReply]:
        """Return an instance that has answered ``request``, and its answer."""
        program = self._admissible(source)
        frame = frames.pack({"i": 1, **request, "limits": self.settings})
        await self._admit()
        instance, number = None, next(self._numbers)
        try:
            async with self._forks:
                instance = Instance(self, await self._choose(apart_from), number, program)
                self._live[number] = instance
                await instance.fork(frame)
            reply = await instance.answer()
        except BaseException as error:
            if instance is None:
                self._places.release()
            else:
                await instance.close()
            self._counts["EnvError"] += isinstance(error, EnvError)
            if isinstance(error, OSError):
                raise SpawnRefused(f"no channel: {error}") from error
            raise
        self._counts["spawns"] += 1
        return instance, reply

    async def _admit(self) -> None:
        """Wait for a place, in order of arrival."""
        if self._waiting >= self.settings.queue:
            raise SpawnRefused(f"{self._waiting} spawns are waiting already")
        self._waiting += 1
        try:
            with anyio.fail_after(self.settings.queue_seconds):
                await self._roomy.wait()
                await self._places.acquire()
        except TimeoutError:
            missing = "free memory" if not self._roomy.is_set() else f"one of {self.max_live} places"
            raise SpawnRefused(f"no {missing} within {self.settings.queue_seconds:g} s") from None
        finally:
            self._waiting -= 1

    async def _choose(self, apart_from: Instance | None) -> ZygoteClient:
        """Return the zygote with the fewest children, waiting for one where all are down."""
        while self._closed or not (ready := [zygote for zygote in self.zygotes.values() if zygote.ready]):
            if self._fault or self._closed:
                raise SandboxUnavailable(self._fault or "the sandbox pool is closed")
            self._standing.clear()
            try:
                with anyio.fail_after(self.settings.start_seconds):
                    await self._standing.wait()
            except TimeoutError:
                raise SandboxUnavailable("no zygote came up again") from None
        others = [zygote for zygote in ready if apart_from is None or zygote is not apart_from.zygote]
        return min(others or ready, key=lambda zygote: len(zygote.children))

    async def _tend(
        self, index: int, scope: anyio.CancelScope, *, task_status: TaskStatus[ProtectionReport]
    ) -> None:
        """Keep zygote ``index`` up until ``scope`` is cancelled, with growing pauses between failures."""
        delay, announced = _FIRST_DELAY, False
        with scope:
            while True:
                zygote = self.zygotes[index] = ZygoteClient(
                    self.settings, index, self._uids, self.max_live, self._launcher
                )
                try:
                    found = protection.report(await zygote.start())
                    protection.require(found, allow_unsafe=self.settings.allow_unsafe)
                    zygote.ready = not zygote.lost.is_set()
                    self._fault = ""
                    self._standing.set()
                    if not announced:
                        task_status.started(found)
                        announced = True
                    else:
                        # the host may give less than it did
                        self.report = max(self.report, found, key=_weakness)
                    began = time.monotonic()
                    await zygote.lost.wait()
                    delay = _FIRST_DELAY if time.monotonic() - began > _HEALTHY else delay
                except SandboxUnavailable as error:
                    if not announced:
                        raise
                    self._fault = str(error)
                    self._standing.set()
                finally:
                    await zygote.stop()
                self._counts["zygote_restarts"] += 1
                await anyio.sleep(delay)
                delay = min(2 * delay, _LAST_DELAY)

    async def _watch(self, scope: anyio.CancelScope) -> None:
        """Check idle instances and memory periodically, until ``scope`` is cancelled."""
        with scope:
            while True:
                await anyio.sleep(_WATCH_SECONDS)
                oldest = time.monotonic() - self.settings.idle_seconds
                for instance in list(self._live.values()):
                    if not instance.busy and instance.used < oldest:
                        instance.end(InstanceClosed(f"idle for {self.settings.idle_seconds:g} s"))
                self._oom_kills = (self._oom_kills[1], host.oom_kills())
                self._relieve_memory()

    def _relieve_memory(self) -> None:
        """Stop admission while memory is short, and end the instance that holds the most of it."""
        if host.memory_shortage(self.settings.low_memory_share) <= 0:
            self._roomy.set()
            return
        self._roomy.clear()
        shared = {zygote.index: host.resident(zygote.pid) for zygote in self.zygotes.values() if zygote.ready}
        held = {
            instance: host.resident(instance.pid) - shared.get(instance.zygote.index, 0)
            for instance in self._live.values()
            if instance.pid and instance.error is None
        }
        if held:
            largest = max(held, key=lambda instance: held[instance])
            largest.end(self._eviction(largest, held[largest]))
            self._counts["memory_evictions"] += 1

    def _eviction(self, instance: Instance, held: int) -> SandboxError:
        """Return the error of an instance that is ended because the host is short of memory.

        The first time that is no verdict on its program; a program that holds so much again is to blame.
        """
        if held > _HOG * host.instance_bytes() and _count(self._hogs, instance.program) > 1:
            return EnvMemory(
                f"the program held {held >> 20} MB while the host was short of memory, not for the first "
                f"time; keep less than {_HOG * host.instance_bytes() >> 20} MB"
            )
        return InstanceClosed("the host is short of memory and this was the largest instance")


def _weakness(found: ProtectionReport) -> tuple[int, int]:
    return len(found.holes), len(found.missing)


def _count(table: dict[str, int], program: str) -> int:
    """Count ``program`` in ``table``, which forgets the least recent ones, and return its count."""
    table[program] = table.pop(program, 0) + 1
    if len(table) > _PROGRAMS_KEPT:
        del table[next(iter(table))]
    return table[program]
