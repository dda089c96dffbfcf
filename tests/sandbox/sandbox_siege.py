"""Running attacks beside neighbours: what came of each, how the engine fared, what was left over."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from attacks import Attack
from scenes.programs import ECHO

from sandbox import (
    EnvCrashed,
    EnvError,
    EnvFailure,
    EnvMemory,
    EnvProtocolError,
    EnvTimeout,
    EnvViolation,
    Instance,
    SandboxPool,
)

_NAMES = {
    EnvViolation: "killed",
    EnvTimeout: "timeout",
    EnvMemory: "memory",
    EnvCrashed: "crash",
    EnvProtocolError: "protocol",
    EnvError: "error",
}
_WORDS = ("denied", "harmless")
# Capabilities taken away from the zygote, and the walls that are missing then.
POORER = (
    (("no-userns",), ("net_ns", "pid_ns")),
    (("no-caps",), ("net_ns", "no uid")),
    (("nobody",), ()),
    (("nobody", "no-userns"), ("net_ns", "no uid")),
    (("nobody", "no-userns", "no-landlock"), ("second wall: open",)),
    (("no-userns", "no-landlock"), ("second wall: open",)),
)
# Each wall that these lack is lacking, beside fewer others or more, on one of the rest.
BETWEEN = (("nobody", "no-userns"), ("no-userns", "no-landlock"))


def _marks(features: tuple[str, ...]) -> list[pytest.MarkDecorator]:
    marks = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]
    return [*marks, pytest.mark.long] if features in BETWEEN else marks


# Parameters of a test or fixture: this host, and poorer ones.
HOSTS = [
    pytest.param((), id="this-host"),
    *(pytest.param(features, id="+".join(features), marks=_marks(features)) for features, _ in POORER),
]
POORER_HOSTS = [
    pytest.param(features, missing, id=str(features), marks=_marks(features)) for features, missing in POORER
]
# Files that attacks try to make.
_NAMED = (
    *("attack", "/x", "/tmp/spade-attack", "/tmp/spade-attack-dir", "/tmp/spade-link", "/tmp/spade-fifo"),
    "/dev/shm/spade",
)
# The secret that attacks on neighbours look for; in two parts there, so that they do not find their own.
SECRET = "NEIGHBOUR_SECRET"
NEIGHBOUR = ECHO.replace("self.t = 0", f"self.t = 0; self.secret = {{'{SECRET}': '{SECRET}' * 3}}")


def word(text: str) -> str:
    """The outcome that an attack's own report stands for."""
    if "OPEN" in text:
        return f"ESCAPED {text[:200]}"
    return next((known for known in _WORDS if text.startswith(known)), "answer")


async def outcome(pool: SandboxPool, attack: Attack) -> str:
    """Carry one attack out and say what came of it. Raises the infra errors of the package."""
    instance: Instance | None = None
    try:
        instance = await pool.spawn(attack.source)
        seen = "answer"
        for turn in range(attack.turns):
            seen = word((await instance.step("go" if turn == 0 else "again")).observation)
    except EnvFailure as error:
        seen = _NAMES[type(error)]
        if seen == "error" and instance is not None:
            assert instance.error is None, "an instance outlives what its program raises"
    finally:
        if instance is not None:
            pid = instance.pid
            await instance.close()
            assert not pid or not host_knows(pid, instance), "a closed instance has no process"
    return seen


def host_knows(pid: int, instance: Instance) -> bool:
    """Return whether the process of a closed instance still exists (its number may be another's by now)."""
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(parent) in family(instance.zygote.pid)


def family(pid: int) -> list[int]:
    """``pid`` and all its descendants."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [pid, *(found for child in children for found in family(int(child)))]


async def until_dead(pids: list[int], seconds: float = 5.0) -> None:
    """Wait for the kernel to end ``pids``; each is watched by its pidfd."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            with anyio.fail_after(seconds):
                await anyio.wait_readable(descriptor)
        finally:
            os.close(descriptor)


class Lag:
    """The time that the event loop's thread was at work between two looks, in seconds of its own CPU time.

    Unlike wall time it does not count what other processes of the machine take away; what other tests have
    left on the heap is put aside, so that collecting it does not count either.
    """

    def __init__(self) -> None:
        self.worst = 0.0
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Lag:
        gc.collect()
        gc.freeze()
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await self._task
        gc.unfreeze()

    async def _look(self) -> None:
        waiting = asyncio.create_task(self._stop.wait())
        while not waiting.done():
            before = time.thread_time()
            await asyncio.wait({waiting}, timeout=0.002)
            self.worst = max(self.worst, time.thread_time() - before)


