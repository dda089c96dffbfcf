"""A bus within one process, for tests of roles.

``tests/bus/test_bus_contract.py`` and its neighbours hold it to the behaviour of the bus over NATS.
Messages are stored as frames, so encoding errors show here too.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel

from bus import Blobs, Bus, Delivery, Lease, Record, StreamInfo, codec
from bus.access import queue_of
from bus.concurrency import ArrivalQueue, flat_task_group
from bus.errors import BusError, BusUnavailable, Conflict, NotFound, Undecodable, UnknownKind
from bus.follow import check_followed, check_position
from bus.messages import DeadLetter, Message
from bus.objects import BlobInfo, Source
from bus.subjects import STREAMS, Consumer, Names, stream_of
from bus.work import Verdict

_LISTEN_LIMIT = 4096
_LOOK_SECONDS = 0.05  # a momentary limit announces no change


def matches(pattern: str, tail: str) -> bool:
    """Return whether ``tail`` lies in ``pattern`` (``*`` is one token, a last ``>`` one or more)."""
    wanted, tokens = pattern.split("."), tail.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(
        want in ("*", token) for want, token in zip(wanted, tokens, strict=True)
    )


def overlap(first: str, second: str) -> bool:
    """Return whether some tail lies in both patterns."""
    one, two = first.split("."), second.split(".")
    for left, right in zip(one, two, strict=False):
        if left == ">" or right == ">":
            return True
        if left != right and "*" not in (left, right):
            return False
    return len(one) == len(two)


class Signal:
    """Wakes everybody who waits for a change."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def fire(self) -> None:
        self._event.set()
        self._event = anyio.Event()

    async def wait(self, seconds: float = math.inf) -> None:
        with anyio.move_on_after(seconds):
            await self._event.wait()


@dataclass(slots=True)
class Stored:
    tail: str
    frame: bytes
    ready_at: float = 0.0
    attempts: int = 0
    holder: object | None = None


@dataclass(slots=True)
class Log:
    """One stream."""

    kind: str
    most: int
    last: int = 0
    messages: dict[int, Stored] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)

    def first(self) -> int:
        return next(iter(self.messages), self.last + 1)

    def append(self, tail: str, frame: bytes, key: str) -> int:
        if STREAMS[self.kind].per_subject == 1:
            for sequence in [number for number, stored in self.messages.items() if stored.tail == tail]:
                del self.messages[sequence]
        self.last += 1
        self.messages[self.last] = Stored(tail, frame)
        self.ids[key] = self.last
        return self.last


@dataclass(slots=True)
class Right:
    holder: object
    who: str
    revision: int
    expires: float


