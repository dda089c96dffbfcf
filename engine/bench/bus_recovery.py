"""How long the bus is away when its server is killed, and what is lost by it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import msgspec

from bus import Bus, connect, provision, serve
from engine.bench.bus_load import Sink, Supply
from engine.errors import SpadeError
from engine.telemetry import quiet_bus

_RUN = "recovery"
_RATE = 500.0
_SIZE = 1024
_WAIT_SECONDS = 60.0


class Recovery(msgspec.Struct, frozen=True):
    """Milliseconds from the kill to the first acknowledgement of a message that was written after it, and
    to that message's delivery; how many of all messages were lost, or delivered twice.
    """

    ack_ms: float
    delivery_ms: float
    lost: int
    duplicates: int


class _Watch:
    """Who was first after the kill. ``first`` is the index of the first message written after it."""

    def __init__(self) -> None:
        self.killed = self.acked = self.delivered = 0.0
        self.first = -1
        self.sink = Sink(ages=False)


async def measure(directory: Path, seconds: float) -> Recovery:
    """Send 500 messages of 1 KB a second, kill the server half-way, go on for ``seconds`` in all.

    Must run in the main thread. Raises SpadeError when a message does not arrive within a minute.
    """
    watch = _Watch()
    with quiet_bus():
        await _run(directory, seconds, watch)
    counts = watch.sink.outcome()
    return Recovery(
        ack_ms=1e3 * (watch.acked - watch.killed),
        delivery_ms=1e3 * (watch.delivered - watch.killed),
        lost=counts.lost,
        duplicates=counts.duplicates,
    )


async def _run(directory: Path, seconds: float, watch: _Watch) -> None:
    async with serve(directory, run=_RUN, sync="100ms", store_gb=1.0) as server:
        await provision(server.url, run=_RUN, token=server.token, store_gb=0.9)

        def kill() -> None:
            os.kill(server.pid, signal.SIGKILL)

        def client(role: str) -> AbstractAsyncContextManager[Bus]:
            return connect(server.url, run=_RUN, role=role, instance="one", token=server.token)

        async with client("producer") as producer, client("consumer") as consumer:
            try:
                with anyio.fail_after(seconds + _WAIT_SECONDS):
                    async with anyio.create_task_group() as group:
                        group.start_soon(_take, consumer, watch)
                        await _send(producer, watch, seconds, kill)
            except TimeoutError:
                taken, limit = watch.sink.taken, seconds + _WAIT_SECONDS
                raise SpadeError(f"{taken} messages arrived within {limit:g} s, but not all") from None


async def _send(bus: Bus, watch: _Watch, seconds: float, kill: Callable[[], None]) -> None:
    supply, began = Supply(_SIZE, work=False), time.monotonic()
    count = max(4, int(_RATE * seconds))
    for number in range(count):
        if number == count // 2:
            watch.first = number
            kill()
            watch.killed = time.monotonic()
        pause = began + number / _RATE - time.monotonic()
        if pause > 0:
            await anyio.sleep(pause)
        await bus.publish(supply.make(last=number == count - 1))
        if number == watch.first:
            watch.acked = time.monotonic()


async def _take(bus: Bus, watch: _Watch) -> None:
    async with bus.follow("SAMPLE") as records:
        async for record in records:
            watch.sink.take(record.envelope, record.message)
            if record.sequence == watch.first + 1:  # sequences count from 1, and nothing else is written
                watch.delivered = time.monotonic()
            if watch.sink.done:
                return
