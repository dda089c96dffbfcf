"""One NATS connection: reconnects for ever, notices a dead read loop, asks the server's API.

nats-py carries the bytes. What it offers above that is not used where it loses messages or hangs
(reference nats section 4): its ``flush``, ``drain``, ``fetch``, ``publish_async`` and watchers.
"""

from __future__ import annotations

import logging
import re
import secrets
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import anyio
import msgspec
import nats.errors
from anyio.lowlevel import checkpoint
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import Header

from bus.credentials import read_seed, trust
from bus.errors import BusError, BusUnavailable, Denied, NotFound
from bus.messages.base import token as subject_token
from bus.scopes import flat_task_group
from bus.wire import Wire

log = logging.getLogger("spade.bus")
STATUS, DESCRIPTION = Header.STATUS.value, Header.DESCRIPTION
_STORED = "Nats-Sequence"
_NOT_FOUND = frozenset({10014, 10037, 10059})
_WATCHDOG_SECONDS = 1.0
_LAG_SECONDS = 5.0
_ELECTION_SECONDS = 0.25
_CLOSE_SECONDS = 3.0
_LAST_TURNS = 3
_OLDEST_SERVER = (2, 14)
_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)
# What a cluster answers while it elects a leader or has too few members: it passes.
_ELECTING = frozenset({10004, 10005, 10008, 10009})


class ApiError(BusError):
    """The server refused a request of its JetStream API; ``code`` is its error code."""

    def __init__(self, subject: str, code: int, description: str) -> None:
        self.code, self.description = code, description
        super().__init__(f"the server refused {subject}: {description} (code {code})")


def status_of(message: Msg) -> str:
    """Return the status of a control message (``"100"``, ``"404"`` ...), empty for a real one, and for a
    stored one that only looks like it: whoever published it wrote its headers.
    """
    if message.data:
        return ""
    headers = message.headers or {}
    return "" if _STORED in headers else str(headers.get(STATUS, ""))


def description_of(message: Msg) -> str:
    """Return the text beside the status of a control message."""
    return str((message.headers or {}).get(DESCRIPTION, ""))


@dataclass(frozen=True)
class Login:
    """How a client proves who it is and whom it trusts: a ``token`` or the ``seed`` of its nkey, and the
    TLS context ``tls`` (None: TLS with the system's certificates where the URL or the server wants it).
    """

    token: str = field(default="", repr=False)
    seed: str = field(default="", repr=False)
    seed_source: str = ""
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, token: str, seed_file: Path | str | None, tls: ssl.SSLContext | Path | str | None) -> Login:
        """Read what the files hold; ``tls`` may be a file of CA certificates. Raises BusError."""
        seed = read_seed(seed_file) if seed_file else ""
        context = tls if isinstance(tls, ssl.SSLContext) or tls is None else trust(tls)
        return cls(token, seed, str(seed_file or ""), context)

    def options(self) -> dict[str, Any]:
        """Return them as options of nats-py."""
        chosen = {"nkeys_seed_str": self.seed, "token": "" if self.seed else self.token, "tls": self.tls}
        return {name: value for name, value in chosen.items() if value}

    def refused(self, url: str) -> BusError:
        """Return the error of a server that does not know us."""
        if self.seed:
            return BusError(
                f"the broker at {url} refused the key {self.seed_source}",
                remedy="Does it run with the account.conf that was written together with this key?",
            )
        if self.token:
            return BusError(
                f"the server at {url} refused the token",
                remedy="Pass the run's token (SPADE_BUS_TOKEN); is another server on this port?",
            )
        return BusError(
            f"the server at {url} refused us without a token or a key",
            remedy="Pass the run's token (SPADE_BUS_TOKEN) or the key of a role (--credentials).",
        )


