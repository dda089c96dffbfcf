"""One NATS connection: reconnects for ever, notices a dead read loop, asks the server's API.

nats-py carries the bytes. What it offers above that is not used where it loses messages or hangs
(reference nats section 4): its ``flush``, ``drain``, ``fetch``, ``publish_async`` and watchers.
"""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import anyio
import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import Header

from bus.errors import BusError, BusUnavailable, NotFound
from bus.scopes import flat_task_group

log = logging.getLogger("spade.bus")
STATUS, DESCRIPTION = Header.STATUS.value, Header.DESCRIPTION
_NOT_FOUND = frozenset({10014, 10037, 10059})
_WATCHDOG_SECONDS = 1.0
_CLOSE_SECONDS = 3.0
_OLDEST_SERVER = (2, 14)


class ApiError(BusError):
    """The server refused a request of its JetStream API; ``code`` is its error code."""

    def __init__(self, subject: str, code: int, description: str) -> None:
        self.code, self.description = code, description
        super().__init__(f"the server refused {subject}: {description} (code {code})")


def status_of(message: Msg) -> str:
    """Return the status of a control message (``"100"``, ``"404"`` ...), empty for a real one."""
    return str((message.headers or {}).get(STATUS, "")) if not message.data else ""


def description_of(message: Msg) -> str:
    """Return the text beside the status of a control message."""
    return str((message.headers or {}).get(DESCRIPTION, ""))


