"""Reading a stream without end, in order, without gap or duplicate.

A short-lived consumer without acknowledgements starts at the next sequence we have not seen. Every
disturbance (reconnect, silence, deleted consumer, a hole in the consumer's own count) leads to a new consumer
at the next sequence. So order and completeness do not depend on the old consumer.
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import anyio

from bus import codec
from bus.concurrency import ArrivalQueue, flat_task_group
from bus.connection import Connection
from bus.errors import BusError, BusUnavailable, Undecodable, UnknownKind
from bus.messages import DeadLetter
from bus.nats_client import Arrival
from bus.pull import Delivered, Pull
from bus.reads import Record
from bus.subjects import SECOND, STREAMS, Names
from bus.work import Bury

log = logging.getLogger("spade.bus")
_CAPACITY = 512
_CAPACITY_BYTES = 32 << 20
_LOOK = 8
_INACTIVE_SECONDS = 60.0
_BURY_SECONDS = 5.0
_CREATE_SECONDS, _TRY_SECONDS = 30.0, 3.0


def check_position(stream: str, next_sequence: int, last: int) -> None:
    """Raise BusError when ``stream`` ends before what was already read from it."""
    if next_sequence > last + 1:
        raise BusError(
            f"stream {stream} ends at {last}, but was read up to {next_sequence - 1}: "
            "the server lost messages it had acknowledged",
            remedy='A power failure does this; bus.sync = "always" prevents it. Begin a new run at '
            "the newest checkpoint: spade run RECIPE run.name=NAME --salvage RUN (docs/operating.md).",
        )


def check_followed(stream: str) -> None:
    """Raise BusError for a stream whose messages are not for reading in order."""
    if stream in STREAMS and STREAMS[stream].raw:
        raise BusError(f"stream {stream} holds no messages")
    if stream in STREAMS and STREAMS[stream].work:
        raise BusError(f"stream {stream} is a work queue", remedy="Use consume, or replay to look.")


class Follower:
    """One ``follow``. Iterate it for records while :meth:`running` is open."""

    def __init__(
        self, connection: Connection, names: Names, stream: str, start: int, tails: Sequence[str], bury: Bury
    ) -> None:
        self._connection, self._names, self._bury = connection, names, bury
        self._kind, self._stream = stream, names.stream(stream)
        self._subjects = [names.subject(tail) for tail in tails]
        self._next = max(1, start)
        self._records: ArrivalQueue[tuple[Record, int]] = ArrivalQueue()
        self._poison: ArrivalQueue[DeadLetter] = ArrivalQueue()
        self._pull: Pull | None = None
        self._broken = anyio.Event()
        self._expected = 1
        self.counts = Counter[str]()

    def __aiter__(self) -> Follower:
        return self

    async def __anext__(self) -> Record:
        record, size = await anext(self._records)
        self.counts["unread_bytes"] -= size
        # Look whether more is wanted now and then: looking at each record costs more than reading it.
        if len(self._records) % _LOOK == 0 and self._pull is not None:
            self._pull.wake()
        return record

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read while the context is open. Raises NotFound, BusError (lost messages) or BusUnavailable."""
        name = await self._create()
        buried = anyio.Event()
        async with flat_task_group() as group:
            group.start_soon(self._run, name)
            group.start_soon(self._bury_all, buried)
            try:
                yield
            finally:
                # A reader goes on behind a message that it passed over: its dead letter is written first.
                self._poison.end()
                with anyio.move_on_after(_BURY_SECONDS, shield=True):
                    await buried.wait()
                group.cancel_scope.cancel()

    async def _run(self, name: str) -> None:
        while True:
            try:
                await self._pull_until_broken(name)
            finally:
                # Spare the server a consumer; it would forget it by itself.
                self._connection.write(f"$JS.API.CONSUMER.DELETE.{self._stream}.{name}", b"")
            self.counts["restarts"] += 1
            name = await self._create()

    async def _create(self) -> str:
        """Create a consumer at the next message and return its name.

        A cluster may place it on a server that has just died: then there is no answer, and another name finds
        another server.
        """
        config: dict[str, Any] = {
            # The reader's name, for `nats consumer report`.
            "description": str(self._connection.client.options.get("name") or ""),
            "ack_policy": "none",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._next,
            "filter_subjects": self._subjects,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(_INACTIVE_SECONDS * SECOND),
        }
        deadline = monotonic() + _CREATE_SECONDS
        while True:
            info = await self._connection.api(f"STREAM.INFO.{self._stream}")
            check_position(self._stream, self._next, int(info["state"]["last_seq"]))
            name = f"follow-{secrets.token_hex(8)}"
            body = {"stream_name": self._stream, "config": {**config, "name": name}}
            try:
                verb = f"CONSUMER.CREATE.{self._stream}.{name}"
                await self._connection.api(verb, body, seconds=_TRY_SECONDS)
                return name
            except BusUnavailable as error:
                if monotonic() > deadline or self._connection.closed:
                    raise
                log.warning("following %s: %s; trying again", self._stream, error.what)

    async def _pull_until_broken(self, name: str) -> None:
        broken = self._broken = anyio.Event()
        self._expected = 1
        self._pull = Pull(
            self._connection,
            stream=self._stream,
            consumer=name,
            max_bytes=_CAPACITY_BYTES,
            wanted=self._wanted,
            on_message=self._on_message,
            on_broken=lambda gone: broken.set(),
        )
        try:
            async with flat_task_group() as group:
                group.start_soon(self._pull.run)
                await broken.wait()
                group.cancel_scope.cancel()
        finally:
            self._pull = None

    def _wanted(self) -> int:
        """Return how many messages may be owed or unread in all, less those that are unread."""
        owed = self._pull.owed if self._pull is not None else 0
        unread = len(self._records) + len(self._poison)
        if owed + unread > _CAPACITY // 2 or self.counts["unread_bytes"] > _CAPACITY_BYTES:
            return min(owed, _CAPACITY)
        return _CAPACITY - unread

    def _on_message(self, message: Arrival, delivered: Delivered) -> None:
        if self._broken.is_set():
            return
        sequence = delivered.stream_sequence
        if delivered.consumer_sequence != self._expected or sequence < self._next:
            self._broken.set()
            return
        self._expected += 1
        self._next = sequence + 1
        try:
            envelope, content = codec.decode(message.data, message.head)
        except Undecodable as error:
            self._skip(message, sequence, error)
            return
        self.counts["unread_bytes"] += len(message.data)
        record = Record(sequence, content, self._names.tail(message.subject), envelope)
        self._records.put((record, len(message.data)))

    def _skip(self, message: Arrival, sequence: int, error: Undecodable) -> None:
        """Pass over a message that cannot be read; the dead-letter stream keeps it.

        Facts are for everybody: a fact of a kind that another role registered is no dead letter.
        """
        if isinstance(error, UnknownKind) and self._kind == "EVENT":
            return
        self.counts["undecodable"] += 1
        log.error("%s %d is skipped: %s", self._stream, sequence, error)
        if self._kind != "DLQ":
            letter = DeadLetter(
                source=self._kind,
                sequence=sequence,
                subject=self._names.tail(message.subject),
                reason=error.reason,
                attempts=1,
                frame=message.data,
            )
            self._poison.put(letter)

    async def _bury_all(self, done: anyio.Event) -> None:
        try:
            async for letter in self._poison:
                await self._bury(letter)
        finally:
            done.set()
