"""Reading a stream for ever, in order, without gap or duplicate.

A short-lived consumer without acknowledgements starts at the next sequence we have not seen. Whatever
goes wrong (reconnect, silence, deleted consumer, a hole in the consumer's own count) ends in the same
way: a new consumer at the next sequence. So order and completeness do not depend on what the old one did.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from time import monotonic
from typing import Any

import anyio
import nats.errors
from anyio.abc import TaskStatus

from bus.connection import Connection
from bus.errors import BusError, BusUnavailable, Undecodable, UnknownKind
from bus.interface import Record
from bus.lane import Arrival
from bus.mailbox import Mailbox
from bus.messages import DeadLetter
from bus.pull import Delivered, Pull, PullSettings, read
from bus.subjects import SECOND, Names
from bus.work import Bury

log = logging.getLogger("spade.bus")
_CAPACITY = 512
_CAPACITY_BYTES = 32 << 20
_LOOK = 8
_INACTIVE_SECONDS = 60.0
_CREATE_SECONDS, _TRY_SECONDS = 30.0, 3.0


def check_position(stream: str, next_sequence: int, last: int) -> None:
    """Raise BusError when ``stream`` ends before what was already read from it."""
    if next_sequence > last + 1:
        raise BusError(
            f"stream {stream} ends at {last}, but was read up to {next_sequence - 1}: "
            "the server lost messages it had acknowledged",
            remedy='A power failure does this; bus.sync = "always" prevents it. Start a new run.',
        )


class Reader:
    """One ``follow``. Iterate it for records; :meth:`run` must be running."""

    def __init__(
        self,
        connection: Connection,
        names: Names,
        stream: str,
        *,
        start: int,
        tails: Sequence[str],
        bury: Bury,
    ) -> None:
        self._connection, self._names, self._bury = connection, names, bury
        self._kind, self._stream = stream, names.stream(stream)
        self._subjects = [names.subject(tail) for tail in tails]
        self._next = max(1, start)
        self._records: Mailbox[tuple[Record, int]] = Mailbox()
        self._poison: Mailbox[DeadLetter] = Mailbox()
        self._bytes = 0
        self._pull: Pull | None = None
        self._broken = anyio.Event()
        self._expected = 1
        self._passed_over: set[str] = set()
        self._counts = dict.fromkeys(("read", "undecodable", "unknown", "restarts"), 0.0)

    def __aiter__(self) -> Reader:
        return self

    async def __anext__(self) -> Record:
        return self._taken(await self._records.__anext__())

    def take(self) -> Record | None:
        """Return the next record if it need not be waited for."""
        item = self._records.take()
        return self._taken(item) if item is not None else None

    def _taken(self, item: tuple[Record, int]) -> Record:
        record, size = item
        self._bytes -= size
        # As soon as this much is free, and not at each record after it: looking costs more than reading.
        if len(self._records) % _LOOK == 0 and self._pull is not None and self._wanted():
            self._pull.wake()
        return record

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters of this reader."""
        return {
            "position": float(self._next - 1),
            "unread": float(len(self._records)),
            "unread_bytes": float(self._bytes),
            **self._counts,
        }

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Read for ever. Raises NotFound, BusError (lost messages) or BusUnavailable."""
        started = False
        async with anyio.create_task_group() as group:
            group.start_soon(self._bury_all)
            while True:
                name = await self._create_somewhere()
                try:
                    if not started:
                        task_status.started()
                        started = True
                    await self._pull_until_broken(name)
                finally:
                    await self._delete(name)
                self._counts["restarts"] += 1

    async def _create_somewhere(self) -> str:
        """Make a consumer and return its name. A cluster may give it to a server that has just died: nobody
        answers then, and another name finds another server.
        """
        await self._connection.wait_connected(f"connection to follow {self._stream}")
        deadline = monotonic() + _CREATE_SECONDS
        while True:
            name = f"follow-{secrets.token_hex(8)}"
            try:
                await self._create(name)
                return name
            except BusUnavailable as error:
                if monotonic() > deadline or self._connection.closed:
                    raise
                log.warning("following %s: %s; trying again", self._stream, error.what)

    async def _create(self, name: str) -> None:
        info = await self._connection.api(f"STREAM.INFO.{self._stream}")
        check_position(self._stream, self._next, int(info["state"]["last_seq"]))
        config: dict[str, Any] = {
            "name": name,
            # Who reads, for people: `spade bus top` shows it.
            "description": str(self._connection.client.options.get("name") or ""),
            "ack_policy": "none",
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._next,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": int(_INACTIVE_SECONDS * SECOND),
        }
        if self._subjects:
            config["filter_subjects"] = self._subjects
        await self._connection.api(
            f"CONSUMER.CREATE.{self._stream}.{name}",
            {"stream_name": self._stream, "config": config},
            seconds=_TRY_SECONDS,
        )

    async def _pull_until_broken(self, name: str) -> None:
        self._broken, self._expected = anyio.Event(), 1
        self._pull = pull = Pull(
            self._connection,
            stream=self._stream,
            consumer=name,
            settings=PullSettings(max_bytes=_CAPACITY_BYTES),
            wanted=self._wanted,
            on_message=self._on_message,
            on_gone=lambda why: self._broken.set(),
            on_reset=lambda: self._broken.set(),
        )
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(pull.run)
                await self._broken.wait()
                group.cancel_scope.cancel()
        finally:
            self._pull = None

    async def _delete(self, name: str) -> None:
        """Spare the server a consumer; it would forget it by itself."""
        if not self._connection.connected:
            return
        with anyio.CancelScope(shield=True):
            try:
                await self._connection.send(f"$JS.API.CONSUMER.DELETE.{self._stream}.{name}", b"")
            except (nats.errors.Error, OSError) as error:
                log.debug("deleting consumer %s: %r", name, error)

    def _wanted(self) -> int:
        owed = self._pull.owed if self._pull is not None else 0
        unread = len(self._records) + len(self._poison)
        if owed + unread > _CAPACITY // 2 or self._bytes > _CAPACITY_BYTES:
            return 0
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
        tail = self._names.tail(message.subject)
        try:
            envelope, content = read(message)
        except UnknownKind as error:
            if self._kind != "EVENT":
                self._put_aside(message, sequence, tail, error)
                return
            # Facts are for everybody: a reader passes over the kinds of roles that it does not know.
            self._counts["unknown"] += 1
            if error.kind not in self._passed_over:
                self._passed_over.add(error.kind)
                log.info("%s: messages of kind %s are passed over", self._stream, error.kind)
            return
        except Undecodable as error:
            self._put_aside(message, sequence, tail, error)
            return
        self._counts["read"] += 1
        self._bytes += len(message.data)
        self._records.put((Record(sequence, content, tail, envelope), len(message.data)))

    def _put_aside(self, message: Arrival, sequence: int, tail: str, error: Undecodable) -> None:
        """Skip what cannot be read; the dead-letter stream keeps it."""
        self._counts["undecodable"] += 1
        log.error("%s %d is skipped: %s", self._stream, sequence, error)
        letter = DeadLetter(
            source=self._kind,
            sequence=sequence,
            subject=tail,
            reason=error.reason,
            attempts=1,
            frame=message.data,
        )
        if self._kind != "DLQ":
            self._poison.put(letter)

    async def _bury_all(self) -> None:
        async for letter in self._poison:
            await self._bury(letter)
