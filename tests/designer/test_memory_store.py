"""Memory on disk: snapshots, their position, the archive, and what is left after a kill."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from scenes.memory_bus import MemoryBus
from scenes.small_run import failed, rejected
from test_memory import played, ready, scored, standing

from bus.messages import EnvironmentReady, Message
from engine.errors import SpadeError
from engine.records.archive import ProgramArchive
from roles.designer import memory_store
from roles.designer.memory import Memory
from roles.designer.memory_store import FILE, MemoryStore, read


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


def made(number: int) -> EnvironmentReady:
    return ready(number, environment=digest(ready(number).source))


def facts(count: int, *, seed: int = 1) -> list[Message]:
    """A history as a run writes it: programs, standings, verdicts, refused attempts, some never scored."""
    rng, result = random.Random(seed), list[Message]()
    for number in range(count):
        fact = made(number)
        result.append(fact)
        if rng.random() < 0.3:
            result.append(rejected(fact.design, document=f"doc{rng.randrange(4)}"))
        for old in range(max(0, number - 3), number + 1):
            state: Any = rng.choice(["frontier", "mastered", "intractable"])
            if old == number - 3 and rng.random() < 0.8:
                verdict = {"regret": rng.random(), "environment": made(old).environment}
                result.append(scored(old, state=state, **verdict))
            else:
                result.append(played(msgspec.structs.replace(standing(old, state), environment="")))
    rounds = iter(range(len(result)))
    return [
        msgspec.structs.replace(fact, round=next(rounds)) if fact.tail == "event.scorer.round" else fact
        for fact in result
    ]


async def bus_with(history: list[Message]) -> MemoryBus:
    bus = MemoryBus(run="test", role="scorer", instance="s")
    await bus.publish_all(history)
    return bus


class Life:
    """One life of a designer's memory."""

    def __init__(self, bus: MemoryBus, directory: Path, **options: Any) -> None:
        directory.mkdir(exist_ok=True)
        self.memory, self.used = Memory(10, open_windows=6), list[str]()
        self.store = MemoryStore(bus, directory, self.memory, self.used.append, **options)


async def begun(bus: MemoryBus, directory: Path, **options: Any) -> Life:
    """Return a life that has read its snapshot and the stream."""
    life = Life(bus, directory, **options)
    await life.store.read_back()
    return life


async def test_a_restart_replays_only_what_came_since(tmp_path: Path) -> None:
    history = facts(30)
    bus = await bus_with(history[:90])
    first = await begun(bus, tmp_path / "a")
    assert first.store.replayed == 90
    await bus.publish_all(history[90:])
    second = await begun(bus, tmp_path / "a")
    assert second.store.replayed == len(history) - 90
    whole = await begun(bus, tmp_path / "b")
    assert whole.store.replayed == len(history)
    assert second.memory.freeze() == whole.memory.freeze()
    assert sorted(second.used) == sorted(whole.used)
    assert len(second.memory) == 10


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(bytes(data))


def rewritten(**fields: Any) -> Callable[[Path], Any]:
    """Return what writes a snapshot with other ``fields`` in the place of the one that is there."""
    return lambda path: memory_store.write(path.parent, msgspec.structs.replace(read(path.parent), **fields))


@pytest.mark.parametrize(
    "harm",
    [
        Path.unlink,
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(path.read_bytes()[:-9]),
        flip,
        rewritten(run="another"),
        rewritten(key="of another stream"),
        rewritten(position=10_000),
    ],
)
async def test_a_snapshot_that_cannot_be_trusted_is_not_used(
    tmp_path: Path, harm: Callable[[Path], Any]
) -> None:
    history = facts(20)
    bus = await bus_with(history)
    before = await begun(bus, tmp_path)
    harm(tmp_path / FILE)
    after = await begun(bus, tmp_path)
    assert after.store.replayed == len(history)
    assert after.memory.freeze() == before.memory.freeze()
    assert sorted(after.used) == sorted(before.used)
    # and it has been repaired
    again = await begun(bus, tmp_path)
    assert again.store.replayed == 0
    assert again.memory.freeze() == before.memory.freeze()


class Told:
    """A log that keeps its warnings."""

    def __init__(self) -> None:
        self.warnings: list[dict[str, Any]] = []

    def warning(self, event: str, **fields: Any) -> None:
        self.warnings.append({"event": event, **fields})


