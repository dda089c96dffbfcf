"""What one side of a case does: produce, consume, time single messages."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

import anyio
import anyio.to_thread

from bus.messages import Message
from engine.bench import bus_paths, bus_peers
from engine.bench.bus_job import Job, Outcome
from engine.bench.bus_load import Sink, Supply, encode

_OURS = {"sample": bus_paths.take_samples, "work": bus_paths.take_work}
_WARM = 64


class _Producer(Protocol):
    async def send_all(self, supply: Supply, deadline: float) -> None: ...

    async def send(self, message: Message) -> None: ...


@asynccontextmanager
async def _producer(job: Job) -> AsyncIterator[_Producer]:
    if job.transport in _OURS:
        async with bus_paths.client(job.where, "producer") as bus:
            yield bus_paths.Producer(bus, job)
        return
    peer = bus_peers.PRODUCERS[job.transport](job.where)
    try:
        yield bus_peers.Sender(peer, job.size)
    finally:
        peer.close()


async def _wait_for_go() -> None:
    print("ready", flush=True)
    await anyio.to_thread.run_sync(sys.stdin.readline)


async def _produce(job: Job) -> Outcome:
    supply = Supply(job.size, work=job.transport == "work")
    frame = len(encode(Supply(job.size, work=job.transport == "work").make()))
    async with _producer(job) as producer:
        await _wait_for_go()
        first, cpu = time.monotonic(), time.process_time()
        if job.rate:
            await _paced(producer, supply, job, first)
        else:
            await producer.send_all(supply, first + job.seconds)
        return Outcome(
            messages=supply.made,
            first=first,
            last=time.monotonic(),
            cpu=time.process_time() - cpu,
            frame=frame,
        )


async def _paced(producer: _Producer, supply: Supply, job: Job, first: float) -> None:
    """Send ``rate`` messages a second; one that is late does not delay the plan of the others."""
    count = max(2, int(job.rate * job.seconds))
    for number in range(count):
        pause = first + number / job.rate - time.monotonic()
        if pause > 0:
            await anyio.sleep(pause)
        await producer.send(supply.make(last=number == count - 1))


async def _latency(job: Job) -> Outcome:
    """Send one message after the other and time until each is accepted."""
    supply, taken = Supply(job.size, work=False), list[float]()
    async with _producer(job) as producer:
        for _ in range(_WARM):
            await producer.send(supply.make())
        await _wait_for_go()
        first = time.monotonic()
        while time.monotonic() < first + job.seconds:
            message = supply.make()
            began = time.perf_counter()
            await producer.send(message)
            taken.append(1e3 * (time.perf_counter() - began))
        return Outcome(messages=len(taken), first=first, last=time.monotonic(), milliseconds=taken)


async def _consume(job: Job) -> Outcome:
    sink = Sink(ages=job.rate > 0)
    if job.transport in _OURS:
        async with bus_paths.client(job.where, "agent") as bus:
            return await _OURS[job.transport](bus, job, sink)
    peer = bus_peers.CONSUMERS[job.transport](job.where, sink)
    try:
        return bus_peers.take(peer, sink)
    finally:
        peer.close()


async def _work(job: Job) -> Outcome:
    match job.side:
        case "produce":
            return await _produce(job)
        case "latency":
            return await _latency(job)
        case "consume":
            return await _consume(job)
        case "memory":
            return await bus_paths.in_memory(job)
    raise ValueError(f"no side {job.side!r}")


def run(job: Job) -> Outcome:
    """Do one side of a transport's case, on the event loop that the roles use."""
    return anyio.run(_work, job, backend_options={"use_uvloop": True})
