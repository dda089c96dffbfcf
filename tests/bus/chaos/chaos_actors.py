"""The processes of the chaos test. Each may be killed at any instant; each owes exactly-once effects.

Run as ``python chaos_actors.py ROLE INSTANCE DIRECTORY``. What an actor must remember lies in one file that
is replaced as a whole; SIGTERM lets it finish what is in hand.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from chaos_plan import Ledger, answer, piece, sample

from bus import Bus, Delivery, Record, connect
from bus.messages import EpisodeFinished, EpisodeRequest, EpisodeSample

BACKLOG = 400
_BATCH = 20
_PACE_SECONDS = 0.1
_AGAIN = 0.05
_READ = 64
_IDLE_SECONDS = 0.05


@dataclass(frozen=True)
class Place:
    """The place of an actor: ``seed`` of the test, the file of its memory."""

    instance: str
    directory: Path
    seed: int

    @property
    def memory(self) -> Path:
        return self.directory / f"{self.instance}.json"

    def load(self) -> dict[str, Any]:
        """Return what was remembered, empty at the first start."""
        return json.loads(self.memory.read_text()) if self.memory.exists() else {}

    def save(self, content: dict[str, Any]) -> None:
        """Remember ``content``: all of it or what was there before."""
        scratch = self.memory.with_suffix(".tmp")
        with scratch.open("w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self.memory)

    def ready(self) -> None:
        """Say that this process runs."""
        (self.directory / f"{self.instance}.ready").write_text(str(os.getpid()))


async def gather(records: AsyncIterator[Record], stop: anyio.Event) -> list[Record]:
    """Return the next records, at most 64; fewer when there is a pause, none when told to stop."""
    found: list[Record] = []
    while len(found) < _READ and not (stop.is_set() and not found):
        with anyio.move_on_after(_IDLE_SECONDS):
            found.append(await anext(records))
            continue
        if found:
            break
    return found


async def produce(bus: Bus, place: Place, stop: anyio.Event) -> None:
    """Publish piece after piece. What was not noted before a kill is repeated; so are old ones."""
    number = place.load().get("next", 0)
    chance = random.Random(f"{place.seed}/{place.instance}/{number}")
    place.ready()
    while not stop.is_set():
        await anyio.sleep(_PACE_SECONDS)
        if (await bus.stream_info("TASK")).messages > BACKLOG:
            continue
        numbers = list(range(number, number + _BATCH))
        if number and chance.random() < _AGAIN:
            old = chance.randrange(0, number, _BATCH)
            numbers += range(old, old + _BATCH)
        await bus.publish_all(piece(place.instance, one, place.seed) for one in numbers)
        number += _BATCH
        place.save({"next": number})


async def work(bus: Bus, place: Place, stop: anyio.Event) -> None:
    """Answer pieces: the result is stored before the piece is acknowledged."""
    async with bus.consume("agent", limit=16) as source, anyio.create_task_group() as group:
        place.ready()
        group.start_soon(_cancel_when, stop, group.cancel_scope)
        async for delivery in source:
            group.start_soon(_answer, bus, place, delivery)


async def _answer(bus: Bus, place: Place, delivery: Delivery) -> None:
    assert isinstance(delivery.message, EpisodeRequest)
    await anyio.sleep(random.uniform(0.001, 0.02))
    await bus.publish(answer(delivery.message, place.instance))
    await delivery.ack()


async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


async def score(bus: Bus, place: Place, stop: anyio.Event) -> None:
    """Turn each result into a sample: samples are stored before the position is noted."""
    state = place.load() or {"position": 0, "ledger": Ledger().dump(), "again": 0}
    ledger = Ledger.load(state["ledger"])
    start = state["position"] + 1
    async with bus.follow("EVENT", start=start, tails=["event.agent.finished"]) as records:
        place.ready()
        while not stop.is_set():
            batch = await gather(records, stop)
            if not batch:
                continue
            results = [record.message for record in batch if isinstance(record.message, EpisodeFinished)]
            fresh = [result for result in results if ledger.add(result.design, result.index)]
            await bus.publish_all(map(sample, fresh))
            state = {
                "position": batch[-1].sequence,
                "ledger": ledger.dump(),
                "again": state["again"] + len(results) - len(fresh),
            }
            place.save(state)


async def learn(bus: Bus, place: Place, stop: anyio.Event) -> None:
    """Count each sample once: sum, ledger and cursor are one checkpoint, and then the stream is purged."""
    state = place.load() or {"cursor": 0, "ledger": Ledger().dump(), "total": 0, "count": 0, "again": 0}
    ledger = Ledger.load(state["ledger"])
    async with bus.follow("SAMPLE", start=state["cursor"] + 1) as records:
        place.ready()
        while not stop.is_set():
            batch = await gather(records, stop)
            if not batch:
                continue
            for record in batch:
                assert isinstance(record.message, EpisodeSample)
                producer, _, number = record.message.episode.rpartition("-")
                if ledger.add(producer, int(number)):
                    state["total"] += record.message.round
                    state["count"] += 1
                else:
                    state["again"] += 1
            state |= {"cursor": batch[-1].sequence, "ledger": ledger.dump()}
            place.save(state)
            await bus.purge("SAMPLE", below=state["cursor"] + 1)


Actor = Callable[[Bus, Place, anyio.Event], Awaitable[None]]
ACTORS: dict[str, Actor] = {
    "producer": produce,
    "worker": work,
    "scorer": score,
    "learner": learn,
}


def _die_with_parent() -> None:
    """A killed test leaves no actor behind."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


async def _stop_on_signal(stop: anyio.Event) -> None:
    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            stop.set()


async def main(role: str, instance: str, directory: Path) -> None:
    """Join the run that ``world.json`` names and act until SIGTERM."""
    world = json.loads((directory / "world.json").read_text())
    stop = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(_stop_on_signal, stop)
        async with connect(
            world["url"], run=world["run"], role=role, instance=instance, token=world["token"]
        ) as bus:
            await ACTORS[role](bus, Place(instance, directory, world["seed"]), stop)
        group.cancel_scope.cancel()


if __name__ == "__main__":
    _die_with_parent()
    name, own, where = sys.argv[1:]
    anyio.run(
        functools.partial(main, name, own, Path(where)),
        backend="asyncio",
        backend_options={"use_uvloop": True},
    )
