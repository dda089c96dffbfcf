"""Our own paths: how the roles use the bus, over a server and in one process."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio

from bus import Bus, MemoryBus, connect
from bus.messages import Message
from engine.bench.bus_job import Job, Outcome
from engine.bench.bus_load import Sink, Supply

_CALL = 4096
_CALL_BYTES = 64 << 20
_PURGE = 8192
_PURGE_BYTES = 64 << 20
_HELD = 512


class Producer:
    """Sends through ``publish_all`` and ``publish``: both return when the server has stored."""

    def __init__(self, bus: Bus, job: Job) -> None:
        self._bus = bus
        self.most = max(1, min(_CALL, _CALL_BYTES // job.size))

    async def send_all(self, supply: Supply, deadline: float) -> None:
        """Send until the deadline, then what tells the consumer that it was all."""
        while time.monotonic() < deadline:
            await self._bus.publish_all(supply.until(deadline, self.most))
        await self.send(supply.make(last=True))

    async def send(self, message: Message) -> None:
        """Send one message."""
        await self._bus.publish(message)


async def take_samples(bus: Bus, job: Job, sink: Sink) -> Outcome:
    """Read the sample stream as the learner does: what is done with is purged."""
    every = max(1, min(_PURGE, _PURGE_BYTES // job.size))
    if job.rate:
        every = max(1, min(every, int(job.rate)))
    async with bus.follow("SAMPLE") as records:
        _ready()
        async for record in records:
            sink.take(record.envelope, record.message)
            if sink.done or sink.taken % every == 0:
                await bus.purge("SAMPLE", below=record.sequence + 1)
            if sink.done:
                break
        return sink.outcome()


async def take_work(bus: Bus, job: Job, sink: Sink) -> Outcome:
    """Take work as an agent does: each piece is acknowledged when it is done."""
    async with bus.consume("agent", limit=_HELD) as work:
        _ready()
        async for delivery in work:
            sink.take(delivery.envelope, delivery.message)
            await delivery.ack()
            if sink.done:
                break
    # The context has seen every acknowledgement confirmed.
    return sink.outcome()


def _ready() -> None:
    print("ready", flush=True)


@asynccontextmanager
async def client(where: dict[str, Any], role: str) -> AsyncIterator[Bus]:
    """Connect to the server of the case."""
    async with connect(
        where["url"], run=where["run"], role=role, instance="one", token=where["token"]
    ) as bus:
        yield bus


async def in_memory(job: Job) -> Outcome:
    """Send and take within one process over the in-memory bus."""
    bus = MemoryBus(run="bench", role="producer", instance="one", task_limit=64)
    supply, sink = Supply(job.size, work=True), Sink(ages=job.rate > 0)
    deadline, first = time.monotonic() + job.seconds, time.monotonic()

    async def produce() -> None:
        while time.monotonic() < deadline:
            await bus.publish_all(supply.until(deadline, 64))
        await bus.publish(supply.make(last=True))

    async with anyio.create_task_group() as group:
        group.start_soon(produce)
        async with bus.peer("agent", "one").consume("agent", limit=64) as work:
            async for delivery in work:
                sink.take(delivery.envelope, delivery.message)
                await delivery.ack()
                if sink.done:
                    break
    outcome = sink.outcome()
    outcome.first = first
    return outcome
