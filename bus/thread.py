"""The bus on an event loop of its own, so that a caller may block its loop for as long as it likes.

What must happen in time (leases of work, answers, heartbeats, reconnecting) happens over there; calls and
items cross by ``bus.bridge``. An acknowledgement is posted: it is on its way when ``ack`` returns.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import anyio
from anyio.lowlevel import checkpoint

from bus.blob import CHUNK
from bus.bridge import Bridge, Channel, FarThread, tell
from bus.interface import (
    Announcement,
    BlobInfo,
    Blobs,
    Bus,
    Delivery,
    Lease,
    Present,
    Record,
    Source,
    StreamInfo,
    Verdict,
)
from bus.messages import Message, RoleHello
from bus.scopes import flat_task_group

_AHEAD = 64
_LISTEN_AHEAD = 1024
_STATISTICS_TRIES = 8


class ThreadBus(Bus):
    """A bus that lives in another thread. Made by ``connect(..., own_thread=True)``.

    Besides what the bus itself holds, at most 64 records or deliveries of a reader (fewer when their bodies
    travel as blobs) and 1024 messages without a stream lie between the threads.
    """

    def __init__(self, bus: Bus, bridge: Bridge) -> None:
        super().__init__(run=bus.run, role=bus.role, instance=bus.instance)
        self._bus, self._bridge = bus, bridge
        self._blobs = _ThreadBlobs(bus.blobs, bridge)

    async def publish(self, message: Message) -> int:
        return await self._bridge.call(lambda: self._bus.publish(message))

    async def publish_all(self, messages: Iterable[Message]) -> list[int]:
        batch = list(messages)
        return await self._bridge.call(lambda: self._bus.publish_all(batch))

    @asynccontextmanager
    async def consume(
        self, consumer: str, *, limit: int, now: Callable[[], int] | None = None
    ) -> AsyncIterator[AsyncIterator[Delivery]]:
        channel = Channel[Delivery](self._bridge, _AHEAD, _weight)
        async with self._bridge.hold(
            lambda: self._bus.consume(consumer, limit=limit, now=now),
            lambda source: channel.serve(source, self._bring_home),
        ):
            yield channel

    def _bring_home(self, far: Delivery) -> Delivery:
        """Return a delivery whose verdict goes over there."""

        async def settle(delivery: Delivery, verdict: Verdict, delay: float, reason: str) -> None:
            if verdict == "term":
                await self._bridge.call(lambda: far.term(reason))
                return
            self._bridge.post(far.ack if verdict == "ack" else lambda: far.nak(delay))
            await checkpoint()

        return Delivery(
            message=far.message,
            sequence=far.sequence,
            tail=far.tail,
            attempt=far.attempt,
            envelope=far.envelope,
            settle=settle,
            blob=far.blob,
        )

    @asynccontextmanager
    async def follow(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[AsyncIterator[Record]]:
        channel = Channel[Record](self._bridge, _AHEAD, _weight)
        async with self._bridge.hold(
            lambda: self._bus.follow(stream, start=start, tails=tails), channel.serve
        ):
            yield channel

    async def replay(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[Record]:
        far = self._bus.replay(stream, start=start, tails=tails)
        try:
            while batch := await self._bridge.call(lambda: _some(far)):
                for record in batch:
                    yield record
        finally:
            if not self._bridge.closed:
                with anyio.CancelScope(shield=True):
                    await self._bridge.call(lambda: _close(far))

    @asynccontextmanager
    async def listen(self, tail: str) -> AsyncIterator[AsyncIterator[Message]]:
        channel = Channel[Message](self._bridge, _LISTEN_AHEAD)
        async with self._bridge.hold(lambda: self._bus.listen(tail), channel.serve):
            yield channel

    async def get(self, stream: str, sequence: int) -> Message:
        return await self._bridge.call(lambda: self._bus.get(stream, sequence))

    async def last(self, tail: str) -> Record | None:
        return await self._bridge.call(lambda: self._bus.last(tail))

    async def purge(self, stream: str, *, below: int | None = None, tail: str | None = None) -> int:
        return await self._bridge.call(lambda: self._bus.purge(stream, below=below, tail=tail))

    async def stream_info(self, stream: str) -> StreamInfo:
        return await self._bridge.call(lambda: self._bus.stream_info(stream))

    async def state_get(self, key: str) -> tuple[int, bytes] | None:
        return await self._bridge.call(lambda: self._bus.state_get(key))

    async def state_put(self, key: str, value: bytes) -> int:
        return await self._bridge.call(lambda: self._bus.state_put(key, value))

    async def state_update(self, key: str, value: bytes, revision: int) -> int:
        return await self._bridge.call(lambda: self._bus.state_update(key, value, revision))

    @asynccontextmanager
    async def lease(self, name: str, *, ttl: float = 10.0, wait: float = 30.0) -> AsyncIterator[Lease]:
        lost = anyio.Event()

        async def watch(far: Lease) -> None:
            await far.lost.wait()
            tell(self._bridge.home, lost.set)

        async with self._bridge.hold(lambda: self._bus.lease(name, ttl=ttl, wait=wait), watch) as far:
            yield Lease(far.revision, lost)

    @property
    def blobs(self) -> Blobs:
        return self._blobs

    @asynccontextmanager
    async def announce(self, hello: RoleHello) -> AsyncIterator[Announcement]:
        async with self._bridge.hold(lambda: self._bus.announce(hello)) as far:
            yield far  # its update only sets an attribute

    async def present(self) -> list[Present]:
        return await self._bridge.call(self._bus.present)

    def statistics(self) -> dict[str, float]:
        for _ in range(_STATISTICS_TRIES):
            try:
                return {**self._bus.statistics(), **self._bridge.statistics()}
            except RuntimeError:  # a dict grew over there while we read it
                continue
        return self._bridge.statistics()


class _ThreadBlobs(Blobs):
    """Blobs of a bus in another thread."""

    def __init__(self, blobs: Blobs, bridge: Bridge) -> None:
        self._far, self._bridge = blobs, bridge

    async def put(self, name: str, source: Source) -> BlobInfo:
        return await self._bridge.call(lambda: self._far.put(name, source))

    async def get(self, name: str) -> bytes:
        return await self._bridge.call(lambda: self._far.get(name))

    async def save(self, name: str, path: Path) -> BlobInfo:
        return await self._bridge.call(lambda: self._far.save(name, path))

    async def bound(self) -> float:
        return await self._bridge.call(self._far.bound)

    async def info(self, name: str) -> BlobInfo | None:
        return await self._bridge.call(lambda: self._far.info(name))

    async def remove(self, name: str) -> bool:
        return await self._bridge.call(lambda: self._far.remove(name))


def _weight(item: Record | Delivery) -> int:
    return 1 + item.blob // CHUNK


async def _some(source: AsyncIterator[Record]) -> list[Record]:
    """Return the next records: 64, fewer when they are heavy, none at the end."""
    found: list[Record] = []
    weight = 0
    async for record in source:
        found.append(record)
        weight += _weight(record)
        if weight >= _AHEAD:
            break
    return found


async def _close(source: AsyncIterator[Record]) -> None:
    if hasattr(source, "aclose"):
        await source.aclose()


@asynccontextmanager
async def on_own_thread(
    context: Callable[[], AbstractAsyncContextManager[Bus]], *, name: str
) -> AsyncIterator[ThreadBus]:
    """Open a bus on the loop of a new thread and offer it to this one."""
    thread = FarThread(context, name)
    try:
        await thread.start()
        async with flat_task_group() as group:
            group.start_soon(thread.watch)
            try:
                yield ThreadBus(thread.value, thread.bridge)
            finally:
                group.cancel_scope.cancel()
    finally:
        await thread.stop()
