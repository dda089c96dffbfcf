"""The client of the bus: its operations, their bounds and guarantees."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from bus import codec, reads
from bus.access import queue_of
from bus.concurrency import ArrivalQueue
from bus.connection import Connection, open_connection
from bus.errors import BusError, BusUnavailable, Denied, Undecodable, UnknownKind
from bus.follow import Follower, check_followed, check_position
from bus.messages import DeadLetter, Message
from bus.nats_client import Arrival
from bus.objects import Blobs
from bus.publisher import Limits, Outgoing, Publisher
from bus.reads import Record, StreamInfo
from bus.state import KeyValueStore, Lease
from bus.subjects import Names, stream_of
from bus.work import Delivery, Work

log = logging.getLogger("spade.bus")
_LISTEN_LIMIT = 4096
_LETTER_ROOM = 4096


class Bus:
    """One client of the bus, made by :func:`connect`; ``blobs`` are the named bytes of the run.

    ``run``, ``role`` and ``instance`` go into every envelope it sends. Any call may be cancelled; the broker
    may have carried it out nevertheless, and since keys are deterministic it may be repeated. All errors are
    BusError. Any call raises BusUnavailable when the broker does not answer, or stays away for longer than
    the client's patience, and Denied when this role may not do it.
    """

    def __init__(
        self,
        connection: Connection,
        run: str,
        role: str,
        instance: str,
        limits: Limits,
        life: tuple[str, str],
    ) -> None:
        self.run, self.role, self.instance = run, role, instance
        self._life, self._ended = life
        self.names = Names(run)
        self.connection = connection
        self.publisher = Publisher(connection, limits)
        self.blobs = Blobs(connection, self.publisher, self.names)
        self._state = KeyValueStore(connection, self.publisher, self.names)
        self._open: dict[Work | Follower, str] = {}

    async def publish(self, message: Message) -> int:
        """Store ``message`` and return its stream sequence; it then outlives a kill of any process.

        A message with the same key that is already stored counts as success and gives the stored one's
        sequence. Waits while the stream is full. A message without a stream is sent once without any
        promise, and 0 is returned. Raises BusError for an unregistered class, for a message above the
        server's limit, and when the broker refuses it or its disk is full.
        """
        if message.stream:
            return await self.publisher.send(self._outgoing(message))
        self.connection.write(self.names.subject(message.tail), self._encode(message))
        return 0

    async def publish_all(self, messages: Iterable[Message]) -> list[int]:
        """Store all messages and return their sequences; raises the first failure after the others ended.

        Each has a stream. They pass a window of 256 messages or 16 MB per stream; after a fault their order
        may differ from the order given.
        """

        async def outgoing() -> AsyncIterator[Outgoing]:
            for message in messages:
                yield self._outgoing(message)

        return await self.publisher.send_all(outgoing())

    def _encode(self, message: Message) -> bytes:
        return codec.encode(message, run=self.run, role=self.role, instance=self.instance)

    def _outgoing(self, message: Message) -> Outgoing:
        stream, subject = self.names.stream(message.stream), self.names.subject(message.tail)
        return Outgoing(stream, subject, self._encode(message), message.key)

    async def _bury(self, letter: DeadLetter) -> None:
        room = self.connection.client.max_payload - _LETTER_ROOM
        if len(letter.frame) > room:
            reason = f"{letter.reason} (cut from {len(letter.frame)} bytes)"
            letter = msgspec.structs.replace(letter, reason=reason, frame=letter.frame[:room])
        await self.publish(letter)

    @asynccontextmanager
    async def consume(
        self, consumer: str, *, limit: int, now: Callable[[], int] | None = None
    ) -> AsyncIterator[AsyncIterator[Delivery]]:
        """Take work from a queue, at most ``limit`` unsettled deliveries at a time.

        ``consumer`` is ``designer``, ``agent``, or the name of your own role. ``now`` returns the current
        limit; when it falls, work on its way still arrives, but none when it falls to 0.

        At least once: work that is not acknowledged is delivered again, to any client. Work that is
        unsettled when the context ends is handed back at once. Messages that cannot be decoded, and those
        delivered too often, become dead letters. Several tasks may read; cancelling a read loses nothing.
        Raises BusError for a queue that does not exist or was deleted.
        """
        queue = queue_of(consumer, self.role)
        if limit < 1:
            raise BusError(f"limit {limit} takes no work", remedy="Give a limit of at least 1.")
        work = Work(self.connection, self.names, queue, limit=limit, now=now, bury=self._bury)
        with self._listed(f"consume_{consumer}", work):
            async with work.running():
                yield work.arrivals

    @asynccontextmanager
    async def follow(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[AsyncIterator[Record]]:
        """Read a stream from sequence ``start`` on, in order, without end, gap or duplicate.

        ``tails`` (wildcards ``*`` and ``>``, not overlapping) restrict the messages. Facts of a kind that is
        not registered are passed over; other messages that cannot be decoded are counted and become dead
        letters. Reads at most 512 messages or 32 MB ahead. Cancelling a read loses nothing. Raises BusError
        when the stream ends before ``start`` - 1 (acknowledged messages were lost), NotFound without a
        stream.
        """
        check_followed(stream)
        follower = Follower(self.connection, self.names, stream, start, tails or (), self._bury)
        with self._listed(f"follow_{stream.lower()}", follower):
            async with follower.running():
                yield follower

    async def replay(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[Record]:
        """Read like :meth:`follow`, but end at the last message present at the call.

        It writes no dead letters.
        """
        last = (await self.stream_info(stream)).last
        check_position(stream, start, last)
        found = reads.between(self.connection, self.names, stream, start=start, last=last, tails=tails or ())
        async for stored in found:
            try:
                yield reads.record_of(stored)
            except UnknownKind:
                continue
            except Undecodable as error:
                log.error("replay of %s skips message %d: %s", stream, stored.sequence, error)

    @asynccontextmanager
    async def listen(self, tail: str) -> AsyncIterator[AsyncIterator[Message]]:
        """Receive messages without a stream (``hb.>``) from now on, at most once each.

        Messages sent while the broker is away are lost, and the oldest of more than 4096 unread ones.
        """
        arrivals: ArrivalQueue[Message] = ArrivalQueue(limit=_LISTEN_LIMIT)
        subject = self.names.subject(tail)

        def receive(message: Arrival) -> None:
            try:
                arrivals.put(codec.decode(message.data)[1])
            except Undecodable as error:
                log.warning("on %s: %s", message.subject, error)

        def change(denied: Denied | None) -> None:
            if denied is not None and denied.action == "subscribe" and denied.concerns(subject):
                arrivals.end(Denied("subscribe", subject))
            elif self.connection.closed:
                arrivals.end(BusUnavailable(f"messages on {subject}", 0, remedy="The connection is closed."))

        await self.connection.wait_connected(f"connection to listen to {tail}")
        unwatch = self.connection.watch(change)
        subscription = await self.connection.subscribe(subject, receive)
        try:
            await self.connection.barrier()  # the server has read the subscription
            yield arrivals
        finally:
            unwatch()
            self.connection.counts["listen_dropped"] += arrivals.dropped
            await self.connection.unsubscribe(subscription)

    async def get(self, stream: str, sequence: int) -> Message:
        """Return one stored message. Raises NotFound or Undecodable."""
        return (await reads.get(self.connection, self.names, stream, sequence)).message

    async def last(self, tail: str) -> Record | None:
        """Return the last message stored on exactly this subject, None without one. Raises Undecodable."""
        request = {"last_by_subj": self.names.subject(tail)}
        answer = await reads.from_leader(self.connection, self.names.stream(stream_of(tail)), request)
        return None if answer is None else reads.record_of(reads.stored_of(self.names, answer))

    async def purge(self, stream: str, *, below: int | None = None, tail: str | None = None) -> int:
        """Remove messages with a sequence lower than ``below`` and/or on the subjects ``tail``.

        Without both, all. Returns how many were removed.
        """
        body: dict[str, Any] = {}
        if below is not None:
            if below <= 1:
                return 0
            body["seq"] = below
        if tail is not None:
            body["filter"] = self.names.subject(tail)
        answer = await self.connection.api(f"STREAM.PURGE.{self.names.stream(stream)}", body)
        return int(answer["purged"])

    async def stream_info(self, stream: str) -> StreamInfo:
        """Return the state of a stream. Raises NotFound when the run was not provisioned."""
        info = await self.connection.api(f"STREAM.INFO.{self.names.stream(stream)}")
        state = info["state"]
        return StreamInfo(
            first=state["first_seq"],
            last=state["last_seq"],
            messages=state["messages"],
            bytes=state["bytes"],
            bound=max(0, info["config"]["max_bytes"]),
        )

    async def state_get(self, key: str) -> tuple[int, bytes] | None:
        """Return (revision, value) of a key of the state bucket, None when it was never put."""
        found = await self._state.get("STATE", key)
        return None if found is None else (found.sequence, found.frame)

    async def state_put(self, key: str, value: bytes) -> int:
        """Write a key and return its revision."""
        return await self._state.put("STATE", key, value)

    async def state_update(self, key: str, value: bytes, revision: int) -> int:
        """Write a key if it still has ``revision`` (0: does not exist).

        Raises Conflict otherwise; an own write whose answer was lost is no conflict.
        """
        return await self._state.put("STATE", key, value, revision=revision)

    @asynccontextmanager
    async def lease(self, name: str, *, ttl: float = 10.0, wait: float = 30.0) -> AsyncIterator[Lease]:
        """Hold the singleton right ``name``, renewed every ``ttl`` / 3 s (``ttl`` at least 1 s).

        Waits up to ``wait`` seconds for another holder to go, then raises BusUnavailable that names it. The
        right ends with the context, or ``ttl`` seconds after the last successful renewal was *sent*, so two
        holders never overlap.
        """
        us = f"{self.role}/{self.instance}/"
        holder = f"{us}{self._life}{secrets.token_hex(6)}"
        ended = us + self._ended if self._ended else ""
        async with self._state.lease(name, holder, ttl=ttl, wait=wait, ended=ended) as lease:
            yield lease

    def statistics(self) -> Counter[str]:
        """Return gauges and counters: windows, retries, duplicates, redeliveries, reconnects."""
        parts: list[tuple[str, Connection | Publisher | Work | Follower]] = [
            ("connection", self.connection),
            ("publish", self.publisher),
            *((name, part) for part, name in self._open.items()),
        ]
        return Counter({f"{name}_{key}": n for name, part in parts for key, n in part.counts.items()})

    @contextmanager
    def _listed(self, name: str, part: Work | Follower) -> Iterator[None]:
        """Show a reader's figures while it is open."""
        self._open[part] = name
        try:
            yield
        finally:
            del self._open[part]


@asynccontextmanager
async def connect(
    url: str,
    *,
    run: str,
    role: str,
    instance: str,
    token: str = "",
    seed_file: Path | str | None = None,
    tls: Path | str | None = None,
    patience: float = 900.0,
    connect_seconds: float = 10.0,
    limits: Limits | None = None,
    life: tuple[str, str] = ("", ""),
) -> AsyncIterator[Bus]:
    """Join the run ``run`` as ``instance`` of ``role``; the bus is open while the context is.

    ``limits`` are the bounds of publishing. ``life`` names this life of the instance and an earlier one that
    is known to have ended, whose leases are free. The other arguments are those of
    :func:`bus.connection.open_connection`.

    The caller must not block its event loop for longer than 30 s: leases of work would end.
    """
    async with open_connection(
        url,
        name=f"spade.{run}.{role}.{instance}",
        role=role,
        token=token,
        seed_file=seed_file,
        tls=tls,
        patience=patience,
        connect_seconds=connect_seconds,
    ) as connection:
        yield Bus(connection, run, role, instance, limits or Limits(), life)