async def test_what_the_stream_forgot_before_memory_knew_is_counted_and_said(tmp_path: Path) -> None:
    """A stream of bounded size drops its oldest facts: a memory that lacks them must not look whole."""
    history = facts(30)
    bus = await bus_with(history[:40])
    await begun(bus, tmp_path)
    await bus.publish_all(history[40:])
    await bus.purge("EVENT", below=61)
    log: Any = Told()
    life = await begun(bus, tmp_path, log=log)
    assert life.store.statistics()["memory_missed"] == 20
    (warning,) = log.warnings
    assert (warning["missed"], warning["known"], warning["first"]) == (20, 40, 61)
    assert "bus.store_gb" in warning["remedy"]
    # the same gap is not counted again, and not forgotten either
    again = await begun(bus, tmp_path, log=log)
    assert again.store.statistics()["memory_missed"] == 20
    assert len(log.warnings) == 1


async def test_what_a_snapshot_holds_may_be_forgotten(tmp_path: Path) -> None:
    """Also where other messages lie behind the last fact that concerns the memory."""
    history = facts(30)
    bus = await bus_with(history)
    await bus.publish_all([failed(f"e{number}") for number in range(9)])
    whole = await begun(bus, tmp_path)
    await bus.purge("EVENT", below=len(history) + 10)
    log: Any = Told()
    life = await begun(bus, tmp_path, log=log)
    assert (life.memory.freeze(), log.warnings) == (whole.memory.freeze(), [])
    assert life.store.statistics()["memory_missed"] == 0


async def test_following_learns_and_saves(tmp_path: Path) -> None:
    history = facts(12)
    bus = await bus_with(history[:20])
    life = await begun(bus, tmp_path, seconds=0.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(life.store.follow)
        await bus.publish_all(history[20:])
        with anyio.fail_after(60):
            while (found := read(tmp_path)) is None or found.position < len(history):
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert life.memory.freeze() == (await begun(bus, tmp_path / "b")).memory.freeze()
    snapshot = read(tmp_path)
    assert snapshot.position == len(history)
    assert set(ProgramArchive(tmp_path)) == {
        fact.environment for fact in history if isinstance(fact, EnvironmentReady)
    }


CHILD = """
import sys, anyio
from pathlib import Path
from test_memory_store import begun, bus_with, facts

async def main(directory):
    history = facts(60)
    bus = await bus_with(history[:1])
    life = await begun(bus, directory, seconds=0.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(life.store.follow)
        for fact in history[1:]:
            await bus.publish(fact)
            await anyio.sleep(0.001)
            print(life.store.position, flush=True)

anyio.run(main, Path(sys.argv[1]))
"""


def killed(directory: Path, at: int) -> None:
    """Let a designer's memory live in a process of its own until it has learned ``at`` facts."""
    here = Path(__file__).resolve()
    path = os.pathsep.join([str(here.parent), str(here.parents[1]), str(here.parents[2])])
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    with child:
        try:
            for line in child.stdout:
                if int(line) >= at:
                    break
        finally:
            child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("at", [7, 60])
async def test_memory_after_a_kill_equals_memory_before(tmp_path: Path, at: int) -> None:
    """A designer that saves after every fact is killed; the next life continues from the last snapshot."""
    killed(tmp_path, at)
    history = facts(60)
    bus = await bus_with(history)
    life = await begun(bus, tmp_path)
    assert 0 < life.store.replayed <= len(history) - at + 2
    whole = await begun(bus, tmp_path / "b")
    assert life.memory.freeze() == whole.memory.freeze()
    assert sorted(life.used) == sorted(whole.used)
    views = [
        one.memory.draw("Logic", positive=3, negative=2, rng=random.Random(4)).views(len, 1 << 30)
        for one in (life, whole)
    ]
    assert views[0] == views[1] != []


async def test_a_disk_that_takes_no_more_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(memory_store, "write", full)
    bus = await bus_with(facts(3))
    with pytest.raises(SpadeError, match=r"No space left.*Make room"):
        await begun(bus, tmp_path)


def test_the_archive_holds_what_was_put(tmp_path: Path) -> None:
    archive = ProgramArchive(tmp_path)
    assert list(archive) == []
    name = archive.put("class GameEnv: ...\n")
    assert name == digest("class GameEnv: ...\n")
    assert archive.put("class GameEnv: ...\n") == name
    assert archive.get(name) == "class GameEnv: ...\n"
    assert list(archive) == [name]
    assert archive.get("0" * 64) is None
    archive.path(name).write_text("something else")
    assert archive.get(name) is None
