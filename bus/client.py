"""The bus over NATS."""

from __future__ import annotations

import logging
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, Required, TypedDict, Unpack, overload

import nats.errors
from nats.aio.msg import Msg

from bus import codec, reads
from bus.access import queue_of
from bus.blobstore import NatsStore
from bus.claims import INLINE, Claims, Opening
from bus.codec import BlobRef
from bus.connection import Connection, open_connection
from bus.entry import Entry, Limits, PubAck
from bus.errors import BusError, BusUnavailable, Denied, Forgotten, Undecodable
from bus.follow import Reader, check_position
from bus.interface import (
    Announcement,
    Blobs,
    Bus,
    Delivery,
    Lease,
    Present,
    Record,
    StreamInfo,
    check_followed,
    check_tails,
    letter_of,
)
from bus.mailbox import Mailbox
from bus.messages import DeadLetter, Message, RoleHello
from bus.presence import NatsPresence, announced, who_is_there
from bus.publish import Publisher
from bus.scopes import flat_task_group
from bus.state import State
from bus.subjects import CONSUMERS, PIECES, STREAMS, Consumer, stream_of
from bus.thread import on_own_thread
from bus.work import Work

log = logging.getLogger("spade.bus")
_LISTEN_LIMIT = 4096
_LETTER_ROOM = 4096


class _Sent(NamedTuple):
    """A message on its way: its entry, and the blob with its body if that travels beside it."""

    entry: Entry
    stream: str
    blob: BlobRef | None