class Connection:
    """A connection that outlives its server. Made by :func:`open_connection`."""

    def __init__(self, url: str, token: str, *, patience: float) -> None:
        self.url, self.patience = url, patience
        self.inbox = f"_INBOX.{secrets.token_hex(8)}"
        self._token = token
        self.client = Client()
        self.closed = False
        self.away_since: float | None = None
        self._state = anyio.Event()
        self._watchers: set[Callable[[], None]] = set()
        self._last_error = ""
        self._counts = {"reconnects": 0.0, "disconnects": 0.0, "revived": 0.0, "slow": 0.0}

    @property
    def connected(self) -> bool:
        """Whether bytes written now have a server to go to."""
        return bool(self.client.is_connected) and not self.closed

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` at every connect, disconnect and close. Returns a function that ends it."""
        self._watchers.add(callback)
        return lambda: self._watchers.discard(callback)

    async def wait_connected(self, awaited: str, seconds: float | None = None) -> None:
        """Return when connected. Raises BusUnavailable after ``seconds`` (default: the patience)."""
        deadline = self.patience if seconds is None else seconds
        with anyio.move_on_after(deadline):
            while not self.connected:
                self.check_open(awaited)
                await self._state.wait()
            return
        raise BusUnavailable(awaited, deadline, remedy=self._hint())

    def check_open(self, awaited: str) -> None:
        """Raise BusUnavailable when the connection is closed for good."""
        if self.closed:
            raise BusUnavailable(awaited, 0, remedy=f"The connection to {self.url} is closed.")

    def send(
        self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> Any:
        """Return nats-py's coroutine that writes one message; await it at once."""
        return self.client.publish(subject, payload, reply=reply, headers=headers)

    async def subscribe(self, subject: str, handler: Callable[[Msg], None]) -> Subscription:
        """Subscribe; ``handler`` must neither wait nor raise. Bounds are the caller's."""

        async def call(message: Msg) -> None:
            handler(message)

        return await self.client.subscribe(subject, cb=call, pending_msgs_limit=0, pending_bytes_limit=0)

    async def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription; a connection that is gone has ended it already."""
        with contextlib.suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        awaited: str,
        seconds: float,
        headers: dict[str, str] | None = None,
    ) -> Msg:
        """Ask until there is an answer, at most ``seconds``. Only for idempotent requests.

        Raises BusUnavailable that names ``awaited``.
        """
        pause = 0.02
        with anyio.move_on_after(seconds) as scope:
            while True:
                await self.wait_connected(awaited)
                left = scope.deadline - anyio.current_time()
                try:
                    answer = await self._ask(subject, payload, headers, max(0.05, min(left, 3.0)))
                    if answer is not None:
                        return answer
                except nats.errors.NoRespondersError:
                    self._last_error = f"nobody answers {subject}"
                except (nats.errors.Error, TimeoutError, OSError) as error:
                    self.check_open(awaited)
                    self._last_error = repr(error)
                await anyio.sleep(pause)
                pause = min(2 * pause, 1.0)
        raise BusUnavailable(awaited, seconds, remedy=self._hint())

    async def _ask(
        self, subject: str, payload: bytes, headers: dict[str, str] | None, seconds: float
    ) -> Msg | None:
        """Ask once; None when the connection changed meanwhile, for then no answer comes."""
        answer: Msg | None = None
        async with flat_task_group() as group:
            group.start_soon(self._cancel_when, self._state, group.cancel_scope)
            answer = await self.client.request(subject, payload, timeout=seconds, headers=headers)
            group.cancel_scope.cancel()
        return answer

    async def api(
        self, verb: str, body: dict[str, Any] | None = None, *, seconds: float = 20.0
    ) -> dict[str, Any]:
        """Call ``$JS.API.<verb>``. Raises NotFound, ApiError or BusUnavailable."""
        subject = f"$JS.API.{verb}"
        payload = msgspec.json.encode(body) if body is not None else b""
        answer = await self.request(subject, payload, awaited=f"answer to {verb}", seconds=seconds)
        content: dict[str, Any] = msgspec.json.decode(answer.data)
        if error := content.get("error"):
            code, text = int(error.get("err_code", 0)), str(error.get("description", ""))
            if code in _NOT_FOUND:
                raise NotFound(f"{verb}: {text}", remedy="Has the run been provisioned?")
            raise ApiError(subject, code, text)
        return content

    def statistics(self) -> dict[str, float]:
        """Return counters of the connection and the bytes that wait to be written."""
        stats = self.client.stats
        return {
            "connection_up": float(self.connected),
            "connection_pending_bytes": float(self.client.pending_data_size),
            **{
                f"connection_{name}": float(stats[name])
                for name in ("in_msgs", "out_msgs", "in_bytes", "out_bytes")
            },
            **{f"connection_{name}": value for name, value in self._counts.items()},
        }

    # What nats-py calls.

    def _changed(self) -> None:
        self._state.set()
        self._state = anyio.Event()
        for callback in list(self._watchers):
            callback()

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self._counts["slow"] += 1
        text = str(error) or repr(error)
        if text != self._last_error:
            log.debug("bus connection: %s", text)
        self._last_error = text

    async def _on_disconnected(self) -> None:
        self._counts["disconnects"] += 1
        self.away_since = monotonic()
        self._changed()

    async def _on_reconnected(self) -> None:
        self._counts["reconnects"] += 1
        self.away_since = None
        log.info("bus reconnected to %s", self.url)
        self._changed()

    async def _on_closed(self) -> None:
        self.closed = True
        self._changed()

    def _hint(self) -> str:
        reason = f" ({self._last_error})" if self._last_error else ""
        return f"Is the server at {self.url} running{reason}?"

    # Life.

    async def start(self, name: str, seconds: float) -> None:
        """Connect for the first time. Raises BusUnavailable, or BusError for a wrong token or server."""
        refused = anyio.Event()

        async def on_error(error: Exception) -> None:
            await self._on_error(error)
            if re.search("authori[sz]ation", self._last_error, re.IGNORECASE):
                refused.set()

        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as group:
                group.start_soon(self._cancel_when, refused, group.cancel_scope)
                await self._connect(name, on_error)
                group.cancel_scope.cancel()
        if refused.is_set():
            raise BusError(
                f"the server at {self.url} refused the token",
                remedy="Pass the run's token (SPADE_BUS_TOKEN); is another server on this port?",
            )
        if not self.connected:
            raise BusUnavailable(f"connection to {self.url}", seconds, remedy=self._hint())
        version = self.client.connected_server_version
        if (version.major, version.minor) < _OLDEST_SERVER:
            raise BusError(f"nats-server {version} is too old", remedy="Use 2.14 or newer.")
        self._changed()

    @staticmethod
    async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
        await event.wait()
        scope.cancel()

    async def _connect(self, name: str, on_error: Callable[[Exception], Any]) -> None:
        await self.client.connect(
            self.url,
            token=self._token or None,
            name=name,
            inbox_prefix=self.inbox,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
            connect_timeout=5,
            ping_interval=10,
            max_outstanding_pings=2,
            pending_size=32 << 20,
            flush_timeout=10,
            error_cb=on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
        )

    async def watchdog(self) -> None:
        """Revive what nats-py lets die in silence: its read loop and its reconnect task."""
        while not self.closed:
            await anyio.sleep(_WATCHDOG_SECONDS)
            await self._revive()

    async def _revive(self) -> None:
        client = self.client
        reading, reconnecting = client._reading_task, client._reconnection_task
        if client.is_connected and reading is not None and reading.done():
            log.warning("the read loop of the bus connection ended; reconnecting")
        elif client.is_reconnecting and reconnecting is not None and reconnecting.done():
            log.warning("the reconnect task of the bus connection ended; starting it again")
            client._status = Client.CONNECTED
        else:
            return
        self._counts["revived"] += 1
        await client.force_reconnect()

    async def close(self) -> None:
        """Send what is buffered and close; what the socket answers to that is of no interest."""
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
            try:
                await self.client.close()
            except (nats.errors.Error, OSError, TimeoutError, AttributeError) as error:
                log.debug("closing the bus connection: %r", error)
            # nats-py leaves the socket open when it was refused as it connected.
            transport = self.client._transport
            if transport is not None:
                transport.close()
        self.closed = True
        self._changed()


@asynccontextmanager
async def open_connection(
    url: str, *, name: str, token: str = "", patience: float = 900.0, connect_seconds: float = 10.0
) -> AsyncIterator[Connection]:
    """Connect, keep the connection alive, close it.

    ``patience`` is how many seconds a call waits for a server that is away. Raises BusUnavailable when
    there is none within ``connect_seconds``, BusError when it refuses us.
    """
    connection = Connection(url, token, patience=patience)
    try:
        await connection.start(name, connect_seconds)
        async with flat_task_group() as group:
            group.start_soon(connection.watchdog)
            yield connection
            group.cancel_scope.cancel()
    finally:
        await connection.close()
