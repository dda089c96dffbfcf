"""The bus over NATS."""

from __future__ import annotations

import logging
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from bus import codec, reads
from bus.access import queue_of
from bus.concurrency import ArrivalQueue
from bus.connection import Connection, open_connection
from bus.errors import BusError, BusUnavailable, Denied, Undecodable, UnknownKind
from bus.follow import Follower, check_position
from bus.interface import (
    Blobs,
    Bus,
    Delivery,
    Lease,
    Record,
    StreamInfo,
    check_followed,
    check_tails,
)
from bus.messages import DeadLetter, Message
from bus.nats_client import Arrival
from bus.objects import ObjectStore
from bus.publisher import Limits, StreamPublisher
from bus.state import KeyValueStore
from bus.subjects import CONSUMERS, STREAMS, Consumer, stream_of
from bus.work import Work

log = logging.getLogger("spade.bus")
_LISTEN_LIMIT = 4096
_LETTER_ROOM = 4096


class NatsBus(Bus):
    """The bus over one NATS connection. Made by :func:`connect`."""

    def __init__(
        self,
        connection: Connection,
        *,
        run: str,
        role: str,
        instance: str,
        limits: Limits | None = None,
        life: tuple[str, str] = ("", ""),
        consumers: Mapping[str, Consumer] = CONSUMERS,
    ) -> None:
        super().__init__(run=run, role=role, instance=instance)
        self.connection = connection
        self._life, self._ended = life
        self.publisher = StreamPublisher(connection, limits)
        self._consumers = consumers
        self._streams = {kind: self.names.stream(kind) for kind in STREAMS}
        self._state = KeyValueStore(connection, self.publisher, self.names)
        self._objects = ObjectStore(connection, self.publisher, self.names)
        self._open: dict[str, Work | Follower] = {}
        self._counts = dict.fromkeys(
            ("core_dropped", "listen_dropped", "listen_undecodable", "dead_letters"), 0.0
        )

    def _encode(self, message: Message) -> bytes:
        return codec.encode(message, run=self.run, role=self.role, instance=self.instance)

    async def publish(self, message: Message) -> int:
        return (await self.publish_all((message,)))[0]

    async def publish_all(self, messages: Iterable[Message]) -> list[int]:
        silent: list[int] = []
        failure: Exception | None = None
        async with self.publisher.batch() as batch:
            try:
                for number, message in enumerate(messages):
                    frame = self._encode(message)
                    if message.stream:
                        subject = self.names.root + message.tail
                        await batch.put(self._streams[message.stream], subject, frame, message_id=message.key)
                    else:
                        self._send_unstored(message, frame)
                        silent.append(number)
            except Exception as error:
                failure = error  # what is on its way ends first
            sequences = [answer.seq for answer in await batch.finish()]
        if failure is not None:
            raise failure
        for number in silent:
            sequences.insert(number, 0)
        return sequences

    def _send_unstored(self, message: Message, frame: bytes) -> None:
        """Send without a promise: a message that an absent server would miss is stale when it is back."""
        if not self.connection.write(self.names.subject(message.tail), frame):
            self._counts["core_dropped"] += 1

    async def _bury(self, letter: DeadLetter) -> None:
        room = self.connection.client.max_payload - _LETTER_ROOM
        if len(letter.frame) > room:
            reason = f"{letter.reason} (cut from {len(letter.frame)} bytes)"
            letter = msgspec.structs.replace(letter, reason=reason, frame=letter.frame[:room])
        await self.publish(letter)
        self._counts["dead_letters"] += 1

    @asynccontextmanager
    async def consume(
        self, consumer: str, *, limit: int, now: Callable[[], int] | None = None
    ) -> AsyncIterator[AsyncIterator[Delivery]]:
        queue = queue_of(consumer, self.role, self._consumers)
        if limit < 1:
            raise BusError(f"limit {limit} takes no work", remedy="Give a limit of at least 1.")
        work = Work(self.connection, self.names, queue, limit=limit, now=now, bury=self._bury)
        async with self._listed(f"consume_{consumer}", work), work.running():
            yield work.arrivals

    @asynccontextmanager
    async def follow(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[AsyncIterator[Record]]:
        check_followed(stream)
        follower = Follower(
            self.connection, self.names, stream, start=start, tails=check_tails(tails), bury=self._bury
        )
        async with self._listed(f"follow_{stream.lower()}", follower), follower.running():
            yield follower

    async def replay(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[Record]:
        patterns = check_tails(tails)
        last = (await self.stream_info(stream)).last
        check_position(stream, start, last)
        found = reads.replay(self.connection, self.names, stream, start=start, tails=patterns, last=last)
        async for record in found:
            if isinstance(record, Record):
                yield record
            elif not isinstance(record, UnknownKind):
                log.error("replay of %s skips a message: %s", stream, record)

    @asynccontextmanager
    async def listen(self, tail: str) -> AsyncIterator[AsyncIterator[Message]]:
        arrivals: ArrivalQueue[Message] = ArrivalQueue(limit=_LISTEN_LIMIT)

        def receive(message: Arrival) -> None:
            try:
                arrivals.put(codec.decode(message.data)[1])
            except Undecodable as error:
                self._counts["listen_undecodable"] += 1
                log.warning("on %s: %s", message.subject, error)

        def refuse(error: Denied) -> None:
            if error.action == "subscribe" and error.concerns(subject):
                arrivals.end(Denied("subscribe", subject))

        def end() -> None:
            if self.connection.closed:
                arrivals.end(BusUnavailable(f"messages on {subject}", 0, remedy="The connection is closed."))

        subject = self.names.subject(tail)
        await self.connection.wait_connected(f"connection to listen to {tail}")
        unwatch, unwatch_denied = self.connection.watch(end), self.connection.watch_denied(refuse)
        subscription = await self.connection.subscribe(subject, receive)
        try:
            await self.connection.barrier()  # the server has read the subscription
            yield arrivals
        finally:
            unwatch()
            unwatch_denied()
            self._counts["listen_dropped"] += arrivals.dropped
            await self.connection.unsubscribe(subscription)

    async def get(self, stream: str, sequence: int) -> Message:
        return (await reads.get(self.connection, self.names, stream, sequence)).message

    async def last(self, tail: str) -> Record | None:
        request: dict[str, object] = {"last_by_subj": self.names.subject(tail)}
        answer = await reads.certain(self.connection, self.names.stream(stream_of(tail)), request)
        return None if answer is None else reads.record_of(self.names, answer)

    async def purge(self, stream: str, *, below: int | None = None, tail: str | None = None) -> int:
        if below is not None and below <= 1:
            return 0
        body: dict[str, Any] = {}
        if below is not None:
            body["seq"] = below
        if tail is not None:
            body["filter"] = self.names.subject(tail)
        answer = await self.connection.api(f"STREAM.PURGE.{self.names.stream(stream)}", body)
        return int(answer["purged"])

    async def stream_info(self, stream: str) -> StreamInfo:
        return await reads.stream_info(self.connection, self.names, stream)

    async def state_get(self, key: str) -> tuple[int, bytes] | None:
        return await self._state.get("state", key)

    async def state_put(self, key: str, value: bytes) -> int:
        return await self._state.put("state", key, value)

    async def state_update(self, key: str, value: bytes, revision: int) -> int:
        return await self._state.update("state", key, value, revision)

    @asynccontextmanager
    async def lease(self, name: str, *, ttl: float = 10.0, wait: float = 30.0) -> AsyncIterator[Lease]:
        us = f"{self.role}/{self.instance}/"
        holder = f"{us}{self._life}{secrets.token_hex(6)}"
        ended = us + self._ended if self._ended else ""
        async with self._state.lease(name, holder, ttl=ttl, wait=wait, ended=ended) as lease:
            yield lease

    @property
    def blobs(self) -> Blobs:
        return self._objects

    def statistics(self) -> dict[str, float]:
        parts = (self.connection, self.publisher, self._objects)
        figures = {name: value for part in parts for name, value in part.statistics().items()}
        figures.update(self._counts)
        for name, part in self._open.items():
            figures.update({f"{name}_{key}": value for key, value in part.statistics().items()})
        return figures

    @asynccontextmanager
    async def _listed(self, name: str, part: Work | Follower) -> AsyncIterator[None]:
        """Show a reader's figures while it is open."""
        unique, number = name, 1
        while unique in self._open:
            number += 1
            unique = f"{name}_{number}"
        self._open[unique] = part
        try:
            yield
        finally:
            del self._open[unique]


@asynccontextmanager
async def connect(
    url: str,
    *,
    run: str,
    role: str,
    instance: str,
    token: str = "",
    seed_file: Path | str | None = None,
    tls: ssl.SSLContext | Path | str | None = None,
    patience: float = 900.0,
    connect_seconds: float = 10.0,
    limits: Limits | None = None,
    life: tuple[str, str] = ("", ""),
) -> AsyncIterator[NatsBus]:
    """Join the run ``run`` as ``instance`` of ``role``; the bus is open while the context is.

    ``url`` may name several servers of a cluster, separated by commas, and hold percent-encoded
    credentials. ``token`` or ``seed_file`` (the nkey of the role) prove who we are; ``tls`` is a file of CA
    certificates to trust, or a context. ``patience`` is how many seconds a call waits for a server that
    went away. ``limits`` are the bounds of publishing. ``life`` names this life of the instance and an
    earlier one that is known to have ended, whose leases are free. Raises BusUnavailable when no server
    answers within ``connect_seconds``, BusError when it refuses us or has no JetStream, Denied when the key
    is another role's.

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
        bus = NatsBus(connection, run=run, role=role, instance=instance, limits=limits, life=life)
        async with bus.publisher.running():
            if seed_file:
                # Answers to another role's inbox would be denied; here that is an error, later a silence.
                await connection.api("INFO", seconds=connect_seconds)
            yield bus
