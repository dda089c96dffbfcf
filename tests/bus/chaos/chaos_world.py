"""A run under fire: a server of ours, actors as processes, a schedule of kills, and the figures."""

from __future__ import annotations

import json
import math
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from bus_examples import ticket
from chaos_actors import LEASES
from chaos_plan import Kill, Ledger, schedule

from bus import Bus, Delivery, NatsBus, ServerHandle, connect, provision, serve
from bus.subjects import SECOND

RUN = "chaos"
STORE_GB = 4.0
CREW = {"producer": 2, "worker": 3, "scorer": 1, "learner": 1, "recorder": 1}
_ACTORS = Path(__file__).with_name("chaos_actors.py")
_LOOK_SECONDS = 0.02
_REMEMBERED_SECONDS = 1.0
_RECOVERY_SECONDS = 20.0
_START_SECONDS = 40.0
_DRAIN_SECONDS = 60.0
_EXIT_SECONDS = 20.0


async def until(condition: Callable[[], bool], what: Callable[[], str], seconds: float) -> None:
    """Wait for another process; fails with what was seen last."""
    with anyio.move_on_after(seconds):
        while not condition():  # noqa: ASYNC110 (files of other processes have no event)
            await anyio.sleep(_LOOK_SECONDS)
        return
    raise AssertionError(f"not within {seconds:g} s: {what()}")