class MemoryBlobs(Blobs):
    """Named bytes in a dict."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[BlobInfo, bytes]] = {}

    def size(self) -> int:
        return sum(info.size for info, _ in self._values.values())

    async def put(self, name: str, source: Source) -> BlobInfo:
        await anyio.lowlevel.checkpoint()
        data = source.read_bytes() if isinstance(source, Path) else source
        info = BlobInfo(secrets.token_hex(8), len(data), hashlib.sha256(data).digest(), 1 << 20)
        self._values[name] = (info, data)
        return info

    async def get(self, name: str) -> bytes:
        await anyio.lowlevel.checkpoint()
        if name not in self._values:
            raise NotFound(f"no blob {name}")
        return self._values[name][1]

    async def save(self, name: str, path: Path) -> BlobInfo:
        data = await self.get(name)
        path.write_bytes(data)  # noqa: ASYNC240 (a test)
        return self._values[name][0]

    async def bound(self) -> float:
        return math.inf

    async def info(self, name: str) -> BlobInfo | None:
        await anyio.lowlevel.checkpoint()
        return self._values[name][0] if name in self._values else None

    async def remove(self, name: str) -> bool:
        await anyio.lowlevel.checkpoint()
        return self._values.pop(name, None) is not None


class Broker:
    """The state that the peers of one MemoryBus share."""

    def __init__(self, task_limit: int) -> None:
        self.logs = {
            kind: Log(kind, task_limit if stream.work else 1 << 62) for kind, stream in STREAMS.items()
        }
        self.values: dict[str, tuple[int, bytes]] = {}
        self.rights: dict[str, Right] = {}
        self.revision = 0
        self.changed = Signal()
        self.listeners: dict[ArrivalQueue[Message], str] = {}
        self.blobs = MemoryBlobs()

    def log(self, stream: str) -> Log:
        if stream not in self.logs:
            raise BusError(f"unknown stream {stream!r}", remedy=f"One of {', '.join(self.logs)}.")
        return self.logs[stream]

    def next_revision(self) -> int:
        self.revision += 1
        return self.revision


class MemoryBus(Bus):
    """A bus whose streams live in this process. ``peer`` makes further clients of the same bus.

    ``task_limit`` is how much work may wait before publishers do.
    """

    def __init__(
        self, *, run: str, role: str, instance: str, task_limit: int = 20_000, broker: Broker | None = None
    ) -> None:
        self.run, self.role, self.instance = run, role, instance
        self.names = Names(run)
        self._broker = broker or Broker(task_limit)
        self.blobs = self._broker.blobs
        self.figures = {"memory_stored": 0.0, "memory_undecodable": 0.0}

    def peer(self, role: str, instance: str) -> MemoryBus:
        """Return another client of the same bus."""
        return MemoryBus(run=self.run, role=role, instance=instance, broker=self._broker)

    def inject(self, stream: str, tail: str, frame: bytes, key: str) -> int:
        """Store raw bytes, as a client of another version would. Returns the sequence."""
        sequence = self._broker.log(stream).append(tail, frame, key)
        self._broker.changed.fire()
        return sequence

    async def publish(self, message: Message) -> int:
        await anyio.lowlevel.checkpoint()
        frame = codec.encode(message, run=self.run, role=self.role, instance=self.instance)
        if not message.stream:
            self._say(message.tail, frame)
            return 0
        log = self._broker.log(message.stream)
        while message.key not in log.ids and len(log.messages) >= log.most:
            await self._broker.changed.wait()
        if message.key in log.ids:
            return log.ids[message.key]
        self.figures["memory_stored"] += 1
        sequence = log.append(message.tail, frame, message.key)
        self._broker.changed.fire()
        return sequence

    def _say(self, tail: str, frame: bytes) -> None:
        for mailbox, pattern in self._broker.listeners.items():
            if matches(pattern, tail):
                mailbox.put(codec.decode(frame)[1])

    async def publish_all(self, messages: Iterable[Message]) -> list[int]:
        return [await self.publish(message) for message in messages]

    @asynccontextmanager
    async def consume(
        self, consumer: str, *, limit: int, now: Callable[[], int] | None = None
    ) -> AsyncIterator[AsyncIterator[Delivery]]:
        queue = queue_of(consumer, self.role)
        if limit < 1:
            raise BusError(f"limit {limit} takes no work")
        work = _Work(self, self._broker, queue, limit, now)
        try:
            yield work
        finally:
            work.leave()

    @asynccontextmanager
    async def follow(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[AsyncIterator[Record]]:
        check_followed(stream)
        check_position(stream, start, self._broker.log(stream).last)
        yield _Reader(self, self._broker, stream, start, list(tails or ()), None)

    async def replay(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[Record]:
        last = self._broker.log(stream).last
        check_position(stream, start, last)
        async for record in _Reader(self, self._broker, stream, start, list(tails or ()), last):
            yield record

    async def bury(self, stream: str, sequence: int, stored: Stored, reason: str) -> None:
        """Copy a message that cannot be used to the dead-letter stream."""
        if stream == "DLQ":
            return
        await self.publish(
            DeadLetter(
                source=stream,
                sequence=sequence,
                subject=stored.tail,
                reason=reason,
                attempts=max(1, stored.attempts),
                frame=stored.frame,
            )
        )

    @asynccontextmanager
    async def listen(self, tail: str) -> AsyncIterator[AsyncIterator[Message]]:
        mailbox: ArrivalQueue[Message] = ArrivalQueue(limit=_LISTEN_LIMIT)
        self._broker.listeners[mailbox] = tail
        try:
            yield mailbox
        finally:
            del self._broker.listeners[mailbox]

    async def get(self, stream: str, sequence: int) -> Message:
        await anyio.lowlevel.checkpoint()
        stored = self._broker.log(stream).messages.get(sequence)
        if stored is None:
            raise NotFound(f"no message {sequence} of {stream}")
        return codec.decode(stored.frame)[1]

    async def last(self, tail: str) -> Record | None:
        await anyio.lowlevel.checkpoint()
        for sequence, stored in reversed(self._broker.log(stream_of(tail)).messages.items()):
            if stored.tail == tail:
                envelope, message = codec.decode(stored.frame)
                return Record(sequence, message, tail, envelope)
        return None

    async def purge(self, stream: str, *, below: int | None = None, tail: str | None = None) -> int:
        await anyio.lowlevel.checkpoint()
        log = self._broker.log(stream)
        gone = [
            sequence
            for sequence, stored in log.messages.items()
            if (below is None or sequence < below) and (tail is None or matches(tail, stored.tail))
        ]
        for sequence in gone:
            del log.messages[sequence]
        self._broker.changed.fire()
        return len(gone)

    async def stream_info(self, stream: str) -> StreamInfo:
        await anyio.lowlevel.checkpoint()
        log = self._broker.log(stream)
        size = sum(len(stored.frame) for stored in log.messages.values())
        if stream == "BLOB":
            size = self._broker.blobs.size()
        return StreamInfo(log.first(), log.last, len(log.messages), size)

    async def state_get(self, key: str) -> tuple[int, bytes] | None:
        await anyio.lowlevel.checkpoint()
        self.names.key("STATE", key)
        return self._broker.values.get(key)

    async def state_put(self, key: str, value: bytes) -> int:
        found = await self.state_get(key)
        return await self.state_update(key, value, found[0] if found else 0)

    async def state_update(self, key: str, value: bytes, revision: int) -> int:
        self.names.key("STATE", key)
        found = self._broker.values.get(key)
        if (found[0] if found else 0) != revision:
            raise Conflict(f"{key} is no longer at revision {revision}")
        self._broker.values[key] = (self._broker.next_revision(), bytes(value))
        return self._broker.revision

    @asynccontextmanager
    async def lease(self, name: str, *, ttl: float = 10.0, wait: float = 30.0) -> AsyncIterator[Lease]:
        right = await self._acquire(name, ttl, wait)
        lease = Lease(right.revision)
        try:
            async with flat_task_group() as group:
                group.start_soon(self._renew, name, right, lease, ttl)
                try:
                    yield lease
                finally:
                    group.cancel_scope.cancel()
        finally:
            if self._broker.rights.get(name) is right:
                del self._broker.rights[name]

    async def _acquire(self, name: str, ttl: float, wait: float) -> Right:
        deadline = anyio.current_time() + wait
        while True:
            now, other = anyio.current_time(), self._broker.rights.get(name)
            if other is None or other.expires <= now:
                who = f"{self.role}/{self.instance}"
                right = Right(object(), who, self._broker.next_revision(), now + ttl)
                self._broker.rights[name] = right
                return right
            if now >= deadline:
                raise BusUnavailable(
                    f"lease {name}, held by {other.who},", wait, remedy="Does another one run?"
                )
            await anyio.sleep(min(ttl / 10, max(0.0, deadline - now)))

    async def _renew(self, name: str, right: Right, lease: Lease, ttl: float) -> None:
        while (
            self._broker.rights.get(name) is right
        ):  # late on a busy machine, it is ours while no one takes it
            right.expires = anyio.current_time() + ttl
            await anyio.sleep(ttl / 3)
        lease.lost.set()

    def statistics(self) -> dict[str, float]:
        return dict(self.figures)


class _Reader:
    """One ``follow``, or one ``replay`` up to ``last``."""

    def __init__(
        self, bus: MemoryBus, broker: Broker, stream: str, start: int, patterns: list[str], last: int | None
    ) -> None:
        self._bus, self._broker, self._log = bus, broker, broker.log(stream)
        self._patterns, self._position, self._last = patterns, max(1, start), last

    def __aiter__(self) -> _Reader:
        return self

    async def __anext__(self) -> Record:
        while self._last is None or self._position <= self._last:
            await anyio.lowlevel.checkpoint()
            if self._position > self._log.last:
                await self._broker.changed.wait()
                continue
            stored, sequence = self._log.messages.get(self._position), self._position
            self._position += 1
            if stored is None or not self._takes(stored.tail):
                continue
            try:
                envelope, message = codec.decode(stored.frame)
            except Undecodable as error:
                if isinstance(error, UnknownKind) and self._log.kind == "EVENT":
                    continue
                self._bus.figures["memory_undecodable"] += 1
                await self._bus.bury(self._log.kind, sequence, stored, error.reason)
                continue
            return Record(sequence, message, stored.tail, envelope)
        raise StopAsyncIteration

    def _takes(self, tail: str) -> bool:
        return not self._patterns or any(matches(pattern, tail) for pattern in self._patterns)


class _Work:
    """One ``consume`` of a MemoryBus."""

    def __init__(
        self, bus: MemoryBus, broker: Broker, consumer: Consumer, limit: int, now: Callable[[], int] | None
    ) -> None:
        self._bus, self._broker, self._consumer, self._limit = bus, broker, consumer, limit
        self._now = now
        self._log = broker.log("TASK")

    def __aiter__(self) -> _Work:
        return self

    async def __anext__(self) -> Delivery:
        while True:
            await anyio.lowlevel.checkpoint()
            found, pause = self._next_ready()
            if found is None:
                await self._broker.changed.wait(pause)
                continue
            sequence, stored = found
            stored.holder = self
            stored.attempts += 1
            try:
                envelope, message = codec.decode(stored.frame)
            except Undecodable as error:
                await self._set_aside(sequence, stored, error.reason)
                continue
            return Delivery(message, sequence, stored.tail, stored.attempts, envelope, self._settle)

    def _next_ready(self) -> tuple[tuple[int, Stored] | None, float]:
        """Return the first message that may be delivered now, or how long until there may be one."""
        now, pause, held = anyio.current_time(), math.inf, 0
        ready: tuple[int, Stored] | None = None
        for sequence, stored in self._log.messages.items():
            held += stored.holder is self
            if stored.holder is not None or not matches(self._consumer.tails, stored.tail):
                continue
            if stored.ready_at > now:
                pause = min(pause, stored.ready_at - now)
            elif ready is None:
                ready = (sequence, stored)
        if held >= self._limit:
            return None, math.inf
        if self._now is not None and held >= self._now():
            return None, _LOOK_SECONDS
        return ready, pause

    async def _set_aside(self, sequence: int, stored: Stored, reason: str) -> None:
        await self._bus.bury("TASK", sequence, stored, reason)
        self._remove(sequence)

    async def _settle(self, delivery: Delivery, verdict: Verdict, delay: float, reason: str) -> None:
        await anyio.lowlevel.checkpoint()
        stored = self._log.messages.get(delivery.sequence)
        if stored is None or stored.holder is not self:
            return
        if verdict == "nak" and stored.attempts >= self._consumer.attempts:
            await self._set_aside(delivery.sequence, stored, "delivered too often")
            return
        if verdict == "nak":
            stored.holder, stored.ready_at = None, anyio.current_time() + delay
            self._broker.changed.fire()
            return
        if verdict == "term":
            await self._bus.bury("TASK", delivery.sequence, stored, reason)
        self._remove(delivery.sequence)

    def _remove(self, sequence: int) -> None:
        self._log.messages.pop(sequence, None)
        self._broker.changed.fire()

    def leave(self) -> None:
        """Hand back everything unsettled."""
        for stored in self._log.messages.values():
            if stored.holder is self:
                stored.holder = None
        self._broker.changed.fire()
