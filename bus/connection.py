"""One NATS connection: reconnects without limit, revives dead loops, calls the server's API."""

from __future__ import annotations

import contextlib
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
from urllib.parse import unquote

import anyio
import msgspec
import nats.errors
from anyio.lowlevel import checkpoint
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import Header

from bus.concurrency import flat_task_group
from bus.errors import BusError, BusUnavailable, Denied, NotFound
from bus.keys import read_seed, trust
from bus.messages import token as subject_token
from bus.nats_client import Arrival, NatsClient

log = logging.getLogger("spade.bus")
STATUS, DESCRIPTION = Header.STATUS.value, Header.DESCRIPTION
_STORED = "Nats-Sequence"
_NOT_FOUND = frozenset({10014, 10037, 10059})
_NO_JETSTREAM = frozenset({10039, 10076})
_WATCHDOG_SECONDS = 1.0
_LAG_SECONDS = 5.0
_ELECTION_SECONDS = 0.25
_ELECTION_FACTOR = 6
_CLOSE_SECONDS = 3.0
_RETIRE_SECONDS = 1.0
_LAST_TURNS = 3
_OLDEST_SERVER = (2, 14)
_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)
# Answers of a cluster that elects a leader or has too few members: they pass.
_ELECTING = frozenset({10004, 10005, 10008, 10009})


class ApiError(BusError):
    """The server refused a request of its JetStream API; ``code`` is its error code."""

    def __init__(self, subject: str, code: int, description: str) -> None:
        self.code, self.description = code, description
        super().__init__(f"the server refused {subject}: {description} (code {code})")


def status_of(message: Msg | Arrival) -> str:
    """Return the status of a control message (``"100"``, ``"404"`` ...), "" for any other message.

    A stored message can look like a control message, because its publisher wrote its headers.
    """
    if message.data:
        return ""
    headers = message.headers or {}
    return "" if _STORED in headers else str(headers.get(STATUS, ""))


def description_of(message: Msg | Arrival) -> str:
    """Return the text beside the status of a control message."""
    return str((message.headers or {}).get(DESCRIPTION, ""))


def split_url(url: str) -> tuple[list[str], dict[str, str]]:
    """Return the servers of ``url`` (separated by commas) without credentials, and the credentials.

    Credentials are those of the first server that has some, percent-decoded: ``user`` and ``password``, or
    ``token`` when there is no colon.
    """
    servers: list[str] = []
    login: dict[str, str] = {}
    for part in url.split(","):
        scheme, mark, rest = part.strip().rpartition("://")
        userinfo, _, address = rest.rpartition("@")
        servers.append(f"{scheme}{mark}{address}")
        if userinfo and not login:
            user, colon, password = userinfo.partition(":")
            login = (
                {"user": unquote(user), "password": unquote(password)} if colon else {"token": unquote(user)}
            )
    return servers, login


def public_url(url: str) -> str:
    """Return ``url`` without user, password and token: the form for errors and logs."""
    return ",".join(split_url(url)[0])


@dataclass(frozen=True)
class Login:
    """Credentials of a client: the ``seed`` of its nkey, or ``options`` of nats-py (user, password, token).

    ``source`` names them in errors.
    """

    source: str
    options: dict[str, Any] = field(repr=False)

    @classmethod
    def of(cls, token: str, seed_file: Path | str | None, in_url: dict[str, str]) -> Login:
        """Return the login with a key, a token, or the credentials of the URL. Raises BusError."""
        if seed_file:
            return cls(f"the key {seed_file}", {"nkeys_seed_str": read_seed(seed_file)})
        if token:
            return cls("the token", {"token": token})
        return cls("the credentials in bus.url", dict(in_url)) if in_url else cls("", {})

    def refused(self, url: str) -> BusError:
        """Return the error for a server that does not know us."""
        if "nkeys_seed_str" in self.options:
            remedy = "Does it run with the account.conf that was written together with this key?"
        elif not self.source:
            remedy = "Pass the run's token (SPADE_BUS_TOKEN) or the key of a role (--credentials)."
        else:
            remedy = (
                "Pass the run's token (SPADE_BUS_TOKEN), or percent-encoded credentials in bus.url; "
                "is another server on this port?"
            )
        what = self.source or "a client without a token or a key"
        return BusError(f"the server at {url} refused {what}", remedy=remedy)


