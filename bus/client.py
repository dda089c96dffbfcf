"""The bus over NATS."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import nats.errors
from nats.aio.msg import Msg

from bus import codec, reads
from bus.connection import Connection, open_connection
from bus.errors import BusError, Undecodable
from bus.face import Bus, Delivery, Lease, Record, StreamInfo, check_tails
from bus.follow import Reader, check_position
from bus.mailbox import Mailbox
from bus.messages import DeadLetter, Message
from bus.publish import Entry, Limits, Publisher
from bus.scopes import flat_task_group
from bus.state import State
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
        consumers: Mapping[str, Consumer] = CONSUMERS,
    ) -> None:
        super().__init__(run=run, role=role, instance=instance)
        self.connection = connection
        self.publisher = Publisher(connection, limits)
        self._consumers = consumers
        self._state = State(connection, self.publisher, self.names)
        self._open: dict[str, Work | Reader] = {}
        self._counts = dict.fromkeys(
            ("core_dropped", "listen_dropped", "listen_undecodable", "dead_letters"), 0.0
        )

    def _encode(self, message: Message) -> bytes:
        return codec.encode(message, run=self.run, role=self.role, instance=self.instance)

    async def _submit(self, message: Message) -> Entry:
        return await self.publisher.submit(
            self.names.stream(message.stream),
            self.names.subject(message.tail),
            self._encode(message),
            {},
            message_id=message.key,
        )

    async def publish(self, message: Message) -> int:
        if not message.stream:
            await self._say(message)
            return 0
        entry = await self._submit(message)
        return (await self.publisher.collect([entry]))[0].seq

    async def publish_all(self, messages: Iterable[Message]) -> list[int]:
        entries: list[Entry] = []
        silent: list[int] = []
        try:
            for number, message in enumerate(messages):
                if not message.stream:
                    await self._say(message)
                    silent.append(number)
                    continue
                entries.append(await self._submit(message))
        except BaseException:
            self.publisher.abandon(entries)
            raise
        sequences = [answer.seq for answer in await self.publisher.collect(entries)]
        for number in silent:
            sequences.insert(number, 0)
        return sequences

    async def _say(self, message: Message) -> None:
        """Send without a promise: what a server that is away would miss is stale when it is back."""
        if not self.connection.connected:
            self._counts["core_dropped"] += 1
            return
        try:
            await self.connection.send(self.names.subject(message.tail), self._encode(message))
        except (nats.errors.Error, OSError) as error:
            self._counts["core_dropped"] += 1
            log.debug("a message without a stream was not sent: %r", error)

    async def _bury(self, letter: DeadLetter) -> None:
        room = self.connection.client.max_payload - _LETTER_ROOM
        if len(letter.frame) > room:
            letter = DeadLetter(
                source=letter.source,
                sequence=letter.sequence,
                subject=letter.subject,
                reason=f"{letter.reason} (cut from {len(letter.frame)} bytes)",
                attempts=letter.attempts,
                frame=letter.frame[:room],
            )
        await self.publish(letter)
        self._counts["dead_letters"] += 1

    @asynccontextmanager
    async def consume(self, consumer: str, *, limit: int) -> AsyncIterator[AsyncIterator[Delivery]]:
        if consumer not in self._consumers:
            raise BusError(f"unknown consumer {consumer!r}", remedy=f"One of {', '.join(self._consumers)}.")
        if limit < 1:
            raise BusError(f"limit {limit} takes no work")
        work = Work(self.connection, self.names, self._consumers[consumer], limit=limit, bury=self._bury)
        async with self._listed(f"consume_{consumer}", work), work.running():
            yield work.arrivals

    @asynccontextmanager
    async def follow(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[AsyncIterator[Record]]:
        if stream in STREAMS and STREAMS[stream].work:
            raise BusError(f"stream {stream} is a work queue", remedy="Use consume, or replay to look.")
        reader = Reader(
            self.connection, self.names, stream, start=start, tails=check_tails(tails), bury=self._bury
        )
        async with self._listed(f"follow_{stream.lower()}", reader), flat_task_group() as group:
            await group.start(reader.run)
            try:
                yield reader
            finally:
                group.cancel_scope.cancel()

    async def replay(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[Record]:
        patterns = check_tails(tails)
        last = (await self.stream_info(stream)).last
        check_position(stream, start, last)
        found = reads.replay(self.connection, self.names, stream, start=start, tails=patterns, last=last)
        async for record in found:
            if isinstance(record, Undecodable):
                log.error("replay of %s skips a message: %s", stream, record)
                continue
            yield record

    @asynccontextmanager
    async def listen(self, tail: str) -> AsyncIterator[AsyncIterator[Message]]:
        arrivals: Mailbox[Message] = Mailbox(limit=_LISTEN_LIMIT)

        def receive(message: Msg) -> None:
            try:
                arrivals.put(codec.decode(message.data)[1])
            except Undecodable as error:
                self._counts["listen_undecodable"] += 1
                log.warning("on %s: %s", message.subject, error)

        await self.connection.wait_connected(f"connection to listen to {tail}")
        subscription = await self.connection.subscribe(self.names.subject(tail), receive)
        # An answered request proves that the server has read the subscription written before it.
        await self.connection.api("INFO")
        try:
            yield arrivals
        finally:
            self._counts["listen_dropped"] += arrivals.dropped
            await self.connection.unsubscribe(subscription)

    async def get(self, stream: str, sequence: int) -> Message:
        return (await reads.get(self.connection, self.names, stream, sequence)).message

    async def last(self, tail: str) -> Record | None:
        answer = await reads.direct(
            self.connection,
            self.names.stream(stream_of(tail)),
            {"last_by_subj": self.names.subject(tail)},
            f"last message on {tail}",
        )
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
        holder = f"{self.role}/{self.instance}/{secrets.token_hex(6)}"
        async with self._state.lease(name, holder, ttl=ttl, wait=wait) as lease:
            yield lease

    def statistics(self) -> dict[str, float]:
        figures = {**self.connection.statistics(), **self.publisher.statistics(), **self._counts}
        for name, part in self._open.items():
            figures.update({f"{name}_{key}": value for key, value in part.statistics().items()})
        return figures

    @asynccontextmanager
    async def _listed(self, name: str, part: Work | Reader) -> AsyncIterator[None]:
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
    patience: float = 900.0,
    connect_seconds: float = 10.0,
    limits: Limits | None = None,
) -> AsyncIterator[NatsBus]:
    """Join a run as one instance of a role.

    ``patience`` is how many seconds a call waits for a server that went away. Raises BusUnavailable when
    no server answers within ``connect_seconds``, BusError when it refuses the token.
    """
    async with open_connection(
        url,
        name=f"spade.{run}.{role}.{instance}",
        token=token,
        patience=patience,
        connect_seconds=connect_seconds,
    ) as connection:
        bus = NatsBus(connection, run=run, role=role, instance=instance, limits=limits)
        await bus.publisher.open()
        async with flat_task_group() as group:
            group.start_soon(bus.publisher.run)
            try:
                yield bus
            finally:
                group.cancel_scope.cancel()
