"""Continuous pull from one consumer: one request after the other, and a heartbeat watchdog.

The bus counts what the server still owes on the open request. After a reconnect or a silence that is
forgotten and a fresh inbox is used, so that no late message of an old request is taken for one of a new one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

import anyio
import msgspec
from nats.aio.subscription import Subscription

from bus.connection import Connection, status_of
from bus.errors import BusError, Denied
from bus.nats_client import Arrival
from bus.subjects import SECOND

log = logging.getLogger("spade.bus")
# The broker serves open requests of a vanished host until they expire, and those messages wait until their
# lease ends. So a request is short beside a lease.
_EXPIRES_SECONDS = 5.0
_HEARTBEAT_SECONDS = 2.0
_PAUSE_SECONDS = 0.1
_OVERHEAD_BYTES = 64 << 10
_TOO_MANY = 16  # a request is withdrawn when it may bring so many more than are wanted
_MOST = 512


class Delivered(NamedTuple):
    """The delivery data in the reply subject of a message."""

    attempt: int
    stream_sequence: int
    consumer_sequence: int


def parse_reply(reply: str) -> Delivered:
    """Read an acknowledgement subject in either form of the server.

    First form, 9 tokens: ``$JS.ACK.<stream>.<consumer>.<attempt>.<stream sequence>.<consumer
    sequence>.<time>`` and ``<pending>``. Second form, 11 tokens or more: ``<domain>.<account>`` before the
    stream, more at the end. Raises BusError for anything else.
    """
    tokens = reply.split(".")
    first = 4 if len(tokens) == 9 else 6
    try:
        if not reply.startswith("$JS.ACK.") or (len(tokens) != 9 and len(tokens) < 11):
            raise ValueError
        return Delivered(*map(int, tokens[first : first + 3]))
    except ValueError:
        raise BusError(
            f"the server delivered a message whose acknowledgement subject cannot be read: {reply!r}",
            remedy="Use a nats-server of version 2.14 or 2.15.",
        ) from None


class Pull:
    """Keeps the server owing what ``wanted()`` asks for, and hands messages to ``on_message``.

    ``max_bytes`` bounds what one request may bring (0: no bound). ``on_broken`` is called before new
    requests are made because what was owed is forgotten; with True when the consumer does not exist (any
    more) or the stream cannot be reached.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        stream: str,
        consumer: str,
        wanted: Callable[[], int],
        on_message: Callable[[Arrival, Delivered], None],
        on_broken: Callable[[bool], None],
        max_bytes: int = 0,
    ) -> None:
        self._connection = connection
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._wanted, self._max_bytes = wanted, max_bytes
        self._on_message, self._on_broken = on_message, on_broken
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._stale = True
        self._heard = self._not_before = 0.0
        self._wake = anyio.Event()
        self._failure: BusError | None = None
        self.owed = self.requests = 0

    def wake(self) -> None:
        """Make a request if something is wanted and none is open."""
        if not self.owed and self._wanted() > 0:
            self._wake.set()

    def withdraw(self) -> None:
        """Receive at a fresh inbox: messages of open requests then go to other clients."""
        self._stale = True
        self._wake.set()

    async def run(self) -> None:
        """Request without end; on cancellation the inbox is given up.

        Raises Denied, or BusError for a message with unreadable delivery data.
        """
        unwatch = self._connection.watch(self._on_change)
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
            await self._leave()

    def _on_change(self, denied: Denied | None) -> None:
        if denied is None:
            self.withdraw()
        elif denied.concerns(self._subject) or denied.concerns(self._inbox):
            self._fail(Denied(denied.action, self._subject))

    def _fail(self, error: BusError) -> None:
        self._failure = error
        self._wake.set()

    def _turn(self) -> float:
        """Make a request if one is due; return how long to sleep unless woken."""
        now = monotonic()
        silent = self.owed > 0 and now - self._heard > 2.5 * _HEARTBEAT_SECONDS
        if silent:
            log.warning("no heartbeat from %s; pulling again", self._subject)
        if silent or self.owed - max(0, self._wanted()) > _TOO_MANY:
            self._stale = True
            return 0.0
        if now < self._not_before:
            return self._not_before - now
        if not self.owed and (wanted := self._wanted()) > 0:
            self._request(min(wanted, _MOST))
        return _HEARTBEAT_SECONDS

    def _request(self, batch: int) -> None:
        # A message that is larger than the bound would stay at the head without end.
        largest = self._connection.client.max_payload + _OVERHEAD_BYTES
        body = {
            "batch": batch,
            "expires": int(_EXPIRES_SECONDS * SECOND),
            "idle_heartbeat": int(_HEARTBEAT_SECONDS * SECOND),
            "max_bytes": max(self._max_bytes, largest) if self._max_bytes else 0,
        }
        self._heard, self.owed = monotonic(), batch
        self.requests += 1
        reply = f"{self._inbox}.{self.requests}"
        self._stale = not self._connection.write(self._subject, msgspec.json.encode(body), reply)

    async def _renew(self) -> None:
        """Forget owed messages and receive at a fresh inbox from now on."""
        if self._inbox:
            self._on_broken(False)
        await self._leave()
        inbox = self._inbox = f"{self._connection.inbox}.pull.{secrets.token_hex(6)}"
        self.owed, self._stale = 0, False
        self._subscription = await self._connection.subscribe(
            f"{inbox}.*", lambda message: self._receive(message, current=inbox == self._inbox)
        )

    async def _leave(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await self._connection.retire(subscription)

    def _receive(self, message: Arrival, *, current: bool) -> None:
        if current:
            self._heard = monotonic()
        # A stored message can look like a control message, but only a delivered one can be answered.
        if message.reply.startswith("$JS."):
            try:
                delivered = parse_reply(message.reply)
            except BusError as error:
                self._fail(error)
                return
            self.owed -= current and self.owed > 0
            self._on_message(message, delivered)
            return
        status = status_of(message)
        if not status:
            log.error("ignoring a message that no stream delivered, on %s", message.subject)
        elif status != "100" and current:
            self._on_status(status, message.headers["Description"])
            self._wake.set()

    def _on_status(self, status: str, text: str) -> None:
        """Handle the early end of the request."""
        self.owed = 0
        if status == "503" or "Consumer Deleted" in text or "Consumer is push based" in text:
            self._on_broken(True)
        # "Batch Completed" comes at the end of every served request that had a bound in bytes.
        if status not in ("404", "408") and "Batch Completed" not in text:
            self._not_before = monotonic() + _PAUSE_SECONDS
