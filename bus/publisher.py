"""Publishing that ends in an acknowledgement or in an error, never in doubt.

Each stream has a window of messages that are written but not acknowledged. A message without an answer is
written again under the same id until the server answers; while the server is away nothing is written. A full
stream is back-pressure: the message waits and is tried again.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

import anyio
import msgspec

from bus.connection import Connection, status_of
from bus.errors import BusError, BusUnavailable, Conflict, Denied, NotFound
from bus.nats_client import Arrival, headers_block, read_headers
from bus.reads import find_stored
from bus.subjects import BUCKETS, STREAMS

log = logging.getLogger("spade.bus")
ID = "Nats-Msg-Id"
# "Store failed" has one code for all its causes; a limit that was reached contains "maximum ... exceeded".
_STORE_FAILED = 10077
# No leader, no quorum, or a message of this id is on its way into the copies of the stream.
_UNREADY = frozenset({10008, 10009, 10158})
_CONFLICT = 10071
_STORE_FULL = frozenset({10002, 10023, 10028, 10047})
_DIAGNOSIS_SECONDS = 2.0
_HEAD_ROOM = 256
# The server recognises an id for 120 s (``bus.subjects``); after that we look for the message ourselves.
_DOUBT_SECONDS = 100.0
_WARN_SECONDS = 60.0
_ABSENT_REMEDY = "Has the run been provisioned? A full disk can switch JetStream off."
_DISK_REMEDY = "Free disk space or raise bus.store_gb, then start the run again."


@dataclass(frozen=True)
class Limits:
    """``window`` messages and ``window_bytes`` may be unacknowledged per stream.

    A message is written again after ``ack_seconds`` without an answer; ``unanswered`` such times in a row
    while the server is there, or ``absent_seconds`` without a stream, are an error. ``full_seconds`` bounds
    back-pressure.
    """

    window: int = 256
    window_bytes: int = 16 << 20
    ack_seconds: float = 5.0
    unanswered: int = 6
    absent_seconds: float = 10.0
    full_seconds: float = 6 * 3600.0


class Refusal(msgspec.Struct, gc=False):
    """The server's reason not to store a message."""

    err_code: int = 0
    description: str = ""


