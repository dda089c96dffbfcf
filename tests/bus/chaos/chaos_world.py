"""A run under fire: a server of ours, actors as processes, a schedule of kills, and the figures."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from bus_worlds import shorten_leases
from chaos_plan import Kill, Ledger, schedule

from bus import Bus, ServerHandle, connect, provision, serve
from bus.subjects import SECOND

RUN = "chaos"
STORE_GB = 4.0
LEASE_SECONDS = 2.0  # the work of a killed process comes back then; thirty seconds are too long for a test
CREW = {"producer": 2, "worker": 3, "scorer": 1, "learner": 1}
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
    """Figures of a fight: the kills, and the seconds from a kill of the server to the first stored value."""

    kills: Counter[str] = field(default_factory=Counter)
    recovery: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return JSON values."""
        times = sorted(self.recovery) or [0.0]
        return {
            "kills": {"total": self.kills.total(), **self.kills},
            "recovery_seconds": {"p50": round(times[len(times) // 2], 3), "max": round(times[-1], 3)},
        }


async def fire(plan: list[Kill], crew: Crew, handle: ServerHandle, bus: Bus, figures: Figures) -> None:
    """Carry out a schedule. After a kill of the server nobody is killed until it stores values again."""
    for kill in plan:
        await anyio.sleep(kill.pause)
        crew.check()
        figures.kills[kill.kind] += 1
        if kill.kind == "server":
            wanted, start = handle.restarts + 1, time.monotonic()
            os.kill(handle.pid, signal.SIGKILL)
            with anyio.fail_after(_RECOVERY_SECONDS):
                await bus.state_put("probe", b"")
            figures.recovery.append(time.monotonic() - start)
            await until(lambda n=wanted: handle.restarts >= n, lambda: "a restart", _RECOVERY_SECONDS)
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


async def _drain(crew: Crew, bus: Bus) -> dict[str, int]:
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


async def _caught_up(crew: Crew, bus: Bus) -> None:
    """Wait until the readers have read what the work left behind (repeated results, for instance)."""
    for name, figure, stream in (("scorer0", "position", "EVENT"), ("learner0", "cursor", "SAMPLE")):
        last = (await bus.stream_info(stream)).last
        await until(
            lambda name=name, figure=figure, last=last: crew.memory(name)[figure] == last,
            lambda name=name, last=last: f"{name} to be at {last}",
            _DRAIN_SECONDS,
        )


async def fight(directory: Path, *, seed: int, kills: int) -> Outcome:
    """Run the whole test once. Afterwards no process of it is left."""
    figures, crew = Figures(), Crew(directory)
    async with serve(directory / "bus", run=RUN, store_gb=STORE_GB) as handle:
        await provision(handle.url, run=RUN, token=handle.token, store_gb=STORE_GB)
        world = {"url": handle.url, "token": handle.token, "run": RUN, "seed": seed}
        (directory / "world.json").write_text(json.dumps(world))
        try:
            for kind in CREW:
                for name in crew.names(kind):
                    crew.start(name)
            async with connect(handle.url, run=RUN, role="probe", instance="1", token=handle.token) as bus:
                await _forget_soon(bus)
                await shorten_leases(bus, LEASE_SECONDS)
                return await _fight(crew, handle, bus, figures, seed, kills)
        finally:
            crew.abandon()


async def _forget_soon(bus: Bus) -> None:
    """Let the server forget ids at once: the ledgers of the readers must do without its help."""
    for kind in ("TASK", "EVENT", "SAMPLE"):
        name = bus.names.stream(kind)
        config = (await bus.connection.api(f"STREAM.INFO.{name}"))["config"]
        await bus.connection.api(
            f"STREAM.UPDATE.{name}", {**config, "duplicate_window": int(_REMEMBERED_SECONDS * SECOND)}
        )


async def _fight(
    crew: Crew, handle: ServerHandle, bus: Bus, figures: Figures, seed: int, kills: int
) -> Outcome:
    await crew.all_ready()
    await fire(schedule(seed, kills), crew, handle, bus, figures)
    pieces = await _drain(crew, bus)
    await crew.end("worker")
    await _caught_up(crew, bus)
    for kind in ("scorer", "learner"):
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
