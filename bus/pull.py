"""Continuous pull from one consumer: overlapping requests, a heartbeat watchdog, no task per message.

What the server still owes on open requests is counted, not attributed: it serves them in turn. After a
reconnect or a silence everything owed is forgotten and a fresh inbox is used, so that no late message of
an old request can be taken for a new one's (reference nats section 4, rows 1, 3, 5, 20).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import anyio
import msgspec
import nats.errors
from nats.aio.subscription import Subscription

from bus import codec
from bus.codec import Envelope
from bus.connection import Connection, description_of, status_of
from bus.errors import BusError, Denied, Undecodable
from bus.lane import Arrival
from bus.messages import Message
from bus.subjects import SECOND

log = logging.getLogger("spade.bus")
_ORIGIN = "Nats-Stream"
_ORIGIN_BYTES = _ORIGIN.encode()
_PAUSE_SECONDS = 0.1
_OVERHEAD_BYTES = 64 << 10
_TOO_MANY = 16  # so much more may be owed than is wanted before the requests are given up


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """What the reply subject of a delivered message says. ``pending`` more wait behind it."""

    attempt: int
    stream_sequence: int
    consumer_sequence: int
    pending: int


def parse_reply(reply: str) -> Delivered | None:
    """Read ``$JS.ACK...`` in its short form and the one with domain and account; None when it is neither."""
    if not reply.startswith("$JS.ACK."):
        return None
    tokens = reply.split(".")
    if len(tokens) == 9:
        _, _, _, _, attempt, stream, consumer, _, pending = tokens
    elif len(tokens) == 12:
        _, _, _, _, _, _, attempt, stream, consumer, _, pending, _ = tokens
    else:
        return None
    try:
        return Delivered(int(attempt), int(stream), int(consumer), int(pending))
    except ValueError:
        return None


def read(message: Arrival) -> tuple[Envelope, Message]:
    """Decode a message that a stream delivered. Raises Undecodable, also for one that was copied there.

    The server sends an answer to whatever subject its asker names, and a stream stores it, though the
    asker may not write into that stream. What was read elsewhere still names where.
    """
    if _ORIGIN_BYTES in message.head and _ORIGIN in (message.headers or {}):
        raise Undecodable(f"copied from stream {(message.headers or {})[_ORIGIN]}, not published")
    return codec.decode(message.data)


@dataclass(frozen=True)
class PullSettings:
    """A request stays open for ``expires`` seconds and proves itself alive every ``heartbeat`` seconds.
    Fewer than ``least`` wanted messages wait ``linger`` seconds for company. ``max_bytes`` bounds what
    one request may bring (0: no bound). ``shrinks``: less may be wanted than before.

    The broker goes on serving open requests of a host that vanished without a word: what it serves in vain
    has to wait for its lease to end. So ``expires`` is short beside a lease.
    """

    expires: float = 5.0
    heartbeat: float = 2.0
    linger: float = 0.02
    least: int = 1
    most: int = 512
    max_bytes: int = 0
    shrinks: bool = False


class Pull:
    """Keeps the server owing what ``wanted()`` asks for, and hands messages to ``on_message``.

    ``on_gone`` is called when the consumer does not exist (any more) or the stream cannot be reached;
    ``on_reset`` when what was owed is forgotten, before new requests are made.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        stream: str,
        consumer: str,
        settings: PullSettings,
        wanted: Callable[[], int],
        on_message: Callable[[Arrival, Delivered], None],
        on_gone: Callable[[str], None],
        on_reset: Callable[[], None] | None = None,
    ) -> None:
        self._connection = connection
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._settings = settings
        self._wanted, self._on_message = wanted, on_message
        self._on_gone, self._on_reset = on_gone, on_reset
        self._owed = 0
        self._epoch = 0
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._stale = True
        self._heard = 0.0
        self._not_before = self._linger_until = 0.0
        self._fruitful = False
        self._wake = anyio.Event()
        self._denied: Denied | None = None
        self.requests = 0
        self.resets = 0

    @property
    def owed(self) -> int:
        """How many messages open requests may still bring."""
        return self._owed

    def wake(self) -> None:
        """Look again at what is wanted, unless that is nothing or so little that it waits for company."""
        missing = self._wanted() - self._owed
        if missing >= self._settings.least or (missing > 0 and not self._linger_until):
            self._wake.set()

    def give_up(self) -> None:
        """Receive at a fresh inbox: what open requests would still bring goes to others."""
        self._stale = True
        self._wake.set()

    async def run(self) -> None:
        """Request for ever; on cancellation the inbox is given up. Raises Denied."""
        unwatch = self._connection.watch(self._on_state)
        unwatch_denied = self._connection.watch_denied(self._on_denied)
        try:
            while True:
                if self._denied is not None:
                    raise self._denied
                self._wake = anyio.Event()
                await self._connection.wait_connected("connection to pull through")
                if self._stale:
                    await self._renew()
                pause = await self._turn()
                with anyio.move_on_after(pause):
                    await self._wake.wait()
        finally:
            unwatch()
            unwatch_denied()
            with anyio.CancelScope(shield=True):
                await self._leave()

    async def _turn(self) -> float:
        """Make a request if one is due; return how long to sleep unless woken."""
        settings, now = self._settings, monotonic()
        if self._owed > 0 and now - self._heard > 2.5 * settings.heartbeat:
            log.warning("no heartbeat from %s; pulling anew", self._subject)
            self._stale = True
            return 0.0
        if settings.shrinks and self._owed - max(0, self._wanted()) > _TOO_MANY:
            self._stale = True  # a request cannot be taken back, but nobody need be there to be served
            return 0.0
        if now < self._not_before:
            return self._not_before - now
        missing = min(self._wanted() - self._owed, settings.most)
        if missing <= 0:
            self._linger_until = 0.0
            return settings.heartbeat
        if missing < settings.least:
            self._linger_until = self._linger_until or now + settings.linger
            if now < self._linger_until:
                return self._linger_until - now
        self._linger_until = 0.0
        await self._request(missing)
        return settings.heartbeat

    async def _request(self, batch: int) -> None:
        settings = self._settings
        if not self._connection.connected:
            return
        body = {
            "batch": batch,
            "expires": int(settings.expires * SECOND),
            "idle_heartbeat": int(settings.heartbeat * SECOND),
        }
        if settings.max_bytes:
            # One that is larger than the bound would stay at the head for ever.
            largest = self._connection.client.max_payload + _OVERHEAD_BYTES
            body["max_bytes"] = max(settings.max_bytes, largest)
        if self._owed == 0:
            self._heard = monotonic()
        self._owed += batch
        self.requests += 1
        try:
            await self._connection.send(
                self._subject, msgspec.json.encode(body), reply=f"{self._inbox}.{self.requests}"
            )
        except (nats.errors.OutboundBufferLimitError, nats.errors.ConnectionClosedError, OSError):
            self._stale = True

    async def _renew(self) -> None:
        """Forget what is owed and receive at a fresh inbox from now on."""
        await self._leave()
        self._epoch += 1
        self.resets += self._epoch > 1
        self._inbox = f"{self._connection.inbox}.pull.{id(self):x}.{self._epoch}"
        self._owed, self._stale = 0, False
        if self._on_reset is not None and self._epoch > 1:
            self._on_reset()
        epoch = self._epoch
        self._subscription = await self._connection.subscribe(
            f"{self._inbox}.*", lambda message: self._receive(message, epoch)
        )

    async def _leave(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await self._connection.retire(subscription)

    def _on_denied(self, error: Denied) -> None:
        if error.concerns(self._subject) or error.concerns(self._inbox):
            self._denied = Denied(error.action, self._subject)
            self._wake.set()

    def _on_state(self) -> None:
        self._stale = True
        self._wake.set()

    def _receive(self, message: Arrival, epoch: int) -> None:
        current = epoch == self._epoch
        if current:
            self._heard = monotonic()
        # A stored message may look like a control message, but only a delivered one can be answered.
        delivered = parse_reply(message.reply) if message.reply else None
        if delivered is not None:
            if current:
                self._owed -= self._owed > 0
                self._fruitful = True
            self._on_message(message, delivered)
            return
        status = status_of(message)
        if not status:
            log.error("a message without delivery data on %s", message.subject)
        elif status != "100" and current:
            self._on_status(status, message)
            self._wake.set()

    def _on_status(self, status: str, message: Arrival) -> None:
        """A request ended early: the rest is not owed any more."""
        text = description_of(message)
        if status == "503" or "Consumer Deleted" in text or "Consumer is push based" in text:
            self._owed = 0
            self._not_before = monotonic() + _PAUSE_SECONDS
            self._on_gone(text.strip() or "nobody answers")
            return
        rest = (message.headers or {}).get("Nats-Pending-Messages")
        if rest is None:
            self._stale = True
        else:
            self._owed = max(0, self._owed - int(rest))
        # "Batch Completed" comes at the end of every served request that had a bound in bytes.
        ended = status in ("404", "408") or "Batch Completed" in text
        ended = ended or ("MaxBytes" in text and self._fruitful)
        self._fruitful = False
        if not ended:
            self._not_before = monotonic() + _PAUSE_SECONDS


def gone(stream: str, consumer: str, why: str) -> BusError:
    """Return the error of a durable that does not exist."""
    return BusError(
        f"consumer {consumer} of stream {stream} is gone ({why})", remedy="Has the run been provisioned?"
    )