class PubAck(msgspec.Struct, gc=False):
    """The server's answer: the stream sequence, or an error."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: Refusal | None = None


class Window:
    """The messages of one stream that are not acknowledged yet, and the callers that wait for room.

    ``floor`` is the highest sequence that was acknowledged.
    """

    def __init__(self) -> None:
        self.messages = self.bytes = self.floor = 0
        self.waiting: deque[anyio.Event] = deque()

    def has_room(self, size: int, limits: Limits) -> bool:
        """Return whether a message of ``size`` bytes fits (one always does)."""
        if self.messages == 0:
            return True
        return self.messages < limits.window and self.bytes + size <= limits.window_bytes

    async def wait_room(self, size: int, limits: Limits) -> None:
        """Return when it is our turn and there is room."""
        turn = anyio.Event()
        self.waiting.append(turn)
        try:
            while self.waiting[0] is not turn or not self.has_room(size, limits):
                await turn.wait()
                index = self.waiting.index(turn)
                self.waiting[index] = turn = anyio.Event()
        finally:
            self.waiting.remove(turn)
            self.wake()

    def wake(self) -> None:
        """Let the first caller that waits look again."""
        if self.waiting:
            self.waiting[0].set()


class PendingMessage(msgspec.Struct, eq=False):
    """A message on its way. It ends with an ``answer`` or an ``error``.

    The fate of ``unsure`` writes is unknown; the first was at ``written``, when the stream was known to reach
    ``floor``. ``refusal`` is an answer that allows another try.
    """

    stream: str
    subject: str
    payload: bytes
    head: bytes
    token: str
    size: int
    window: Window
    due: float
    answer: PubAck | None = None
    error: BusError | None = None
    refusal: Refusal | None = None
    changed: anyio.Event | None = None
    tries: int = 0
    unanswered: int = 0
    absent_since: float = 0.0
    full_since: float = 0.0
    unsure: int = 0
    written: float = 0.0
    floor: int = 0

    def wake(self) -> None:
        """Let the task that waits for this message look again."""
        if self.changed is not None:
            self.changed.set()
            self.changed = None

    async def wait(self, seconds: float) -> None:
        """Return when something changed, or after ``seconds``."""
        self.changed = self.changed or anyio.Event()
        with anyio.move_on_after(seconds):
            await self.changed.wait()


class PublishBatch:
    """Messages that are published together; made by :meth:`StreamPublisher.batch`."""

    def __init__(self, publisher: StreamPublisher) -> None:
        self._publisher = publisher
        self._pending: deque[PendingMessage] = deque()
        self._answers: list[PubAck] = []
        self._failure: BusError | None = None

    async def put(
        self,
        stream: str,
        subject: str,
        payload: bytes,
        headers: dict[str, str] | None = None,
        *,
        message_id: str,
    ) -> None:
        """Write one message as soon as the window of its stream (server's name) has room.

        Raises BusError for a message that is too large.
        """
        head = headers_block({ID: message_id, **(headers or {})})
        one = self._publisher.offer(stream, subject, payload, head)
        while one is None and self._pending:
            await self._settle_next()
            one = self._publisher.offer(stream, subject, payload, head)
        if one is None:
            one = await self._publisher.offer_in_turn(stream, subject, payload, head)
        self._pending.append(one)
        while self._pending and self._pending[0].answer is not None:
            await self._settle_next()

    async def _settle_next(self) -> None:
        one = self._pending[0]
        try:
            if one.answer is None:
                await self._publisher.settle(one)
        except BusError as error:
            self._failure = self._failure or error
        if one.answer is not None:
            self._answers.append(one.answer)
        self._pending.popleft()

    async def finish(self) -> list[PubAck]:
        """Return all answers, in order; raises the first failure after the others have ended."""
        while self._pending:
            await self._settle_next()
        if self._failure is not None:
            raise self._failure
        return self._answers

    def abandon(self) -> None:
        """Stop waiting: messages without an answer may or may not be stored."""
        for one in self._pending:
            self._publisher.forget(one)


class StreamPublisher:
    """The one way into streams. :meth:`running` must be open."""

    def __init__(self, connection: Connection, limits: Limits | None = None) -> None:
        self._connection = connection
        self.limits = limits or Limits()
        self._prefix = f"{connection.inbox}.ack."
        self._pending: dict[str, PendingMessage] = {}
        self._windows: dict[str, Window] = {}
        self._serial = 0
        self._warned: dict[str, float] = {}
        self._decoder = msgspec.json.Decoder(PubAck)
        self._counts = dict.fromkeys(
            ("stored", "duplicates", "retries", "full", "absent", "unanswered", "conflicts", "failed"), 0.0
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hear the server's answers while the context is open."""
        subscription = await self._connection.subscribe(f"{self._prefix}*", self._on_answer)
        unwatch = self._connection.watch(self._on_state)
        unwatch_denied = self._connection.watch_denied(self._on_denied)
        try:
            yield
        finally:
            unwatch()
            unwatch_denied()
            with anyio.CancelScope(shield=True):
                await self._connection.unsubscribe(subscription)

    async def send(
        self,
        stream: str,
        subject: str,
        payload: bytes,
        headers: dict[str, str] | None = None,
        *,
        message_id: str,
    ) -> PubAck:
        """Store one message; ``stream`` is the server's name of the stream.

        Raises Conflict for a lost compare-and-set, Denied, BusUnavailable, or BusError (refused, disk full).
        """
        async with self.batch() as batch:
            await batch.put(stream, subject, payload, headers, message_id=message_id)
            return (await batch.finish())[0]

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[PublishBatch]:
        """Publish many messages through the windows; those that are not finished at the end are abandoned."""
        batch = PublishBatch(self)
        try:
            yield batch
        finally:
            batch.abandon()

    def statistics(self) -> dict[str, float]:
        """Return the use of the windows and counters."""
        windows = self._windows.values()
        return {
            "publish_in_flight": float(sum(window.messages for window in windows)),
            "publish_in_flight_bytes": float(sum(window.bytes for window in windows)),
            "publish_waiting": float(sum(len(window.waiting) for window in windows)),
            **{f"publish_{name}": value for name, value in self._counts.items()},
        }

    # The window.

    def _window(self, stream: str) -> Window:
        window = self._windows.get(stream)
        if window is None:
            window = self._windows[stream] = Window()
        return window

    def offer(self, stream: str, subject: str, payload: bytes, head: bytes) -> PendingMessage | None:
        """Write one message now; None when its window is full. Raises BusError for one that is too large."""
        size = len(payload) + _HEAD_ROOM
        if size > self._connection.client.max_payload:
            raise self._too_large(subject, size)
        window = self._window(stream)
        if window.waiting or not window.has_room(size, self.limits):
            return None
        return self._start(window, stream, subject, payload, head)

    async def offer_in_turn(self, stream: str, subject: str, payload: bytes, head: bytes) -> PendingMessage:
        """Write one message as soon as it is our turn and there is room."""
        window = self._window(stream)
        await window.wait_room(len(payload) + _HEAD_ROOM, self.limits)
        return self._start(window, stream, subject, payload, head)

    def _start(
        self, window: Window, stream: str, subject: str, payload: bytes, head: bytes
    ) -> PendingMessage:
        size = len(payload) + _HEAD_ROOM
        window.messages += 1
        window.bytes += size
        self._serial += 1
        one = PendingMessage(stream, subject, payload, head, f"{self._serial:x}", size, window, monotonic())
        self._pending[one.token] = one
        try:
            self._write(one)
        except BaseException:
            self.forget(one)
            raise
        return one

    def forget(self, one: PendingMessage) -> None:
        """Take a message out of its window; without effect the second time."""
        if self._pending.pop(one.token, None) is not None:
            one.payload = b""  # a long batch keeps its messages
            one.window.messages -= 1
            one.window.bytes -= one.size
            one.window.wake()

    def _too_large(self, subject: str, size: int) -> BusError:
        most = self._connection.client.max_payload
        return BusError(
            f"a message of {size} bytes for {subject} exceeds the {most} bytes that the server takes",
            remedy="Lower agent.play_tokens, which bounds a play, or raise bus.max_payload_mb "
            "(max_payload in the configuration of an external broker).",
        )

    # Writing.

    def _write(self, one: PendingMessage) -> None:
        """Write a message if there is a server; a lost one is written again later."""
        if one.size > self._connection.client.max_payload:
            raise self._too_large(one.subject, one.size)  # the server was replaced by another one
        now = monotonic()
        one.due = now + self.limits.ack_seconds
        if not self._connection.write(one.subject, one.payload, self._prefix + one.token, one.head):
            self._connection.check_open(f"PubAck of {one.subject}")
            return
        self._counts["retries"] += one.tries > 0
        one.tries += 1
        if not one.unsure:
            one.written, one.floor = now, one.window.floor
        one.unsure += 1

    def _in_doubt(self, one: PendingMessage) -> bool:
        """Return whether a message may be stored although the server no longer remembers its id."""
        return one.unsure > 0 and monotonic() - one.written > _DOUBT_SECONDS

    async def settle(self, one: PendingMessage) -> PubAck:
        """Return the answer to a written message, repeating it as needed. Raises BusError."""
        try:
            while one.answer is None:
                if one.error is not None:
                    raise one.error
                self._connection.check_open(f"PubAck of {one.subject}")
                if not self._connection.connected:
                    await self._connection.wait_connected(f"PubAck of {one.subject}")
                elif (refusal := one.refusal) is not None:
                    pause = await self._judge(one, refusal)
                    one.refusal, one.unanswered = None, 0
                    one.unsure -= one.unsure > 0
                    one.due = monotonic() + pause + self.limits.ack_seconds
                    await one.wait(pause)
                    if one.answer is None and one.error is None:
                        await self._write_again(one)
                elif (left := one.due - monotonic()) > 0:
                    await one.wait(left)
                else:
                    await self._count_unanswered(one)
                    await self._write_again(one)
        except BusError as error:
            self._counts["conflicts" if isinstance(error, Conflict) else "failed"] += 1
            raise
        finally:
            self.forget(one)
        return one.answer

    async def _write_again(self, one: PendingMessage) -> None:
        if self._in_doubt(one) and await self._was_stored(one):
            return
        if one.answer is None:
            self._write(one)

    async def _was_stored(self, one: PendingMessage) -> bool:
        """Return whether a message lies in the stream whose id the server no longer remembers."""
        try:
            found = await find_stored(
                self._connection, one.stream, one.subject, read_headers(one.head)[ID], after=one.floor
            )
        except BusError as error:
            log.debug("no answer whether %s is stored: %s", one.subject, error)
            return False
        if found is None:
            one.unsure = 0
        elif one.answer is None:
            self._finish(one, PubAck(stream=one.stream, seq=found, duplicate=True))
        return found is not None

    async def _count_unanswered(self, one: PendingMessage) -> None:
        """Count a try without an answer. Raises BusError after too many, with the reason."""
        if not one.tries:
            return
        one.unanswered += 1
        self._counts["unanswered"] += 1
        if one.unanswered <= self.limits.unanswered:
            return
        if await self._is_missing(one.stream):
            raise BusError(
                f"no stream takes {one.subject}, though another client listens on it",
                remedy="Has the run been provisioned?",
            )
        waited = self.limits.unanswered * self.limits.ack_seconds
        raise BusError(
            f"the server does not store {one.subject}: {waited:g} s without an answer",
            remedy=f"A full disk does this; its log says more. {_DISK_REMEDY}",
        )

    async def _is_missing(self, stream: str) -> bool:
        try:
            await self._connection.api(f"STREAM.INFO.{stream}", seconds=_DIAGNOSIS_SECONDS)
        except NotFound:
            return True
        except BusError:
            return False
        return False

    async def _judge(self, one: PendingMessage, refusal: Refusal) -> float:
        """Return how many seconds to wait before the next try. Raises BusError when there is none."""
        now, code, text = monotonic(), refusal.err_code, refusal.description
        if code == _STORE_FAILED and "maximum" in text:
            self._counts["full"] += 1
            self._warn_full(one.stream, text)
            one.full_since = one.full_since or now
            if now - one.full_since > self.limits.full_seconds:
                raise BusUnavailable(
                    f"room in stream {one.stream}", self.limits.full_seconds, remedy=_full_remedy(one.stream)
                )
            return random.uniform(0.005, min(0.5, 0.02 * 2 ** min(one.tries, 5)))
        if code == _CONFLICT:
            raise Conflict(f"{one.subject}: {text}")
        if code in _STORE_FULL:
            raise BusError(f"the server's store is full: {text}", remedy=_DISK_REMEDY)
        if code and code != _STORE_FAILED and code not in _UNREADY:
            raise BusError(f"the server refused {one.subject}: {text} (code {code})")
        # A server that starts, ends or elects a leader has no stream for a while.
        self._counts["absent"] += 1
        one.absent_since = one.absent_since or now
        limit = self.limits.absent_seconds
        if now - one.absent_since > self._connection.election_time(limit) or (
            now - one.absent_since > limit and await self._is_missing(one.stream)
        ):
            raise BusError(text, remedy=_ABSENT_REMEDY)
        return random.uniform(0.02, 0.25)

    def _warn_full(self, stream: str, why: str) -> None:
        """Warn that a stream refused a message, which waits; at most once per minute and stream."""
        now = monotonic()
        if now - self._warned.get(stream, -math.inf) >= _WARN_SECONDS:
            self._warned[stream] = now
            log.warning(
                "stream %s is full (%s; its part is %g %% of bus.store_gb): publishers wait. %s",
                stream,
                why,
                100 * _share(stream),
                _full_remedy(stream),
            )

    # Callbacks of the connection.

    def _on_answer(self, message: Arrival) -> None:
        one = self._pending.get(message.subject[len(self._prefix) :])
        if one is None:
            return
        if not message.data and status_of(message) == "503":
            one.refusal = Refusal(description=f"no stream takes {one.subject}")
            one.wake()
            return
        try:
            answer = self._decoder.decode(message.data)
        except msgspec.DecodeError as error:
            one.error = BusError(f"the server's answer to {one.subject} makes no sense: {error}")
            one.wake()
            return
        if answer.error is not None:
            code, text = answer.error.err_code, answer.error.description
            if code == _STORE_FAILED and "maximum" not in text:
                text = f"the server cannot store {one.subject}: {text}"
            one.refusal = Refusal(code, text)
        elif answer.stream != one.stream:
            one.error = BusError(f"{one.subject} went to stream {answer.stream}, not {one.stream}")
        else:
            self._finish(one, answer)
        one.wake()

    def _finish(self, one: PendingMessage, answer: PubAck) -> None:
        self._counts["stored"] += 1
        self._counts["duplicates"] += answer.duplicate
        one.window.floor = max(one.window.floor, answer.seq)
        one.answer = answer
        self.forget(one)

    def _on_state(self) -> None:
        """Write everything again after a connect, except messages that may be stored already."""
        now = monotonic()
        for one in list(self._pending.values()):
            one.refusal, one.unanswered, one.absent_since, one.due = None, 0, 0.0, now
            if self._connection.connected and not self._in_doubt(one) and one.error is None:
                try:
                    self._write(one)
                except BusError as error:
                    one.error = error
            one.wake()

    def _on_denied(self, error: Denied) -> None:
        """End the messages on a denied subject: no other answer comes for them."""
        for one in self._pending.values():
            if error.action == "publish" and error.concerns(one.subject):
                one.error = Denied("publish", one.subject)
                one.wake()


def _full_remedy(stream: str) -> str:
    known = STREAMS.get(stream.split("_", 1)[0])
    return (known and known.hint) or "Raise bus.store_gb."


def _share(stream: str) -> float:
    known = STREAMS.get(stream.split("_", 1)[0]) or BUCKETS.get(stream.rsplit("_", 1)[-1])
    return known.share if known is not None else math.nan
