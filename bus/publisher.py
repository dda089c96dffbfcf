"""Publishing that ends in an acknowledgement or in an error, never in doubt.

Each stream has a window of messages that are written but not acknowledged. A message without an answer is
written again under the same id until the server answers; while the server is away nothing is written. A full
stream is back-pressure: the message waits and is tried again.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from time import monotonic

import anyio
import msgspec

from bus.concurrency import flat_task_group
from bus.connection import Connection, status_of
from bus.errors import BusError, BusUnavailable, Conflict, NotFound
from bus.nats_client import Arrival, headers_block
from bus.subjects import STREAMS

log = logging.getLogger("spade.bus")
# "Store failed" has one code for all its causes; a limit that was reached contains "maximum ... exceeded".
_STORE_FAILED = 10077
# No leader, no quorum, or a message of this id is on its way into the copies of the stream.
_UNREADY = frozenset({0, 10008, 10009, 10158})
_CONFLICT = 10071
_STORE_FULL = frozenset({10002, 10023, 10028, 10047})
_DIAGNOSIS_SECONDS = 2.0
_HEAD_ROOM = 256
_WARN_SECONDS = 60.0
_ABSENT_REMEDY = "Has the run been provisioned? A full disk can switch JetStream off."
_DISK_REMEDY = "Free disk space or raise bus.store_gb, then start the run again."


@dataclass(frozen=True)
class Limits:
    """``window`` messages and ``window_bytes`` may be unacknowledged per stream.

    A message is written again after ``ack_seconds`` without an answer; ``unanswered`` such times in a row
    while the server is there are an error. So are ``absent_seconds`` without a stream, and six times as long
    without a leader of it. ``full_seconds`` bounds back-pressure.
    """

    window: int = 256
    window_bytes: int = 16 << 20
    ack_seconds: float = 5.0
    unanswered: int = 6
    absent_seconds: float = 10.0
    full_seconds: float = 6 * 3600.0


class Outgoing(msgspec.Struct, frozen=True):
    """A message to store: ``stream`` is the server's name, the server stores a ``message_id`` once."""

    stream: str
    subject: str
    payload: bytes
    message_id: str
    headers: dict[str, str] = {}

    @property
    def size(self) -> int:
        """The bytes on the wire, roughly."""
        return len(self.payload) + _HEAD_ROOM


class Refusal(msgspec.Struct):
    """The server's reason not to store a message."""

    err_code: int = 0
    description: str = ""


