"""The interface of the bus: its operations, their bounds and guarantees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio
import msgspec

from bus.codec import Envelope
from bus.errors import BusError
from bus.messages import Message
from bus.subjects import STREAMS, Names, overlap

Verdict = Literal["ack", "nak", "term"]
Settle = Callable[["Delivery", Verdict, float, str], Awaitable[None]]
Source = bytes | bytearray | memoryview | Path


class Record(msgspec.Struct, frozen=True, gc=False):
    """One stored message: its ``sequence`` in the stream (from 1) and its subject ``tail``."""

    sequence: int
    message: Message
    tail: str
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """State of a stream.

    An empty stream has ``messages`` 0 and ``first`` = ``last`` + 1. ``bound`` is the most bytes that it may
    hold (0: no bound).
    """

    first: int
    last: int
    messages: int
    bytes: int
    bound: int = 0


@dataclass(slots=True)
class Lease:
    """A singleton right.

    ``revision`` grows with each holder: it is the fencing token. ``lost`` is set when the right ends before
    it is given back; the holder must stop at once.
    """

    revision: int
    lost: anyio.Event = field(default_factory=anyio.Event)


@dataclass(slots=True)
class Delivery:
    """One piece of work. Settle it once with :meth:`ack`, :meth:`nak` or :meth:`term`.

    Until then the bus renews its lease. ``attempt`` counts deliveries from 1. A second settlement does
    nothing.
    """

    message: Message
    sequence: int
    tail: str
    attempt: int
    envelope: Envelope
    settle: Settle = field(repr=False)
    settled: bool = False

    async def ack(self) -> None:
        """Acknowledge the work after its result is stored: it is not delivered again.

        Returns when the acknowledgement is on its way. A lost one is repeated, and a redelivery to this
        client is suppressed; another client may get the work again, so results have deterministic ids.
        """
        await self._end("ack", 0.0, "")

    async def nak(self, delay: float = 0.0) -> None:
        """Hand the work back; it is delivered again after ``delay`` seconds."""
        await self._end("nak", delay, "")

    async def term(self, reason: str) -> None:
        """Give the work up for good: a dead letter keeps it together with ``reason``."""
        await self._end("term", 0.0, reason)

    async def _end(self, verdict: Verdict, delay: float, reason: str) -> None:
        if not self.settled:
            self.settled = True
            await self.settle(self, verdict, delay, reason)


@dataclass(frozen=True, slots=True)
class BlobInfo:
    """A stored blob: ``size`` in bytes, ``sha256`` in hex digits, ``id`` new with each put."""

    name: str
    size: int
    sha256: str
    id: str


class Blobs(ABC):
    """Named bytes of any size (weights), kept until removed.

    They move in pieces of at most 1 MB through a window of 16 MB and are checked by SHA-256. A name is dotted
    tokens of ``[A-Za-z0-9_=/-]``. After a cancelled put, readers see the old bytes or the new ones; orphaned
    pieces are removed after hours.
    """

    @abstractmethod
    async def put(self, name: str, source: Source) -> BlobInfo:
        """Store bytes or a file under ``name``; readers see the old bytes or the new ones.

        Waits while the store is full. Raises OSError for the file.
        """

    @abstractmethod
    async def get(self, name: str) -> bytes:
        """Return the bytes. Raises NotFound, or Undecodable when pieces are missing or damaged."""

    @abstractmethod
    async def save(self, name: str, path: Path) -> BlobInfo:
        """Write the bytes to ``path``, which appears complete or not at all.

        Raises NotFound, Undecodable or OSError.
        """

    @abstractmethod
    async def bound(self) -> float:
        """Return the most bytes that all blobs together may have; infinite when unknown."""

    @abstractmethod
    async def info(self, name: str) -> BlobInfo | None:
        """Return the figures of a blob, None when there is none."""

    @abstractmethod
    async def remove(self, name: str) -> bool:
        """Remove a blob; returns whether there was one."""


class Bus(ABC):
    """One client of the bus. ``run``, ``role`` and ``instance`` go into every envelope it sends.

    Any call may be cancelled; the broker may have carried it out nevertheless, and since keys are
    deterministic it may be repeated. All errors are BusError. Any call raises BusUnavailable when the broker
    does not answer, or stays away for longer than the client's patience, and Denied when this role may not
    do it.
    """

    def __init__(self, *, run: str, role: str, instance: str) -> None:
        self.run, self.role, self.instance = run, role, instance
        self.names = Names(run)

    @abstractmethod
    async def publish(self, message: Message) -> int:
        """Store ``message`` and return its stream sequence; it then outlives a kill of any process.

        A message with the same key that is already stored counts as success and gives the stored one's
        sequence. Waits while the stream is full. A message without a stream is sent once without any
        promise, and 0 is returned. Raises BusError for an unregistered class, for a message above the
        server's limit, and when the broker refuses it or its disk is full.
        """

    @abstractmethod
    async def publish_all(self, messages: Iterable[Message]) -> list[int]:
        """Store all messages and return their sequences; raises the first failure after the others ended.

        They pass a window of 256 messages or 16 MB per stream. After a fault their order in the stream may
        differ from the order given.
        """

    @abstractmethod
    def consume(
        self, consumer: str, *, limit: int, now: Callable[[], int] | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Delivery]]:
        """Take work from a queue, at most ``limit`` unsettled deliveries at a time.

        ``consumer`` is ``designer``, ``agent``, or the name of your own role. ``now`` returns the current
        limit; when it falls, work on its way still arrives, but none when it falls to 0.

        At least once: work that is not acknowledged is delivered again, to any client. Work that is
        unsettled when the context ends is handed back at once. Messages that cannot be decoded, and those
        delivered too often, become dead letters. Several tasks may read; cancelling a read loses nothing.
        Raises BusError for a queue that does not exist or was deleted.
        """

    @abstractmethod
    def follow(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Record]]:
        """Read a stream from sequence ``start`` on, in order, without end, gap or duplicate.

        ``tails`` (wildcards ``*`` and ``>``, not overlapping) restrict the messages. Facts of a kind that is
        not registered are passed over; other messages that cannot be decoded are counted and become dead
        letters. Reads at most 512 messages or 32 MB ahead. Cancelling a read loses nothing. Raises BusError
        when the stream ends before ``start`` - 1 (acknowledged messages were lost), NotFound without a
        stream.
        """

    @abstractmethod
    def replay(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[Record]:
        """Read like :meth:`follow`, but end at the last message present at the call.

        It writes no dead letters, and reads at most 256 messages or 16 MB ahead.
        """

    @abstractmethod
    def listen(self, tail: str) -> AbstractAsyncContextManager[AsyncIterator[Message]]:
        """Receive messages without a stream (``ctl.>``, ``hb.>``) from now on, at most once each.

        Messages sent while the broker is away are lost, and the oldest of more than 4096 unread ones.
        """

    @abstractmethod
    async def get(self, stream: str, sequence: int) -> Message:
        """Return one stored message. Raises NotFound or Undecodable."""

    @abstractmethod
    async def last(self, tail: str) -> Record | None:
        """Return the last message stored on exactly this subject, None without one. Raises Undecodable."""

    @abstractmethod
    async def purge(self, stream: str, *, below: int | None = None, tail: str | None = None) -> int:
        """Remove messages with a sequence lower than ``below`` and/or on the subjects ``tail``.

        Without both, all. Returns how many were removed.
        """

    @abstractmethod
    async def stream_info(self, stream: str) -> StreamInfo:
        """Return the state of a stream. Raises NotFound when the run was not provisioned."""

    @abstractmethod
    async def state_get(self, key: str) -> tuple[int, bytes] | None:
        """Return (revision, value) of a key of the state bucket, None when it was never put."""

    @abstractmethod
    async def state_put(self, key: str, value: bytes) -> int:
        """Write a key and return its revision."""

    @abstractmethod
    async def state_update(self, key: str, value: bytes, revision: int) -> int:
        """Write a key if it still has ``revision`` (0: does not exist).

        Raises Conflict otherwise; an own write whose answer was lost is no conflict.
        """

    @abstractmethod
    def lease(
        self, name: str, *, ttl: float = 10.0, wait: float = 30.0
    ) -> AbstractAsyncContextManager[Lease]:
        """Hold the singleton right ``name``, renewed every ``ttl`` / 3 s (``ttl`` at least 1 s).

        Waits up to ``wait`` seconds for another holder to go, then raises BusUnavailable that names it. The
        right ends with the context, or ``ttl`` seconds after the last successful renewal was *sent*, so two
        holders never overlap.
        """

    @property
    @abstractmethod
    def blobs(self) -> Blobs:
        """Return the named blobs of the run."""

    @abstractmethod
    def statistics(self) -> dict[str, float]:
        """Return gauges and counters: queue depths, retries, duplicates, redeliveries, reconnects."""


def check_tails(tails: Sequence[str] | None) -> list[str]:
    """Return the filters of a reader. Raises BusError when two of them overlap or there are none."""
    if tails is None:
        return []
    patterns = list(dict.fromkeys(tails))
    if not patterns:
        raise BusError("an empty list of tails follows nothing", remedy="Pass None to follow everything.")
    for index, first in enumerate(patterns):
        for second in patterns[index + 1 :]:
            if overlap(first, second):
                raise BusError(f"the filters {first!r} and {second!r} overlap")
    return patterns


def check_followed(stream: str) -> None:
    """Raise BusError for a stream whose messages are not for reading in order."""
    if stream in STREAMS and STREAMS[stream].pieces:
        raise BusError(f"stream {stream} holds pieces, no messages", remedy="Use bus.blobs.")
    if stream in STREAMS and STREAMS[stream].work:
        raise BusError(f"stream {stream} is a work queue", remedy="Use consume, or replay to look.")