class Connection:
    """A connection that outlives its server. Made by :func:`open_connection`.

    ``url`` is the URL without credentials. Answers come to subjects below ``inbox``,
    ``_INBOX.<role>.<random>`` when there is a role. ``away_since`` is when the server went away (monotonic
    seconds), None while it is there.
    """

    def __init__(
        self,
        servers: list[str],
        login: Login,
        *,
        tls: ssl.SSLContext | None,
        patience: float,
        role: str = "",
    ) -> None:
        self.url = ",".join(servers)
        self.client = NatsClient()
        self.patience = patience
        self.inbox = ".".join(("_INBOX", *filter(None, [role and subject_token(role)]), secrets.token_hex(8)))
        self.away_since: float | None = None
        self.closed = False
        self._servers, self._login, self._tls = servers, login, tls
        self._changed_state = anyio.Event()
        self._watchers: set[Callable[[], None]] = set()
        self._denial_watchers: set[Callable[[Denied], None]] = set()
        self._last_error = ""
        self._worst_lag = 0.0
        self._counts = dict.fromkeys(
            ("reconnects", "disconnects", "revived", "slow", "denied", "lame_ducks"), 0.0
        )

    # State.

    @property
    def connected(self) -> bool:
        """Return whether a server is connected."""
        return bool(self.client.is_connected) and not self.closed

    @property
    def clustered(self) -> bool:
        """Return whether the server is one of several."""
        return bool(self.client.announced.get("cluster"))

    def election_time(self, seconds: float) -> float:
        """Return for how long a stream may be missing that one server would have back within ``seconds``.

        A cluster may have to elect a leader.
        """
        return seconds * (_ELECTION_FACTOR if self.clustered else 1)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` at every connect, disconnect and close. Returns a function that ends it."""
        self._watchers.add(callback)
        return lambda: self._watchers.discard(callback)

    def watch_denied(self, callback: Callable[[Denied], None]) -> Callable[[], None]:
        """Call ``callback`` when the server denies us a subject. Returns a function that ends it."""
        self._denial_watchers.add(callback)
        return lambda: self._denial_watchers.discard(callback)

    def check_open(self, awaited: str) -> None:
        """Raise BusUnavailable when the connection is closed for good."""
        if self.closed:
            reason = f" ({self._last_error})" if self._last_error else ""
            raise BusUnavailable(awaited, 0, remedy=f"The connection to {self.url} is closed{reason}.")

    async def wait_connected(self, awaited: str) -> None:
        """Return when connected. Raises BusUnavailable when the server stays away beyond the patience."""
        away = monotonic() - self.away_since if self.away_since is not None else 0.0
        with anyio.move_on_after(max(0.0, self.patience - away)):
            while not self.connected:
                self.check_open(awaited)
                await self._changed_state.wait()
            return
        raise BusUnavailable(awaited, self.patience, remedy=self._hint())

    # Writing and hearing.

    def write(self, subject: str, payload: bytes, reply: str = "", head: bytes = b"") -> bool:
        """Send one message without waiting; False when there is no server: nothing is kept for later.

        ``head`` are headers as :func:`bus.nats_client.headers_block` makes them. Bounds are the caller's.
        """
        if not self.connected:
            return False
        self.client.write(subject, payload, reply, head)
        return True

    async def subscribe(self, subject: str, handler: Callable[[Arrival], None]) -> Subscription:
        """Subscribe; ``handler`` must neither wait nor raise. Raises BusUnavailable when closed."""
        self.check_open(f"subscription to {subject}")
        return await self.client.listen(subject, handler)

    async def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription; a connection that is gone has ended it already."""
        self.client.forget(subscription)
        with contextlib.suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()

    async def retire(self, subscription: Subscription) -> None:
        """End a subscription after all that was sent to it is handled, within a second."""
        with anyio.move_on_after(_RETIRE_SECONDS), contextlib.suppress(BusError):
            if self.connected:
                await self.client.end_interest(subscription)
                await self.barrier()
        await self.unsubscribe(subscription)

    async def barrier(self) -> None:
        """Return when the server has read all that was written before, and we have all it sent before."""
        await self.api("INFO")

    async def request(self, subject: str, payload: bytes, *, awaited: str, seconds: float) -> Msg:
        """Ask until there is an answer.

        The server may take ``seconds`` for it, and may be away for as long as the patience lasts. Only for
        idempotent requests.

        Raises BusUnavailable that names ``awaited``, Denied when we may not ask this.
        """
        pause, left = 0.02, seconds
        while left > 0:
            await self.wait_connected(awaited)
            asked = monotonic()
            try:
                answer = await self._ask(subject, payload, max(0.05, min(left, 3.0)))
                if answer is not None:
                    return answer
            except nats.errors.NoRespondersError:
                self._last_error = f"no service answers {subject}"
            except (nats.errors.Error, TimeoutError, OSError) as error:
                self.check_open(awaited)
                self._last_error = repr(error)
            await anyio.sleep(pause)
            pause = min(2 * pause, 1.0)
            left -= monotonic() - asked
        raise BusUnavailable(awaited, seconds, remedy=self._hint())

    async def _ask(self, subject: str, payload: bytes, seconds: float) -> Msg | None:
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
                group.start_soon(self._cancel_when, self._changed_state, group.cancel_scope)
                answer = await self.client.request(subject, payload, timeout=seconds)
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
            if code in _NO_JETSTREAM:
                raise self._no_jetstream()
            if code not in _ELECTING or monotonic() > deadline - _ELECTION_SECONDS:
                raise ApiError(subject, code, text)
            await anyio.sleep(_ELECTION_SECONDS)

    def statistics(self) -> dict[str, float]:
        """Return counters of the connection and the bytes that wait to be written."""
        stats = self.client.stats
        return {
            "connection_up": float(self.connected),
            "connection_pending_bytes": float(self.client.unsent_bytes),
            "connection_worst_lag_seconds": self._worst_lag,
            **{
                f"connection_{name}": float(stats[name])
                for name in ("in_msgs", "out_msgs", "in_bytes", "out_bytes")
            },
            **{f"connection_{name}": value for name, value in self._counts.items()},
        }

    # Callbacks of nats-py.

    def _changed(self) -> None:
        self._changed_state.set()
        self._changed_state = anyio.Event()
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
        """End the waits for this subject: the server sends nothing else about it."""
        self._counts["denied"] += 1
        error = Denied(action, subject)
        log.warning("%s", error.what)
        for callback in list(self._denial_watchers):
            callback(error)

    async def _on_disconnected(self) -> None:
        self._counts["disconnects"] += 1
        # A server that comes for a moment and goes again has been away all the time.
        self.away_since = self.away_since or monotonic()
        self.client.drop_unsent()
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

    # Start, watch, close.

    async def start(self, name: str, seconds: float) -> None:
        """Connect for the first time. Raises BusUnavailable, or BusError for a wrong login or server."""
        refused = anyio.Event()
        distrust: list[Exception] = []
        starting = True

        async def on_error(error: Exception) -> None:
            await self._on_error(error)
            if starting:
                self.client.abort()  # nats-py forgets the socket of a try that failed half-way
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
        await self._check_server()
        self._changed()

    async def _check_server(self) -> None:
        """Raise BusError for a server that is too old or runs without JetStream."""
        version = self.client.connected_server_version
        if (version.major, version.minor) < _OLDEST_SERVER:
            raise BusError(f"nats-server {version} is too old", remedy="Use 2.14 or newer.")
        if not self.client.announced.get("jetstream"):
            try:  # a leaf node without JetStream of its own passes requests on to its hub
                await self.client.request("$JS.API.INFO", b"", timeout=3.0)
            except (nats.errors.Error, TimeoutError) as error:
                raise self._no_jetstream() from error

    def _no_jetstream(self) -> BusError:
        return BusError(
            f"the server at {self.url} has no JetStream, which stores the messages of a run",
            remedy="Start it with -js or with a jetstream block in its configuration (docs/bus-security.md).",
        )

    @staticmethod
    async def _cancel_when(event: anyio.Event, scope: anyio.CancelScope) -> None:
        await event.wait()
        scope.cancel()

    async def _connect(self, name: str, on_error: Callable[[Exception], Any]) -> None:
        await self.client.connect(
            list(self._servers),
            **self._login.options,
            tls=self._tls,
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
        """Revive dead loops of nats-py and detect a blocked event loop.

        While the loop was blocked, leases of work may have ended.
        """
        while not self.closed:
            before = monotonic()
            await anyio.sleep(_WATCHDOG_SECONDS)
            lag = monotonic() - before - _WATCHDOG_SECONDS
            self._worst_lag = max(self._worst_lag, lag)
            if lag > _LAG_SECONDS:
                log.warning("the event loop of the bus was blocked for %.1f s", lag)
            if ended := await self.client.revive():
                log.warning("%s ended; reconnecting", ended)
                self._counts["revived"] += 1

    async def close(self) -> None:
        """Send the buffer and close. Never raises; takes at most 3 s."""
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
            try:
                await self.client.close()
            except (nats.errors.Error, OSError, TimeoutError, AttributeError, RuntimeError) as error:
                log.debug("closing the bus connection: %r", error)
        # nats-py leaves the socket open when it was refused as it connected, and returns at once from a close
        # that is under way; TLS would wait for the other side's good-bye.
        self.client.abort()
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

    ``url`` may name several servers, separated by commas, and hold percent-encoded credentials. ``seed_file``
    holds the nkey of ``role``, ``tls`` is a context or a file of CA certificates. ``patience`` is how many
    seconds a call waits for a server that is away. Raises BusUnavailable when no server answers within
    ``connect_seconds``; BusError when it refuses us, has no JetStream, or we do not trust it.
    """
    servers, in_url = split_url(url)
    context = tls if isinstance(tls, ssl.SSLContext) or tls is None else trust(tls)
    login = Login.of(token, seed_file, in_url)
    connection = Connection(servers, login, tls=context, patience=patience, role=role)
    try:
        await connection.start(name, connect_seconds)
        async with flat_task_group() as group:
            group.start_soon(connection.watchdog)
            yield connection
            group.cancel_scope.cancel()
    finally:
        await connection.close()