class PubAck(msgspec.Struct):
    """The server's answer: the stream sequence, or an error."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: Refusal | None = None


_answers = msgspec.json.Decoder(PubAck)


class Window:
    """The messages of one stream that are not acknowledged yet, and the callers that wait for room."""

    def __init__(self, limits: Limits, counts: Counter[str]) -> None:
        self._limits, self._counts = limits, counts
        self._messages = self._bytes = 0
        self._turn, self._left = anyio.Lock(fast_acquire=True), anyio.Event()

    async def enter(self, size: int) -> None:
        """Take room for a message (one always fits) when it is our turn; :meth:`leave` gives it back."""
        limits = self._limits
        self._counts["waiting"] += 1
        try:
            async with self._turn:
                while self._messages and (
                    self._messages >= limits.window or self._bytes + size > limits.window_bytes
                ):
                    self._left = anyio.Event()
                    await self._left.wait()
                self._change(1, size)
        finally:
            self._counts["waiting"] -= 1

    def leave(self, size: int) -> None:
        """Give the room of a message back."""
        self._change(-1, -size)
        self._left.set()

    def _change(self, messages: int, size: int) -> None:
        self._messages += messages
        self._bytes += size
        self._counts["in_flight"] += messages
        self._counts["in_flight_bytes"] += size


@dataclass(slots=True)
class _Patience:
    """Bears the failures of one message for as long as the limits allow."""

    unanswered: int = 0
    tries: int = 0
    full_since: float = math.inf
    absent_since: float = math.inf


@dataclass
class Publisher:
    """The one way into streams."""

    connection: Connection
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        self.counts = Counter[str]()
        self._windows: defaultdict[str, Window] = defaultdict(lambda: Window(self.limits, self.counts))
        self._warned: dict[str, float] = {}

    async def send(self, message: Outgoing) -> int:
        """Store one message and return its sequence.

        Raises Conflict for a lost compare-and-set, Denied, BusUnavailable, or BusError (refused, disk full).
        """
        window = self._windows[message.stream]
        await window.enter(message.size)
        try:
            return await self._store(message)
        finally:
            window.leave(message.size)

    async def send_all(self, messages: AsyncIterable[Outgoing]) -> list[int]:
        """Store all messages through the windows and return their sequences.

        Raises the first failure, also one of the source, after the others have ended.
        """
        sequences: list[int] = []
        failures: list[Exception] = []

        async def store(message: Outgoing, window: Window, number: int) -> None:
            try:
                sequences[number] = await self._store(message)
            except BusError as error:
                failures.append(error)
            finally:
                window.leave(message.size)

        async with flat_task_group() as group:
            try:
                async for message in messages:
                    window = self._windows[message.stream]
                    await window.enter(message.size)
                    sequences.append(0)
                    group.start_soon(store, message, window, len(sequences) - 1)
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return sequences

    async def _store(self, message: Outgoing) -> int:
        """Write a message until it is stored and return its sequence."""
        patience, awaited = _Patience(), f"PubAck of {message.subject}"
        head = headers_block({"Nats-Msg-Id": message.message_id, **message.headers})
        while True:
            await self.connection.wait_connected(awaited)
            self._check_size(message)
            self.counts["retries"] += patience.tries > 0
            patience.tries += 1
            try:
                answer = await self.connection.ask(
                    message.subject, message.payload, head, seconds=self.limits.ack_seconds
                )
            except TimeoutError:
                self._bear_silence(message, patience)
                continue
            if answer is None:  # the connection changed
                patience.unanswered, patience.absent_since = 0, math.inf
                continue
            found = self._read(message, answer)
            if found.error is None:
                self.counts["stored"] += 1
                self.counts["duplicates"] += found.duplicate
                return found.seq
            patience.unanswered = 0
            await anyio.sleep(await self._bear_refusal(message, found.error, patience))

    def _check_size(self, message: Outgoing) -> None:
        most = self.connection.client.max_payload
        if message.size > most:
            raise BusError(
                f"a message of {message.size} bytes for {message.subject} exceeds the {most} bytes that the "
                "server takes",
                remedy="Lower agent.play_tokens, which bounds a play, or raise bus.max_payload_mb "
                "(max_payload in the configuration of an external broker).",
            )

    def _read(self, message: Outgoing, answer: Arrival) -> PubAck:
        """Return what the server says. Raises BusError when it is no answer to this message."""
        if status_of(answer) == "503":
            return PubAck(error=Refusal(description=f"no stream takes {message.subject}"))
        try:
            found = _answers.decode(answer.data)
        except msgspec.DecodeError as error:
            raise BusError(f"the server's answer to {message.subject} makes no sense: {error}") from error
        if found.error is None and found.stream != message.stream:
            raise BusError(f"{message.subject} went to stream {found.stream}, not {message.stream}")
        return found

    def _bear_silence(self, message: Outgoing, patience: _Patience) -> None:
        """Count a try without an answer. Raises BusError after too many."""
        patience.unanswered += 1
        if patience.unanswered >= self.limits.unanswered:
            waited = self.limits.unanswered * self.limits.ack_seconds
            raise BusError(
                f"the server does not store {message.subject}: {waited:g} s without an answer",
                remedy=f"A full disk does this, and a run that was not provisioned. {_DISK_REMEDY}",
            )

    async def _is_missing(self, stream: str) -> bool:
        try:
            await self.connection.api(f"STREAM.INFO.{stream}", seconds=_DIAGNOSIS_SECONDS)
        except BusError as error:
            return isinstance(error, NotFound)
        return False

    async def _bear_refusal(self, message: Outgoing, refusal: Refusal, patience: _Patience) -> float:
        """Return how many seconds to wait before the next try. Raises BusError when there is none."""
        now, code, text = monotonic(), refusal.err_code, refusal.description
        if code == _STORE_FAILED and "maximum" in text:
            self.counts["full"] += 1
            stream, limit = message.stream, self.limits.full_seconds
            remedy = STREAMS[stream.split("_", 1)[0]].hint or "Raise bus.store_gb."
            if now - self._warned.get(stream, -math.inf) >= _WARN_SECONDS:
                self._warned[stream] = now
                log.warning("stream %s is full (%s): publishers wait. %s", stream, text, remedy)
            patience.full_since = min(patience.full_since, now)
            if now - patience.full_since > limit:
                raise BusUnavailable(f"room in stream {stream}", limit, remedy=remedy)
            return random.uniform(0.005, min(0.5, 0.02 * 2 ** min(patience.tries, 5)))
        if code == _CONFLICT:
            raise Conflict(f"{message.subject}: {text}")
        if code in _STORE_FULL:
            raise BusError(f"the server's store is full: {text}", remedy=_DISK_REMEDY)
        if code == _STORE_FAILED:
            text = f"the server cannot store {message.subject}: {text}"
        elif code not in _UNREADY:
            raise BusError(f"the server refused {message.subject}: {text} (code {code})")
        # A server that starts, ends or elects a leader has no stream for a while.
        patience.absent_since = min(patience.absent_since, now)
        absent, limit = now - patience.absent_since, self.limits.absent_seconds
        if absent > 6 * limit or (absent > limit and await self._is_missing(message.stream)):
            raise BusError(text, remedy=_ABSENT_REMEDY)
        return random.uniform(0.02, 0.25)