class NatsBus(Bus):
    """The bus over one NATS connection. Made by :func:`connect`.

    A message whose frame is larger than ``inline`` bytes travels as a reference to a blob.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        run: str,
        role: str,
        instance: str,
        limits: Limits | None = None,
        consumers: Mapping[str, Consumer] = CONSUMERS,
        inline: int = INLINE,
    ) -> None:
        super().__init__(run=run, role=role, instance=instance)
        self.connection = connection
        self.publisher = Publisher(connection, limits)
        self._consumers = consumers
        self._streams = {kind: self.names.stream(kind) for kind in STREAMS}
        self._state = State(connection, self.publisher, self.names)
        self._inline = min(inline, connection.client.max_payload - _LETTER_ROOM)
        stores = [NatsStore(connection, self.publisher, self.names, kind) for kind in PIECES]
        self.claims = Claims(stores, background=True)
        self._presence = NatsPresence(connection, self._state, self.names)
        self._open: dict[str, Work | Reader] = {}
        self._counts = dict.fromkeys(
            ("core_dropped", "listen_dropped", "listen_undecodable", "dead_letters"), 0.0
        )

    def _encode(self, message: Message) -> bytes:
        return codec.encode(message, run=self.run, role=self.role, instance=self.instance)

    def _offer(self, message: Message) -> Entry | bytes:
        """Write a message, or return its frame when that would have to wait or its body must travel apart."""
        frame = self._encode(message)
        if len(frame) > self._inline:
            return frame
        subject = self.names.root + message.tail
        entry = self.publisher.offer(self._streams[message.stream], subject, frame, message_id=message.key)
        return entry if entry is not None else frame

    async def _submit(self, message: Message, frame: bytes) -> _Sent:
        """Write a frame as soon as there is room, its body apart if it is large."""
        blob = None
        if len(frame) > self._inline and not isinstance(message, DeadLetter):
            blob = await self.claims.store(message)
            frame = codec.encode_claim(codec.envelope_of(frame), blob)
        stream, subject = self._streams[message.stream], self.names.root + message.tail
        entry = await self.publisher.submit(stream, subject, frame, message_id=message.key)
        return _Sent(entry, message.stream, blob)

    async def _collect(self, entries: list[Entry], apart: Iterable[_Sent]) -> list[int]:
        failure: BusError | None = None
        try:
            await self.publisher.collect(entries)
        except BusError as error:
            failure = error
        for one in apart:
            if one.blob is not None and one.entry.answer is not None:
                await self._confirm(one.blob, one.stream, one.entry.answer)
        if failure is not None:
            raise failure
        return [entry.answer.seq for entry in entries if entry.answer is not None]

    async def _confirm(self, blob: BlobRef, stream: str, answer: PubAck) -> None:
        """Let the stored message claim its blob; one that was stored before has another, or none."""
        if answer.duplicate:
            request: dict[str, object] = {"seq": answer.seq}
            found = await reads.direct(self.connection, self.names.stream(stream), request, "a duplicate")
            if found is None or codec.claim_in(found.data) != blob:
                await self.claims.forget(blob)
                return
        await self.claims.confirm(blob, stream, answer.seq)

    async def publish(self, message: Message) -> int:
        if not message.stream:
            await self._say(message)
            return 0
        offered = self._offer(message)
        if isinstance(offered, Entry):
            return (await self._collect([offered], ()))[0]
        sent = await self._submit(message, offered)
        return (await self._collect([sent.entry], (sent,)))[0]

    async def publish_all(self, messages: Iterable[Message]) -> list[int]:
        entries: list[Entry] = []
        apart: list[_Sent] = []
        silent: list[int] = []
        failure: Exception | None = None
        try:
            for number, message in enumerate(messages):
                if not message.stream:
                    await self._say(message)
                    silent.append(number)
                    continue
                offered = self._offer(message)
                if not isinstance(offered, Entry):
                    apart.append(await self._submit(message, offered))
                    offered = apart[-1].entry
                entries.append(offered)
        except Exception as error:
            failure = error  # what is on its way ends first
        except BaseException:
            self.publisher.abandon(entries)
            raise
        sequences = await self._collect(entries, apart)
        if failure is not None:
            raise failure
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
        sequence = await self.publish(letter)
        self._counts["dead_letters"] += 1
        await self.claims.keep_for_letter(letter, sequence)

    @asynccontextmanager
    async def consume(
        self, consumer: str, *, limit: int, now: Callable[[], int] | None = None
    ) -> AsyncIterator[AsyncIterator[Delivery]]:
        queue = queue_of(consumer, self.role, self._consumers)
        if limit < 1:
            raise BusError(f"limit {limit} takes no work", remedy="Give a limit of at least 1.")
        work = Work(self.connection, self.names, queue, limit=limit, now=now, bury=self._bury)
        await work.check()
        async with self._listed(f"consume_{consumer}", work), work.running():
            arrivals = work.arrivals
            yield Opening(arrivals, self._open_delivery, arrivals.put_back, arrivals.take)

    @asynccontextmanager
    async def follow(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[AsyncIterator[Record]]:
        check_followed(stream)
        reader = Reader(
            self.connection, self.names, stream, start=start, tails=check_tails(tails), bury=self._bury
        )
        async with self._listed(f"follow_{stream.lower()}", reader), flat_task_group() as group:
            await group.start(reader.run)
            try:
                yield Opening(reader, lambda record: self._open_record(stream, record), take=reader.take)
            finally:
                group.cancel_scope.cancel()

    async def _open_delivery(self, delivery: Delivery) -> Delivery | None:
        return delivery if await self.claims.open_delivery(delivery) else None

    async def _open_record(self, stream: str, record: Record) -> Record | None:
        try:
            return await self.claims.open_record(record, stream)
        except Forgotten:
            return None
        except Undecodable as error:
            log.error("%s %d is skipped: %s", stream, record.sequence, error)
            await self._bury(letter_of(stream, record, error.reason))
            return None

    async def replay(
        self, stream: str, *, start: int = 1, tails: Sequence[str] | None = None
    ) -> AsyncIterator[Record]:
        patterns = check_tails(tails)
        last = (await self.stream_info(stream)).last
        check_position(stream, start, last)
        found = reads.replay(self.connection, self.names, stream, start=start, tails=patterns, last=last)
        async for record in found:
            try:
                if isinstance(record, Undecodable):
                    raise record
                opened = await self.claims.open_record(record, stream)
            except Forgotten:
                continue
            except Undecodable as error:
                log.error("replay of %s skips a message: %s", stream, error)
                continue
            yield opened

    @asynccontextmanager
    async def listen(self, tail: str) -> AsyncIterator[AsyncIterator[Message]]:
        arrivals: Mailbox[Message] = Mailbox(limit=_LISTEN_LIMIT)

        def receive(message: Msg) -> None:
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
            # An answered request proves that the server has read the subscription written before it.
            await self.connection.api("INFO")
            yield arrivals
        finally:
            unwatch()
            unwatch_denied()
            self._counts["listen_dropped"] += arrivals.dropped
            await self.connection.unsubscribe(subscription)

    async def get(self, stream: str, sequence: int) -> Message:
        record = await reads.get(self.connection, self.names, stream, sequence)
        return (await self.claims.open_record(record, stream)).message

    async def last(self, tail: str) -> Record | None:
        stream = stream_of(tail)
        answer = await reads.newest(
            self.connection,
            self.names.stream(stream),
            {"last_by_subj": self.names.subject(tail)},
            f"last message on {tail}",
        )
        if answer is None:
            return None
        try:
            return await self.claims.open_record(reads.record_of(self.names, answer), stream)
        except Forgotten:
            return None

    async def purge(self, stream: str, *, below: int | None = None, tail: str | None = None) -> int:
        if below is not None and below <= 1:
            return 0
        body: dict[str, Any] = {}
        if below is not None:
            body["seq"] = below
        if tail is not None:
            body["filter"] = self.names.subject(tail)
        answer = await self.connection.api(f"STREAM.PURGE.{self.names.stream(stream)}", body)
        if answer["purged"]:
            await self.claims.after_purge(stream, whole=tail is None)
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

    @property
    def blobs(self) -> Blobs:
        return self.claims.blobs

    @asynccontextmanager
    async def announce(self, hello: RoleHello) -> AsyncIterator[Announcement]:
        async with announced(self, self._presence, hello) as announcement:
            yield announcement

    async def present(self) -> list[Present]:
        return await who_is_there(self._presence)

    def statistics(self) -> dict[str, float]:
        parts = (self.connection, self.publisher, self.claims)
        figures = {name: value for part in parts for name, value in part.statistics().items()}
        figures.update(self._counts)
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


class Joining(TypedDict, total=False):
    """The options of :func:`connect`."""

    run: Required[str]
    role: Required[str]
    instance: Required[str]
    token: str
    seed_file: Path | str | None
    tls: ssl.SSLContext | Path | str | None
    patience: float
    connect_seconds: float
    limits: Limits | None
    inline: int


@overload
def connect(
    url: str, *, own_thread: Literal[False] = False, **options: Unpack[Joining]
) -> AbstractAsyncContextManager[NatsBus]: ...


@overload
def connect(
    url: str, *, own_thread: bool, **options: Unpack[Joining]
) -> AbstractAsyncContextManager[Bus]: ...


def connect(
    url: str, *, own_thread: bool = False, **options: Unpack[Joining]
) -> AbstractAsyncContextManager[Bus]:
    """Join the run ``run`` as ``instance`` of ``role``; the bus is open while the context is.

    ``url`` may name several servers of a cluster, separated by commas. ``token`` or ``seed_file`` (the
    nkey of the role) say who we are; ``tls`` is a file of CA certificates to trust, or a context.
    ``patience`` (900) is how many seconds a call waits for a server that went away. Raises BusUnavailable
    when no server answers within ``connect_seconds`` (10), BusError when it refuses us, Denied when the key
    is another role's.

    ``limits`` are the bounds of publishing. A message whose frame is larger than ``inline`` bytes (1 MB)
    travels as a reference to a blob. With ``own_thread`` the bus has a thread and an event loop of its
    own: what it must do in time goes on while the caller's loop is blocked, and each call takes two changes
    of threads.
    """
    if own_thread:
        return on_own_thread(lambda: _join(url, **options), name=f"bus-{options['role']}")
    return _join(url, **options)


@asynccontextmanager
async def _join(
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
    inline: int = INLINE,
) -> AsyncIterator[NatsBus]:
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
        bus = NatsBus(connection, run=run, role=role, instance=instance, limits=limits, inline=inline)
        await bus.publisher.open()
        if seed_file:
            # Answers to another role's inbox would be denied; here that is an error, later a silence.
            await connection.api("INFO", seconds=connect_seconds)
        async with flat_task_group() as group:
            group.start_soon(bus.publisher.run)
            group.start_soon(bus.claims.run)
            try:
                yield bus
            finally:
                group.cancel_scope.cancel()
