"""The face of the bus: what every client offers, whatever carries the bytes."""

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
    """State of a stream. An empty stream has ``messages`` 0 and ``first`` = ``last`` + 1. ``bound`` is how
    many bytes it may hold, 0 for as many as it likes.
    """

    first: int
    last: int
    messages: int
    bytes: int
    bound: int = 0


@dataclass(slots=True)
class Lease:
    """A singleton's right. ``revision`` grows with each holder: it is the fencing token. ``lost`` is
    set when the right ended before it was given back; the holder must stop at once.
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
        """Say that the result is stored: the work is never delivered again.

        Returns when the acknowledgement is on its way. A lost one is sent again, and a redelivery to
        this client is suppressed; another client may see the work once more, so results have
        deterministic ids.
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
    """Named bytes of any size beside the messages of a run (weights, archives). Kept until removed.

    They move in pieces of 1 MB at most through a window of 16 MB, so memory does not grow with the size,
    and are checked by SHA-256. A name is dotted tokens of ``[A-Za-z0-9_=/-]``. Calls may be cancelled:
    after a put that did not return, readers see the old bytes or the new ones; orphaned pieces are removed
    after hours.
    """

    @abstractmethod
    async def put(self, name: str, source: Source) -> BlobInfo:
        """Store bytes or a file under ``name`` in the place of what was there; readers see the old or the
        new, never a mixture. Waits while the store is full. Raises OSError for the file.
        """

    @abstractmethod
    async def get(self, name: str) -> bytes:
        """Return the bytes. Raises NotFound, or Undecodable when pieces are missing or damaged."""

    @abstractmethod
    async def save(self, name: str, path: Path) -> BlobInfo:
        """Write the bytes to ``path``, which appears complete or not at all (it is not flushed to the
        disk). Raises NotFound, Undecodable or OSError.
        """

    @abstractmethod
    async def bound(self) -> float:
        """Return how many bytes all of them together may have; infinite where nobody says."""

    @abstractmethod
    async def info(self, name: str) -> BlobInfo | None:
        """Return what is stored under ``name``, None when there is nothing."""

    @abstractmethod
    async def remove(self, name: str) -> bool:
        """Remove a blob; returns whether there was one."""


class Bus(ABC):
    """One client of the bus. ``run``, ``role`` and ``instance`` go into every envelope it sends.

    *Delivery.* What has a stream is stored before a call returns and read at least once; what has none is
    sent once, or not at all. *Bounds.* Each call says what it holds; a full stream makes publishers wait.
    *Cancellation.* Every call may be cancelled. It leaves nothing behind here; whether the broker still
    carried it out is known only by looking, and since keys are deterministic it may simply be repeated.
    *Errors.* All are BusError. Any call raises BusUnavailable when the broker stays away for longer than
    the client's patience or does not answer, and Denied when this role may not do it.
    """

    def __init__(self, *, run: str, role: str, instance: str) -> None:
        self.run, self.role, self.instance = run, role, instance
        self.names = Names(run)

    @abstractmethod
    async def publish(self, message: Message) -> int:
        """Store ``message`` and return its stream sequence.

        A message with the same key that is already stored counts as success and gives the stored one's
        sequence. Waits while the stream is full. A message whose ``stream`` is empty is sent once
        without any promise, and 0 is returned.

        Stored means acknowledged by the broker: it outlives a kill of any process. A body of more than
        1 MB travels beside the message (``bus.claims``), at most 256 MB. A cancelled call may or may not
        have stored it. Raises BusError when the broker refuses the message or its disk is full.
        """

    @abstractmethod
    async def publish_all(self, messages: Iterable[Message]) -> list[int]:
        """Store all messages and return their sequences; raises the first failure after the others
        have ended. After a fault the order in the stream may differ from the order given.

        Like :meth:`publish` for each, through a window of 256 messages or 16 MB a stream. A cancelled call
        may have stored any of them.
        """

    @abstractmethod
    def consume(
        self, consumer: str, *, limit: int, now: Callable[[], int] | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Delivery]]:
        """Take work from a consumer (``designer``, ``agent``, or that of a role of your own, by its name), at
        most ``limit`` unsettled at a time. ``now`` says, whenever more work is asked for, how many it shall
        be at the moment; when it falls, work that is on its way still comes, but none when it falls to 0. It
        is called on any thread.

        At least once: what is not acknowledged comes again, to whoever asks; each delivery is kept alive
        until it is settled. What is unsettled when the context ends, also by cancellation, is handed back
        at once. Messages that cannot be decoded, whose body is lost, and those delivered too often go to
        the dead-letter stream. Several tasks may read; cancelling a read loses nothing. Raises BusError
        for an unknown consumer or one that was deleted.
        """

    @abstractmethod
    def follow(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Record]]:
        """Read a stream from sequence ``start`` on, in order, for ever, without gap or duplicate.

        ``tails`` (wildcards ``*`` and ``>``, not overlapping) restricts what is read. Messages that
        cannot be decoded, or whose body is lost, are skipped, counted and copied to the dead-letter stream.
        At most 512 messages or 32 MB are read ahead. Cancelling a read loses nothing. Raises BusError when
        the stream ends before ``start`` - 1: acknowledged messages were lost; NotFound without a stream.
        """

    @abstractmethod
    def replay(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[Record]:
        """Read like :meth:`follow`, but end at the last message present at the call, and only log what
        cannot be decoded. At most 256 messages or 16 MB are read ahead.
        """

    @abstractmethod
    def listen(self, tail: str) -> AbstractAsyncContextManager[AsyncIterator[Message]]:
        """Receive messages without a stream (``ctl.>``, ``hb.>``) from now on, at most once each: those
        sent while the broker is away are lost, and the slow lose the oldest beyond 4096.
        """

    @abstractmethod
    async def get(self, stream: str, sequence: int) -> Message:
        """Return one stored message. Raises NotFound, or Undecodable (its body may be lost, too)."""

    @abstractmethod
    async def last(self, tail: str) -> Record | None:
        """Return the last message stored on exactly this subject, None when there is none. Raises
        Undecodable.
        """

    @abstractmethod
    async def purge(self, stream: str, *, below: int | None = None, tail: str | None = None) -> int:
        """Remove messages with a sequence lower than ``below`` and/or on the subjects ``tail``; without
        both, all. Returns how many were removed. Bodies that travelled beside them go, too.
        """

    @abstractmethod
    async def stream_info(self, stream: str) -> StreamInfo:
        """Return the state of a stream. Raises NotFound when the run was not provisioned."""

    @abstractmethod
    async def state_get(self, key: str) -> tuple[int, bytes] | None:
        """Return (revision, value) of a key of the state bucket, None when it was never put."""

    @abstractmethod
    async def state_put(self, key: str, value: bytes) -> int:
        """Write a key and return its revision. A cancelled call may have written it."""

    @abstractmethod
    async def state_update(self, key: str, value: bytes, revision: int) -> int:
        """Write a key if it still has ``revision`` (0: does not exist). Raises Conflict otherwise; an
        own write whose answer was lost is no conflict.
        """

    @abstractmethod
    def lease(
        self, name: str, *, ttl: float = 10.0, wait: float = 30.0
    ) -> AbstractAsyncContextManager[Lease]:
        """Hold the singleton right ``name``, renewed every ``ttl`` / 3 s (``ttl`` at least 1 s).

        Waits up to ``wait`` seconds for another holder to go, then raises BusUnavailable that names it.
        Given back when the context ends; a holder that was killed keeps it for ``ttl`` at most. It is lost
        ``ttl`` after the last renewal that succeeded was sent, so two never believe to hold it.
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