class Crew:
    """The actors' processes: started, killed and started again, watched, ended."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.pids: set[int] = set()
        self._doomed: set[str] = set()

    def names(self, kind: str) -> list[str]:
        """Return the instances of a kind."""
        return [f"{kind}{number}" for number in range(CREW[kind])]

    def start(self, name: str) -> None:
        """Start (again) one instance."""
        (self._directory / f"{name}.ready").unlink(missing_ok=True)
        with (self._directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, str(_ACTORS), name.rstrip("0123456789"), name, str(self._directory)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._processes[name] = process
        self.pids.add(process.pid)

    async def all_ready(self) -> None:
        """Wait until every instance has said that it runs."""
        await until(lambda: not self._starting(), lambda: f"{self._starting()} to start", _START_SECONDS)

    def _starting(self) -> list[str]:
        self.check()
        return [name for name in self._processes if not (self._directory / f"{name}.ready").exists()]

    def kill(self, name: str) -> None:
        """Kill an instance with SIGKILL and start it again."""
        process = self._processes[name]
        process.kill()
        process.wait()
        self.start(name)

    def check(self) -> None:
        """Fail when an instance ended by itself."""
        for name, process in self._processes.items():
            if process.poll() is not None and name not in self._doomed:
                log = (self._directory / f"{name}.log").read_text()[-3000:]
                raise AssertionError(f"{name} ended by itself with {process.returncode}:\n{log}")

    async def end(self, kind: str) -> None:
        """Let the instances of a kind finish what they have in hand; they must end with status 0."""
        names = self.names(kind)
        self._doomed.update(names)
        for name in names:
            self._processes[name].terminate()

        def codes() -> dict[str, int | None]:
            return {name: self._processes[name].poll() for name in names}

        await until(lambda: None not in codes().values(), lambda: f"{codes()} to end", _EXIT_SECONDS)
        logs = [(self._directory / f"{name}.log").read_text()[-2000:] for name in names]
        assert set(codes().values()) == {0}, f"{codes()}\n" + "\n".join(logs)

    def abandon(self) -> None:
        """Kill what is left."""
        for process in self._processes.values():
            process.kill()
            process.wait()

    def memory(self, name: str) -> dict[str, Any]:
        """Return what an instance remembers."""
        path = self._directory / f"{name}.json"
        return json.loads(path.read_text()) if path.exists() else {}


@dataclass
class Figures:
    """Figures of a fight.

    ``recovery`` lists seconds from a kill of the server to the first success after it: an acknowledged
    ``publish``, a ``delivery``, and a result of the ``work`` of others (who may have been killed, too).
    ``busy`` is how many processes wanted each core at the worst of these times.
    """

    kills: Counter[str] = field(default_factory=Counter)
    recovery: dict[str, list[float]] = field(
        default_factory=lambda: {"publish": [], "delivery": [], "work": []}
    )
    busy: float = 0.0

    def note_load(self) -> None:
        """Look at the machine."""
        self.busy = max(self.busy, os.getloadavg()[0] / (os.cpu_count() or 1))

    def slow(self, seconds: float) -> dict[str, float]:
        """Return what took longer: a median than ``seconds``, or a maximum than its share on a busy machine.

        The median never bends to the load, a good part of which is this test's own. A server that was killed
        and never measured is infinitely slow.
        """
        limits = {"p50": seconds, "max": seconds * max(1.0, self.busy)}
        found: dict[str, float] = {}
        for name in ("publish", "delivery"):
            times = self.recovery[name] or ([math.inf] if self.kills["server"] else [0.0])
            seen = {"p50": statistics.median(times), "max": max(times)}
            found |= {f"{name} {which}": seen[which] for which in limits if seen[which] > limits[which]}
        return found

    def summary(self) -> dict[str, Any]:
        """Return JSON values: p50 and max of each recovery time."""
        return {
            "kills": {"total": self.kills.total(), **self.kills},
            "recovery_seconds": {
                name: {"p50": round(statistics.median(times), 3), "max": round(max(times), 3)}
                for name, times in self.recovery.items()
                if times
            },
            "processes_per_core": round(self.busy, 1),
        }


class Probe:
    """Measures how long the bus is away: publishes and takes work of its own, and watches the workers."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._number = 0
        self._delivered: dict[str, anyio.Event] = {}
        self._killed_at, self._worked = 0, anyio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Probe]:
        async with anyio.create_task_group() as group:
            group.start_soon(self._take)
            group.start_soon(self._watch)
            yield self
            group.cancel_scope.cancel()

    async def _take(self) -> None:
        async with self._bus.consume("designer", limit=4) as source:
            async for delivery in source:
                await self._taken(delivery)

    async def _taken(self, delivery: Delivery) -> None:
        arrived = self._delivered.pop(delivery.message.key, None)
        if arrived is not None:
            arrived.set()
        await delivery.ack()

    async def _watch(self) -> None:
        async with self._bus.follow("EVENT", tails=["event.agent.finished"]) as records:
            async for record in records:
                if record.envelope.ts > self._killed_at:
                    self._worked.set()

    async def measure(self, figures: Figures) -> None:
        """Note the times from now (the server was just killed) to the first things that work again."""
        start = time.monotonic()
        self._number += 1
        message = ticket(self._number)
        self._killed_at, self._worked = time.time_ns(), anyio.Event()
        arrived = self._delivered[message.key] = anyio.Event()
        with anyio.fail_after(_RECOVERY_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(self._note, figures, "delivery", start, arrived.wait)
                group.start_soon(self._note, figures, "work", start, self._worked.wait)
                await self._note(figures, "publish", start, lambda: self._bus.publish(message))
        figures.note_load()

    @staticmethod
    async def _note(
        figures: Figures, name: str, start: float, awaited: Callable[[], Awaitable[object]]
    ) -> None:
        await awaited()
        figures.recovery[name].append(time.monotonic() - start)


async def fire(plan: list[Kill], crew: Crew, handle: ServerHandle, probe: Probe, figures: Figures) -> None:
    """Carry out a schedule. The next kill of the server waits until the last one is recovered from."""
    measured = anyio.Lock()

    async def kill_server() -> None:
        async with measured:
            wanted = handle.restarts + 1
            os.kill(handle.pid, signal.SIGKILL)
            await probe.measure(figures)
            await until(lambda: handle.restarts >= wanted, lambda: "a restart", _RECOVERY_SECONDS)

    async with anyio.create_task_group() as group:
        for kill in plan:
            await anyio.sleep(kill.pause)
            crew.check()
            figures.kills[kill.kind] += 1
            if kill.kind == "server":
                async with measured:
                    pass
                group.start_soon(kill_server)
            else:
                names = crew.names(kill.kind)
                crew.kill(names[int(kill.choice * len(names))])


@dataclass
class Outcome:
    """The end of a fight: ``events`` are sequence and id of all of EVENT."""

    pieces: dict[str, int]
    scorer: dict[str, Any]
    learner: dict[str, Any]
    events: list[tuple[int, str]]
    messages: dict[str, int]
    figures: Figures


async def _drain(crew: Crew, bus: NatsBus) -> dict[str, int]:
    """Stop the producers, wait until everything they published has been counted, stop the others."""
    await crew.all_ready()
    await crew.end("producer")
    pieces = {name: int(crew.memory(name)["next"]) for name in crew.names("producer")}
    wanted = sum(pieces.values())

    def counted() -> bool:
        crew.check()
        return crew.memory("learner0").get("count", 0) >= wanted

    def progress() -> str:
        state = crew.memory("learner0")
        missing = Ledger.load(state["ledger"]).holes() if state else {}
        return f"{wanted} pieces counted; {state.get('count', 0)} are, missing are {missing}"

    await until(counted, progress, _DRAIN_SECONDS)
    with anyio.fail_after(_DRAIN_SECONDS):
        while (await bus.stream_info("TASK")).messages:  # noqa: ASYNC110 (another process acknowledges)
            await anyio.sleep(_LOOK_SECONDS)
    return pieces


async def _caught_up(crew: Crew, bus: NatsBus, directory: Path) -> None:
    """Wait until the readers have read what the work left behind (repeated results, for instance)."""
    last = (await bus.stream_info("EVENT")).last

    def positions() -> list[int]:
        with sqlite3.connect(directory / "events.db") as db:
            (recorded,) = db.execute("SELECT coalesce(max(sequence), 0) FROM event").fetchone()
        db.close()
        return [recorded, crew.memory("scorer0")["position"]]

    await until(lambda: positions() == [last, last], lambda: f"{positions()} to be {last}", _DRAIN_SECONDS)
    final = (await bus.stream_info("SAMPLE")).last
    await until(
        lambda: crew.memory("learner0")["cursor"] == final, lambda: f"the cursor at {final}", _DRAIN_SECONDS
    )


async def fight(directory: Path, *, seed: int, kills: int) -> Outcome:
    """Run the whole test once. Afterwards no process of it is left."""
    figures, crew = Figures(), Crew(directory)
    async with serve(directory / "bus", run=RUN, store_gb=STORE_GB) as handle:
        await provision(handle.url, run=RUN, token=handle.token, store_gb=STORE_GB, consumers=LEASES.values())
        world = {"url": handle.url, "token": handle.token, "run": RUN, "seed": seed}
        (directory / "world.json").write_text(json.dumps(world))
        try:
            for kind in CREW:
                for name in crew.names(kind):
                    crew.start(name)
            async with connect(handle.url, run=RUN, role="probe", instance="1", token=handle.token) as bus:
                bus._consumers = LEASES
                await _forget_soon(bus)
                return await _fight(directory, crew, handle, bus, figures, seed, kills)
        finally:
            crew.abandon()


async def _forget_soon(bus: NatsBus) -> None:
    """Let the server forget ids at once: the ledgers of the readers must do without its help."""
    for kind in ("TASK", "EVENT", "SAMPLE"):
        name = bus.names.stream(kind)
        config = (await bus.connection.api(f"STREAM.INFO.{name}"))["config"]
        await bus.connection.api(
            f"STREAM.UPDATE.{name}", {**config, "duplicate_window": int(_REMEMBERED_SECONDS * SECOND)}
        )


async def _fight(
    directory: Path, crew: Crew, handle: ServerHandle, bus: NatsBus, figures: Figures, seed: int, kills: int
) -> Outcome:
    await crew.all_ready()
    async with Probe(bus).running() as probe:
        await fire(schedule(seed, kills), crew, handle, probe, figures)
        pieces = await _drain(crew, bus)
    await crew.end("worker")
    await _caught_up(crew, bus, directory)
    for kind in ("scorer", "learner", "recorder"):
        await crew.end(kind)
    return Outcome(
        pieces=pieces,
        scorer=crew.memory("scorer0"),
        learner=crew.memory("learner0"),
        events=[(record.sequence, record.message.key) async for record in bus.replay("EVENT")],
        messages={kind: (await bus.stream_info(kind)).messages for kind in ("TASK", "SAMPLE", "DLQ")},
        figures=figures,
    )


def left_running(directory: Path) -> list[str]:
    """Return the command lines of processes that have to do with ``directory``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(directory) in command and int(path.parent.name) != os.getpid():
                found.append(command)
    return found
