"""The face of the bus: what every client offers, whatever carries the bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal

import anyio

from bus.codec import Envelope
from bus.errors import BusError
from bus.messages import Message
from bus.subjects import Names, overlap

Verdict = Literal["ack", "nak", "term"]
Settle = Callable[["Delivery", Verdict, float, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Record:
    """One stored message: its ``sequence`` in the stream (from 1), its subject ``tail``."""

    sequence: int
    message: Message
    tail: str
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """State of a stream. An empty stream has ``messages`` 0 and ``first`` = ``last`` + 1."""

    first: int
    last: int
    messages: int
    bytes: int


@dataclass(slots=True)
class Lease:
    """A singleton's right. ``revision`` grows with each holder: it is the fencing token. ``lost`` is
    set when the right ended before it was given back; the holder must stop at once."""

    revision: int
    lost: anyio.Event = field(default_factory=anyio.Event)


@dataclass(slots=True)
class Delivery:
    """One piece of work. Settle it once with :meth:`ack`, :meth:`nak` or :meth:`term`.

    Until then the bus keeps it alive. ``attempt`` counts deliveries from 1. A second settlement does
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


class Bus(ABC):
    """One client of the bus. ``run``, ``role`` and ``instance`` go into every envelope it sends.

    Every method may raise BusUnavailable when the broker stays away longer than the client's patience.
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
        """

    @abstractmethod
    async def publish_all(self, messages: Iterable[Message]) -> list[int]:
        """Store all messages and return their sequences; raises the first failure after the others
        have ended. After a fault the order in the stream may differ from the order given."""

    @abstractmethod
    def consume(self, consumer: str, *, limit: int) -> AbstractAsyncContextManager[AsyncIterator[Delivery]]:
        """Take work from a consumer (``designer`` or ``agent``), at most ``limit`` unsettled at a time.

        What is unsettled when the context ends is handed back at once. Messages that cannot be decoded
        and those delivered too often go to the dead-letter stream.
        """

    @abstractmethod
    def follow(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Record]]:
        """Read a stream from sequence ``start`` on, in order, for ever, without gap or duplicate.

        ``tails`` (wildcards ``*`` and ``>``, not overlapping) restricts what is read. Messages that
        cannot be decoded are skipped, counted and copied to the dead-letter stream. Raises BusError
        when the stream ends before ``start`` - 1: acknowledged messages were lost.
        """

    @abstractmethod
    def replay(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[Record]:
        """Read like :meth:`follow`, but end at the last message present at the call."""

    @abstractmethod
    def listen(self, tail: str) -> AbstractAsyncContextManager[AsyncIterator[Message]]:
        """Receive messages without a stream (``ctl.>``, ``hb.>``) from now on; the slow lose the
        oldest ones."""

    @abstractmethod
    async def get(self, stream: str, sequence: int) -> Message:
        """Return one stored message. Raises NotFound, or Undecodable."""

    @abstractmethod
    async def last(self, tail: str) -> Record | None:
        """Return the last message stored on exactly this subject, None when there is none."""

    @abstractmethod
    async def purge(self, stream: str, *, below: int | None = None, tail: str | None = None) -> int:
        """Remove messages with a sequence lower than ``below`` and/or on the subjects ``tail``; without
        both, all. Returns how many were removed."""

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
        """Write a key if it still has ``revision`` (0: does not exist). Raises Conflict otherwise."""

    @abstractmethod
    def lease(
        self, name: str, *, ttl: float = 10.0, wait: float = 30.0
    ) -> AbstractAsyncContextManager[Lease]:
        """Hold the singleton right ``name``, renewed every ``ttl`` / 3 s (``ttl`` at least 1 s).

        Waits up to ``wait`` seconds for another holder to go, then raises BusUnavailable that names it.
        """

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