class Neighbours:
    """Honest instances, one of each zygote, that step all the time."""

    def __init__(self, pool: SandboxPool) -> None:
        self.pool, self.steps = pool, 0
        self._stop, self._stepped = asyncio.Event(), asyncio.Condition()

    async def __aenter__(self) -> Neighbours:
        first = await self.pool.spawn(NEIGHBOUR, seed=7654321)
        other = await self.pool.spawn(NEIGHBOUR, seed=7654321, apart_from=first)
        self.instances = [first, other]
        self._tasks = [asyncio.create_task(self._play(one)) for one in self.instances]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)
        for one in self.instances:
            await one.close()

    async def _play(self, instance: Instance) -> None:
        turn, waiting = 0, asyncio.create_task(self._stop.wait())
        while not waiting.done():
            turn += 1
            assert (await instance.step("on")).observation == f"{turn} on"
            async with self._stepped:
                self.steps += 1
                self._stepped.notify_all()
            await asyncio.wait({waiting}, timeout=0.01)

    async def more(self, steps: int, seconds: float = 30.0) -> None:
        """Wait until so many more steps were taken. Raises TimeoutError."""
        wanted = self.steps + steps
        async with asyncio.timeout(seconds), self._stepped:
            await self._stepped.wait_for(lambda: self.steps >= wanted)


async def uids(pool: SandboxPool) -> set[int]:
    """Uids, one of each zygote, of which the pool's instances are or have near ones."""
    async with await pool.spawn(ECHO) as one, await pool.spawn(ECHO, apart_from=one) as other:
        return {os.stat(f"/proc/{instance.pid}").st_uid for instance in (one, other)} - {os.getuid()}


def belongings(pool: SandboxPool, owners: Collection[int] = ()) -> dict[str, Any]:
    """Return what ``owners`` left behind: processes, descriptors, IPC objects and files."""
    zygotes = [zygote.pid for zygote in pool.zygotes.values()]
    live = {instance.pid for instance in pool._live.values()}
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "processes": sorted({pid for zygote in zygotes for pid in family(zygote)} - live),
        "live": len(live),
        "ipc": [row for kind in ("shm", "sem", "msg") for row in _ipc(kind, owners)],
        "files": sorted(str(path) for top in ("/tmp", "/dev/shm") for path in owned(Path(top), owners)),
        "named": [path for path in _NAMED if os.path.lexists(path)],
        "restarts": pool.statistics().get("zygote_restarts", 0.0),
    }


def _near(uid: int, owners: Collection[int]) -> bool:
    """Return whether ``uid`` is one of the block that the pool's instances come from."""
    return any(uid // 8192 == owner // 8192 if owner >= 1 << 20 else uid == owner for owner in owners)


def _ipc(kind: str, owners: Collection[int]) -> list[str]:
    try:
        header, *rows = Path(f"/proc/sysvipc/{kind}").read_text().splitlines()
    except OSError:
        return []
    place = header.split().index("uid")
    return [row for row in rows if _near(int(row.split()[place]), owners)]


def owned(top: Path, owners: Collection[int]) -> list[Path]:
    """Entries of ``top`` that belong to a uid near one of ``owners``."""
    found = []
    for entry in os.scandir(top) if top.is_dir() else ():
        try:
            if _near(entry.stat(follow_symlinks=False).st_uid, owners):
                found.append(Path(entry.path))
        except FileNotFoundError:
            continue
    return found


async def besiege(pool: SandboxPool, attacks: Mapping[str, Attack], *, at_once: int = 8) -> Siege:
    """Carry out ``attacks``, so many at a time, beside neighbours that step."""
    turns = asyncio.Semaphore(at_once)
    found: dict[str, str] = {}

    async def one(name: str, attack: Attack) -> None:
        async with turns:
            found[name] = await outcome(pool, attack)

    owners = await uids(pool)
    before = belongings(pool, owners)
    began = time.monotonic()
    async with Neighbours(pool) as neighbours, Lag() as lag:
        await asyncio.gather(*(one(name, attack) for name, attack in attacks.items()))
        # they must be able to go on afterwards too
        await neighbours.more(4)
    return Siege(
        outcomes=found,
        lag=lag.worst,
        steps=neighbours.steps,
        before=before,
        after=belongings(pool, owners),
        seconds=time.monotonic() - began,
    )


class Siege(msgspec.Struct, frozen=True, kw_only=True):
    """``lag`` in CPU seconds of the engine's thread, ``steps`` those of the neighbours."""

    outcomes: dict[str, str]
    lag: float
    steps: int
    before: dict[str, Any]
    after: dict[str, Any]
    seconds: float

    def wrong(self, attacks: Mapping[str, Attack]) -> dict[str, str]:
        """Outcomes that were not expected."""
        return {
            name: f"{seen} instead of {attacks[name].expect}"
            for name, seen in self.outcomes.items()
            if seen not in attacks[name].expect.split("|")
        }
