"""Continuous pull from one consumer: overlapping requests and a heartbeat watchdog.

The bus counts what the server still owes on open requests; it does not attribute messages to requests,
because the server serves them in turn. After a reconnect or a silence everything owed is forgotten and a
fresh inbox is used, so that no late message of an old request is taken for a message of a new one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

import anyio
import msgspec
from nats.aio.subscription import Subscription

from bus import codec
from bus.codec import Envelope
from bus.connection import Connection, description_of, status_of
from bus.errors import BusError, Denied, Undecodable
from bus.messages import Message
from bus.nats_client import Arrival
from bus.subjects import SECOND

log = logging.getLogger("spade.bus")
_ORIGIN = "Nats-Stream"
_PAUSE_SECONDS = 0.1
_OVERHEAD_BYTES = 64 << 10
_TOO_MANY = 16  # requests are withdrawn when they may bring so many more than are wanted
_MOST = 512


class Delivered(msgspec.Struct, frozen=True, gc=False):
    """The delivery data in the reply subject of a message. ``pending`` more wait behind it."""

    attempt: int
    stream_sequence: int
    consumer_sequence: int
    pending: int


def parse_reply(reply: str) -> Delivered:
    """Read an acknowledgement subject in either form of the server.

    First form, 9 tokens: ``$JS.ACK.<stream>.<consumer>.<attempt>.<stream sequence>.<consumer
    sequence>.<time>`` and ``<pending>``. Second form, 11 tokens or more: ``<domain>.<account>`` before the
    stream, more at the end. Raises BusError for anything else.
    """
    tokens = reply.split(".")
    if len(tokens) == 9:
        first = 4
    elif len(tokens) >= 11:
        first = 6
    else:
        first = 0
    try:
        if not reply.startswith("$JS.ACK.") or not first:
            raise ValueError
        attempt, stream, consumer, _, pending = map(int, tokens[first : first + 5])
    except ValueError:
        raise BusError(
            f"the server delivered a message whose acknowledgement subject cannot be read: {reply!r}",
            remedy="Use a nats-server of version 2.14 or 2.15.",
        ) from None
    return Delivered(attempt, stream, consumer, pending)


def read(message: Arrival) -> tuple[Envelope, Message]:
    """Decode a message that a stream delivered. Raises Undecodable, also for one that was copied there.

    The server sends an answer to any subject that the asker names, and a stream stores it, though the
    asker may not write into that stream. An answer still names the stream it was read from.
    """
    if message.head and _ORIGIN.encode() in message.head and _ORIGIN in (message.headers or {}):
        raise Undecodable(f"copied from stream {(message.headers or {})[_ORIGIN]}, not published")
    return codec.decode(message.data)


@dataclass(frozen=True)
class PullSettings:
    """A request stays open for ``expires`` seconds and sends a heartbeat every ``heartbeat`` seconds.

    While some are owed, fewer than ``least`` wanted messages make no request. ``max_bytes`` bounds what one
    request may bring (0: no bound).

    The broker serves open requests of a vanished host until they expire, and those messages wait until their
    lease ends. So ``expires`` is short beside a lease.
    """

    expires: float = 5.0
    heartbeat: float = 2.0
    least: int = 1
    max_bytes: int = 0


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
        on_reset: Callable[[], None] = lambda: None,
    ) -> None:
        self._connection = connection
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._settings = settings
        self._wanted, self._on_message = wanted, on_message
        self._on_gone, self._on_reset = on_gone, on_reset
        self._epoch = 0
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._stale = True
        self._heard = self._not_before = 0.0
        self._fruitful = False
        self._wake = anyio.Event()
        self._failure: BusError | None = None
        self.owed = self.requests = self.resets = 0

    def wake(self) -> None:
        """Make a request if enough is wanted."""
        missing = self._wanted() - self.owed
        if missing >= self._settings.least or (missing > 0 and not self.owed):
            self._wake.set()

    def withdraw(self) -> None:
        """Receive at a fresh inbox: messages of open requests then go to other clients."""
        self._stale = True
        self._wake.set()

    async def run(self) -> None:
        """Request without end; on cancellation the inbox is given up.

        Raises Denied, or BusError for a message with unreadable delivery data.
        """
        unwatch = self._connection.watch(self.withdraw)
        unwatch_denied = self._connection.watch_denied(self._on_denied)
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                self._wake = anyio.Event()
                await self._connection.wait_connected("connection to pull through")
                if self._stale:
                    await self._renew()
                with anyio.move_on_after(self._turn()):
                    await self._wake.wait()
        finally:
            unwatch()
            unwatch_denied()
            with anyio.CancelScope(shield=True):
                await self._leave()

    def _turn(self) -> float:
        """Make a request if one is due; return how long to sleep unless woken."""
        settings, now = self._settings, monotonic()
        if self.owed > 0 and now - self._heard > 2.5 * settings.heartbeat:
            log.warning("no heartbeat from %s; pulling again", self._subject)
            self._stale = True
            return 0.0
        wanted = self._wanted()
        if self.owed - max(0, wanted) > _TOO_MANY:
            self._stale = True
            return 0.0
        if now < self._not_before:
            return self._not_before - now
        missing = min(wanted - self.owed, _MOST)
        if missing >= settings.least or (missing > 0 and not self.owed):
            self._request(missing)
        return settings.heartbeat

    def _request(self, batch: int) -> None:
        settings = self._settings
        body = {
            "batch": batch,
            "expires": int(settings.expires * SECOND),
            "idle_heartbeat": int(settings.heartbeat * SECOND),
        }
        if settings.max_bytes:
            # One that is larger than the bound would stay at the head without end.
            largest = self._connection.client.max_payload + _OVERHEAD_BYTES
            body["max_bytes"] = max(settings.max_bytes, largest)
        if self.owed == 0:
            self._heard = monotonic()
        self.owed += batch
        self.requests += 1
        if not self._connection.write(
            self._subject, msgspec.json.encode(body), f"{self._inbox}.{self.requests}"
        ):
            self._stale = True

    async def _renew(self) -> None:
        """Forget owed messages and receive at a fresh inbox from now on."""
        await self._leave()
        self._epoch += 1
        self._inbox = f"{self._connection.inbox}.pull.{id(self):x}.{self._epoch}"
        self.owed, self._stale = 0, False
        if self._epoch > 1:
            self.resets += 1
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
            self._fail(Denied(error.action, self._subject))

    def _fail(self, error: BusError) -> None:
        self._failure = error
        self._wake.set()

    def _receive(self, message: Arrival, epoch: int) -> None:
        current = epoch == self._epoch
        if current:
            self._heard = monotonic()
        # A stored message can look like a control message, but only a delivered one can be answered.
        if message.reply.startswith("$JS."):
            try:
                delivered = parse_reply(message.reply)
            except BusError as error:
                self._fail(error)
                return
            if current:
                self.owed -= self.owed > 0
                self._fruitful = True
            self._on_message(message, delivered)
            return
        status = status_of(message)
        if not status:
            log.error("ignoring a message that no stream delivered, on %s", message.subject)
        elif status != "100" and current:
            self._on_status(status, message)
            self._wake.set()

    def _on_status(self, status: str, message: Arrival) -> None:
        """Handle the early end of a request: the rest is not owed any more."""
        text = description_of(message)
        if status == "503" or "Consumer Deleted" in text or "Consumer is push based" in text:
            self.owed = 0
            self._not_before = monotonic() + _PAUSE_SECONDS
            self._on_gone(text.strip() or "no answer")
            return
        rest = (message.headers or {}).get("Nats-Pending-Messages")
        if rest is None:
            self._stale = True
        else:
            self.owed = max(0, self.owed - int(rest))
        # "Batch Completed" comes at the end of every served request that had a bound in bytes.
        ended = status in ("404", "408") or "Batch Completed" in text
        ended = ended or ("MaxBytes" in text and self._fruitful)
        self._fruitful = False
        if not ended:
            self._not_before = monotonic() + _PAUSE_SECONDS
