"""kill -9 of anything at any point of a nano run: nothing lost or trained twice, credit in its round (I7).

The long form is ``pytest tests/e2e/test_kill_anywhere.py --kills 20``; ``--kill-seed`` picks other points.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import psutil
import pytest
from nano_runs import RECIPE, ended, facts, nothing_left, output, spawn, start, surviving, trained_twice

from bus import Bus, connect
from bus.messages import BatchTrained, DesignRejected, EnvironmentReady, Message, RoundClosed
from engine import recipe
from engine.config import Config
from engine.running.supervisor import read_address
from roles.scorer import cohort_plan
from roles.scorer.curriculum import Curriculum
from roles.scorer.state import Publish

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
KINDS = ("learner", "scorer", "broker", "agent", "server")
APART = ("scorer", "agent")
ROUNDS_PER_KILL = 3
# a round later may have been in flight already
RECOVERED = 2
RECOVERY_SECONDS = 240.0
SETTINGS = (
    'run.roles=["designer", "learner", "server"]',
    "curriculum.environments=6",
    "curriculum.delay=2",
    "learner.designer.scope=global",  # a design a skill: alone, it would not be sent
    "learner.checkpoint_every=2",
    "evaluator.suites=[]",
    "ui.report=false",
)


@dataclass(frozen=True)
class Kill:
    """``kind`` dies ``events`` facts after ``round`` was trained."""

    kind: str
    round: int
    events: int


def schedule(seed: int, kills: int) -> list[Kill]:
    """Each kind once before any comes again; the same seed gives the same points."""
    chooser = random.Random(seed)
    kinds: list[str] = []
    while len(kinds) < kills:
        kinds += chooser.sample(KINDS, len(KINDS))
    return [
        Kill(kind, ROUNDS_PER_KILL * number, chooser.randrange(60))
        for number, kind in enumerate(kinds[:kills])
    ]


@dataclass
class Watched:
    """The facts of a living run, and the processes that this test keeps going."""

    run: subprocess.Popen[bytes]
    directory: Path
    apart: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    seen: list[tuple[int, Message]] = field(default_factory=list)
    more: anyio.Condition = field(default_factory=anyio.Condition)

    async def read(self, bus: Bus) -> None:
        async with bus.follow("EVENT") as records:
            async for record in records:
                async with self.more:
                    self.seen.append((record.sequence, record.message))
                    self.more.notify_all()

    async def until(self, reached: Callable[[], bool], what: str) -> None:
        """Wait for facts. Fails when the run ends first, or when nothing comes of it in time."""
        with anyio.move_on_after(RECOVERY_SECONDS) as scope:
            async with self.more:
                while not reached():
                    assert self.run.poll() is None, output(self.directory)
                    with anyio.move_on_after(1.0):
                        await self.more.wait()
        assert not scope.cancelled_caught, (
            f"no {what} within {RECOVERY_SECONDS:g} s\n{output(self.directory)}"
        )

    def trained(self) -> int:
        """The last round that is trained along the surviving weights, -1 before any."""
        return max((batch.round for batch in surviving(one for _, one in self.seen)), default=-1)

    def start_apart(self, name: str) -> None:
        address = read_address(self.directory / "nano")
        assert address is not None
        words = [sys.executable, "-m", "engine.cli", "role", name, "--connect", address.url, "--run", "nano"]
        words += ["--directory", str(self.directory / "nano")]
        environment = {**os.environ, "SPADE_BUS_TOKEN": address.token, "OMP_NUM_THREADS": "1"}
        self.apart[name] = spawn(words, self.directory, environment)

    def victim(self, kind: str) -> psutil.Process | None:
        if kind in self.apart:
            return psutil.Process(self.apart[kind].pid)
        marks = {"learner": "engine.cli role learner", "broker": "nats-server", "server": "vllm.entrypoints"}
        found = None
        for process in psutil.Process(self.run.pid).children(recursive=True):
            try:
                words = process.cmdline()
            except psutil.NoSuchProcess:  # a zombie is one too
                continue
            # the guard of a process has its whole command among its own words
            if marks[kind] in " ".join(words[:6]) and not any(
                "subprocess_guard" in word for word in words[:6]
            ):
                found = process  # the last one: a learner works in a fork of its first process
        return found

    async def kill(self, kind: str) -> None:
        with anyio.fail_after(RECOVERY_SECONDS):
            while (process := self.victim(kind)) is None:  # noqa: ASYNC110 - it may be starting again
                await anyio.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        if kind in self.apart:
            self.apart[kind].wait()
            self.start_apart(kind)


@asynccontextmanager
async def running(directory: Path, steps: int) -> AsyncIterator[Watched]:
    watched = Watched(start(directory, *SETTINGS, f"run.steps={steps}"), directory)
    try:
        with anyio.fail_after(RECOVERY_SECONDS):
            while (address := read_address(directory / "nano")) is None:
                assert watched.run.poll() is None, output(directory)
                await anyio.sleep(0.2)
        for name in APART:
            watched.start_apart(name)
        async with (
            connect(address.url, run="nano", role="test", instance="test", token=address.token) as bus,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(watched.read, bus)
            yield watched
            tasks.cancel_scope.cancel()
    finally:
        for process in (watched.run, *watched.apart.values()):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wanted(config: Config, seen: list[tuple[int, Message]]) -> dict[int, set[str]]:
    """Return the samples that each round owes, as a scorer computes them from the facts alone."""
    machine = Curriculum(config)
    commands = machine.start()
    for sequence, message in seen:
        commands += machine.apply(sequence, message)
    closed = [one.message for one in commands if isinstance(one, Publish)]
    return {
        one.round: {credit.sample for credit in one.credits} for one in closed if isinstance(one, RoundClosed)
    }


def due(config: Config, seen: Iterable[Message]) -> dict[str, int]:
    """The round of each designer sample that a fact names, from the arithmetic of the plan."""
    last = config.run.steps
    return {
        message.sample: min(cohort_plan.rounds_of(config.curriculum, message.cohort).due, last)
        for message in seen
        if isinstance(message, EnvironmentReady | DesignRejected) and message.sample
    }


def check(config: Config, seen: list[tuple[int, Message]]) -> list[BatchTrained]:
    """The ledger along the surviving weights. Returns its batches."""
    batches = surviving(message for _, message in seen)
    assert [one.round for one in batches] == list(range(len(batches))), "each round once, none left out"
    assert trained_twice(batches) == []
    owed = wanted(config, seen)
    for one in batches:
        got = set(one.trained) | {sample for sample, _ in one.dropped}
        assert got == owed.get(one.round, set()), (one.round, len(got), len(owed.get(one.round, set())))
        assert {cause for _, cause in one.dropped} <= {"stale"}
    return batches


async def test_whoever_is_killed_nothing_is_lost_or_trained_twice(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kills = schedule(request.config.getoption("--kill-seed"), request.config.getoption("--kills"))
    steps = ROUNDS_PER_KILL * len(kills) + 1
    config = recipe.load(RECIPE, [*SETTINGS, "run.name=nano", f"run.steps={steps}"]).config
    async with running(tmp_path, steps) as watched:
        await watched.until(lambda: bool(watched.seen), "first fact")
        for kill in kills:
            await watched.until(lambda kill=kill: watched.trained() >= kill.round, f"round {kill.round}")
            mark = len(watched.seen)
            await watched.until(
                lambda kill=kill, mark=mark: (
                    len(watched.seen) >= mark + kill.events or watched.trained() > kill.round
                ),
                "facts",
            )
            print(f"kill {kill.kind} after round {watched.trained()}, {len(watched.seen) - mark} facts later")
            before = watched.trained()
            await watched.kill(kill.kind)
            begun = anyio.current_time()
            await watched.until(
                lambda before=before: watched.trained() >= before + RECOVERED, f"round after {kill}"
            )
            print(f"  recovered after {anyio.current_time() - begun:.1f} s")
            check(config, watched.seen)
        assert await ended(watched.run) == 0, output(tmp_path)
        for process in watched.apart.values():
            assert await ended(process) == 0, output(tmp_path)
    await nothing_left(tmp_path)

    seen = await facts(tmp_path)
    batches = check(config, seen)
    assert batches[-1].final
    assert len(batches) == steps + 1
    rounds = due(config, (message for _, message in seen))
    designs = {sample: one.round for one in batches for sample in one.trained if sample in rounds}
    assert sum(one.designer_samples for one in batches) == len(designs) > 0
    late = {
        sample: (round_, rounds[sample]) for sample, round_ in designs.items() if round_ != rounds[sample]
    }
    assert late == {}