class Connection(Wire):
    """A connection that outlives its server. Made by :func:`open_connection`.

    ``url`` may name several servers of a cluster, separated by commas. Answers come to subjects below
    ``inbox``, ``_INBOX.<role>.<random>`` when there is a role.
    """

    def __init__(self, url: str, login: Login | None = None, *, patience: float, role: str = "") -> None:
        super().__init__(url)
        self.patience = patience
        self.inbox = ".".join(("_INBOX", *filter(None, [role and subject_token(role)]), secrets.token_hex(8)))
        self._login = login or Login()
        self.away_since: float | None = None
        self._state = anyio.Event()
        self._denial_watchers: set[Callable[[Denied], None]] = set()
        self._worst_lag = 0.0
        self._counts = dict.fromkeys(
            ("reconnects", "disconnects", "revived", "slow", "denied", "lame_ducks"), 0.0
        )

    def watch_denied(self, callback: Callable[[Denied], None]) -> Callable[[], None]:
        """Call ``callback`` when the server denies us a subject. Returns a function that ends it."""
        self._denial_watchers.add(callback)
        return lambda: self._denial_watchers.discard(callback)

    async def wait_connected(self, awaited: str, seconds: float | None = None) -> None:
        """Return when connected. Raises BusUnavailable after ``seconds`` (default: the patience)."""
        deadline = self.patience if seconds is None else seconds
        with anyio.move_on_after(deadline):
            while not self.connected:
                self.check_open(awaited)
                await self._state.wait()
            return
        raise BusUnavailable(awaited, deadline, remedy=self._hint())

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        awaited: str,
        seconds: float,
        headers: dict[str, str] | None = None,
    ) -> Msg:
        """Ask until there is an answer; the server may take ``seconds`` for it, and may be away for as
        long as the patience lasts. Only for idempotent requests.

        Raises BusUnavailable that names ``awaited``, Denied when we may not ask this.
        """
        pause, left = 0.02, seconds
        while left > 0:
            await self.wait_connected(awaited)
            asked = monotonic()
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
            left -= monotonic() - asked
        raise BusUnavailable(awaited, seconds, remedy=self._hint())

    async def _ask(
        self, subject: str, payload: bytes, headers: dict[str, str] | None, seconds: float
    ) -> Msg | None:
        """Ask once; None when the connection changed meanwhile, for then no answer comes."""
        answer: Msg | None = None
        denials: list[Denied] = []

        def on_denied(error: Denied) -> None:
            if error.concerns(subject) or error.concerns(self.inbox):
                denials.append(error)
                group.cancel_scope.cancel()

        async with flat_task_group() as group:
            unwatch = self.watch_denied(on_denied)
            try:
                group.start_soon(self._cancel_when, self._state, group.cancel_scope)
                answer = await self.client.request(subject, payload, timeout=seconds, headers=headers)
                group.cancel_scope.cancel()
            finally:
                unwatch()
        if answer is None and denials:
            ours = subject if denials[0].action == "publish" else self.inbox
            raise Denied(denials[0].action, ours) from denials[0]
        return answer

    async def api(
        self, verb: str, body: dict[str, Any] | None = None, *, seconds: float = 20.0
    ) -> dict[str, Any]:
        """Call ``$JS.API.<verb>``; a cluster that elects a leader is asked again, within ``seconds``.

        Raises NotFound, ApiError, Denied or BusUnavailable.
        """
        subject = f"$JS.API.{verb}"
        payload = msgspec.json.encode(body) if body is not None else b""
        deadline = monotonic() + seconds
        while True:
            left = max(0.05, deadline - monotonic())
            answer = await self.request(subject, payload, awaited=f"answer to {verb}", seconds=left)
            content: dict[str, Any] = msgspec.json.decode(answer.data)
            error = content.get("error")
            if not error:
                return content
            code, text = int(error.get("err_code", 0)), str(error.get("description", ""))
            if code in _NOT_FOUND:
                raise NotFound(f"{verb}: {text}", remedy="Has the run been provisioned?")
            if code not in _ELECTING or monotonic() > deadline - _ELECTION_SECONDS:
                raise ApiError(subject, code, text)
            await anyio.sleep(_ELECTION_SECONDS)

    def statistics(self) -> dict[str, float]:
        """Return counters of the connection and the bytes that wait to be written."""
        stats = self.client.stats
        return {
            "connection_up": float(self.connected),
            "connection_pending_bytes": float(self.unsent_bytes),
            "connection_worst_lag_seconds": self._worst_lag,
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
        if (found := _DENIED.search(text)) is not None:
            self._on_denied("publish" if found[1].lower() == "publish" else "subscribe", found[2])
        if text != self._last_error:
            log.debug("bus connection: %s", text)
        self._last_error = text

    def _on_denied(self, action: str, subject: str) -> None:
        """Tell whoever waits for this subject: nothing else would end that wait."""
        self._counts["denied"] += 1
        error = Denied(action, subject)
        log.warning("%s", error.what)
        for callback in list(self._denial_watchers):
            callback(error)

    async def _on_disconnected(self) -> None:
        self._counts["disconnects"] += 1
        # A server that comes for a moment and goes again has been away all the time.
        self.away_since = self.away_since or monotonic()
        # What was not written belongs to the old connection: whoever still wants it writes it again.
        self.client._pending, self.client._pending_data_size = [], 0
        self._changed()

    async def _on_reconnected(self) -> None:
        self._counts["reconnects"] += 1
        self.away_since = None
        log.info("bus reconnected to %s", self.url)
        self._changed()

    async def _on_lame_duck(self) -> None:
        """Leave a server that is about to end: its streams are gone before its connections are."""
        self._counts["lame_ducks"] += 1
        log.warning("the server at %s is about to end; reconnecting", self.url)
        await self.client.force_reconnect()

    async def _on_closed(self) -> None:
        self.closed = True
        self._changed()

    def _hint(self) -> str:
        reason = f" ({self._last_error})" if self._last_error else ""
        return f"Is the server at {self.url} running{reason}?"

    # Life.

    async def start(self, name: str, seconds: float) -> None:
        """Connect for the first time. Raises BusUnavailable, or BusError for a wrong login or server."""
        refused = anyio.Event()
        distrust: list[Exception] = []
        starting = True

        async def on_error(error: Exception) -> None:
            await self._on_error(error)
            if starting and self.client._transport:
                # nats-py forgets the socket of a try that failed half-way.
                self.client._transport.abort()
            if isinstance(error, ssl.SSLError):
                distrust.append(error)
                refused.set()
            if re.search("authori[sz]ation", self._last_error, re.IGNORECASE):
                refused.set()

        with anyio.move_on_after(seconds):
            async with anyio.create_task_group() as group:
                group.start_soon(self._cancel_when, refused, group.cancel_scope)
                await self._connect(name, on_error)
                group.cancel_scope.cancel()
        starting = False
        if distrust:
            raise BusError(
                f"TLS with the broker at {self.url} failed: {distrust[0]}",
                remedy="Pass the CA that signed its certificate (bus.ca, --ca), made for this host name.",
            )
        if refused.is_set():
            raise self._login.refused(self.url)
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
            [server.strip() for server in self.url.split(",")],
            **self._login.options(),
            name=name,
            inbox_prefix=self.inbox,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.1,
            connect_timeout=5,
            ping_interval=10,
            max_outstanding_pings=2,
            pending_size=0,
            flush_timeout=10,
            error_cb=on_error,
            disconnected_cb=self._on_disconnected,
            reconnected_cb=self._on_reconnected,
            closed_cb=self._on_closed,
            lame_duck_mode_cb=self._on_lame_duck,
        )

    async def watchdog(self) -> None:
        """Revive what nats-py lets die in silence: its loops and its reconnect task; and notice an event
        loop that was blocked for so long that leases of work may have ended.
        """
        while not self.closed:
            before = monotonic()
            await anyio.sleep(_WATCHDOG_SECONDS)
            lag = monotonic() - before - _WATCHDOG_SECONDS
            self._worst_lag = max(self._worst_lag, lag)
            if lag > _LAG_SECONDS:
                log.warning("the event loop of the bus was blocked for %.1f s", lag)
            await self._revive()

    async def _revive(self) -> None:
        client = self.client
        loops = (client._reading_task, client._ping_interval_task, client._flusher_task)
        reconnecting = client._reconnection_task
        if client.is_connected and any(task is not None and task.done() for task in loops):
            log.warning("a loop of the bus connection ended; reconnecting")
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
            except (nats.errors.Error, OSError, TimeoutError, AttributeError, RuntimeError) as error:
                log.debug("closing the bus connection: %r", error)
        # nats-py leaves the socket open when it was refused as it connected, and returns at once from a close
        # that is under way; TLS would wait for the other side's good-bye.
        self.client._transport.abort()
        with anyio.CancelScope(shield=True):
            for _ in range(_LAST_TURNS):
                await checkpoint()
        self.closed = True
        self._changed()


@asynccontextmanager
async def open_connection(
    url: str,
    *,
    name: str,
    role: str = "",
    token: str = "",
    seed_file: Path | str | None = None,
    tls: ssl.SSLContext | Path | str | None = None,
    patience: float = 900.0,
    connect_seconds: float = 10.0,
) -> AsyncIterator[Connection]:
    """Connect, keep the connection alive, close it.

    ``seed_file`` holds the nkey of ``role``, ``tls`` is a context or a file of CA certificates.
    ``patience`` is how many seconds a call waits for a server that is away. Raises BusUnavailable when
    there is none within ``connect_seconds``, BusError when it refuses us or we do not trust it.
    """
    connection = Connection(url, Login.of(token, seed_file, tls), patience=patience, role=role)
    try:
        await connection.start(name, connect_seconds)
        async with flat_task_group() as group:
            group.start_soon(connection.watchdog)
            yield connection
            group.cancel_scope.cancel()
    finally:
        await connection.close()
