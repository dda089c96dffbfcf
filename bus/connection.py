"""One NATS connection: reconnects without limit, revives dead loops, asks and finds the answers."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import ssl
from collections import Counter
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
from nats.aio.subscription import Subscription

from bus.concurrency import flat_task_group
from bus.credentials import read_seed, trust
from bus.errors import BusError, BusUnavailable, Denied, NotFound
from bus.messages import token as subject_token
from bus.nats_client import Arrival, NatsClient

log = logging.getLogger("spade.bus")
_NOT_FOUND = frozenset({10014, 10037, 10059})
_NO_JETSTREAM = frozenset({10039, 10076})
# Answers of a cluster that elects a leader or has too few members: they pass.
_ELECTING = frozenset({10004, 10005, 10008, 10009})
_ELECTION_SECONDS = 0.25
_TRY_SECONDS = 3.0
_WATCHDOG_SECONDS = 1.0
_LAG_SECONDS = 5.0
_CLOSE_SECONDS = 3.0
_RETIRE_SECONDS = 1.0
_LAST_TURNS = 3
_OLDEST_SERVER = (2, 14)
_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)


class ApiError(BusError):
    """The server refused a request of its JetStream API; ``code`` is its error code."""

    def __init__(self, subject: str, code: int, description: str) -> None:
        self.code, self.description = code, description
        super().__init__(f"the server refused {subject}: {description} (code {code})")


def status_of(message: Arrival) -> str:
    """Return the status of a control message (``"100"``, ``"404"`` ...), "" for any other message.

    A stored message can look like a control message, because its publisher wrote its headers.
    """
    headers = {} if message.data else message.headers
    return "" if "Nats-Sequence" in headers else headers.get("Status", "")


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


@dataclass(slots=True)
class _Question:
    """A message that waits for its answer; ``error`` is a refusal by the server.

    With ``into`` several come: messages of a stream go there, and the control message behind them ends it.
    """

    subject: str
    into: list[Arrival] | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)
    answer: Arrival | None = None
    error: Denied | None = None


class Connection:
    """A connection that outlives its server. Made by :func:`open_connection`.

    ``url`` is the URL without credentials. Answers come to subjects below ``inbox``,
    ``_INBOX.<role>.<random>`` when there is a role.
    """

    def __init__(self, url: str, *, patience: float, role: str = "") -> None:
        self.url = url
        self.client = NatsClient()
        self.inbox = ".".join(("_INBOX", *filter(None, [role and subject_token(role)]), secrets.token_hex(8)))
        self.closed = False
        self._patience = patience
        self._away_since: float | None = None  # monotonic; None while the server is there
        self._changed_state = anyio.Event()
        self._watchers: set[Callable[[Denied | None], None]] = set()
        self._questions: dict[str, _Question] = {}
        self._serial = 0
        self._last_error = ""
        self.counts = Counter[str]()

    # State.

    @property
    def connected(self) -> bool:
        """Return whether a server is connected."""
        return bool(self.client.is_connected) and not self.closed

    def watch(self, callback: Callable[[Denied | None], None]) -> Callable[[], None]:
        """Call ``callback`` at every connect, disconnect and close (None), and when a subject is denied.

        Returns a function that ends it.
        """
        self._watchers.add(callback)
        return lambda: self._watchers.discard(callback)

    async def wait_connected(self, awaited: str) -> None:
        """Return when connected. Raises BusUnavailable when the server stays away beyond the patience."""
        away = monotonic() - self._away_since if self._away_since is not None else 0.0
        with anyio.move_on_after(max(0.0, self._patience - away)):
            while not self.connected:
                if self.closed:
                    raise self._unavailable(awaited, 0)
                await self._changed_state.wait()
            return
        raise self._unavailable(awaited, self._patience)

    def _unavailable(self, awaited: str, seconds: float) -> BusUnavailable:
        reason = f" ({self._last_error})" if self._last_error else ""
        closed = f"The connection to {self.url} is closed{reason}."
        remedy = closed if self.closed else f"Is the server at {self.url} running{reason}?"
        return BusUnavailable(awaited, seconds, remedy=remedy)

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
        if self.closed:
            raise self._unavailable(f"subscription to {subject}", 0)
        return await self.client.listen(subject, handler)

    async def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription; a connection that is gone has ended it already."""
        self.client.forget(subscription)
        with contextlib.suppress(nats.errors.Error, OSError), anyio.CancelScope(shield=True):
            await subscription.unsubscribe()

    async def retire(self, subscription: Subscription) -> None:
        """End a subscription after all that was sent to it is handled, within a second."""
        with (
            anyio.move_on_after(_RETIRE_SECONDS, shield=True),
            contextlib.suppress(BusError, nats.errors.Error),
        ):
            if self.connected:
                await self.client.end_interest(subscription)
                await self.barrier()
        await self.unsubscribe(subscription)

    async def barrier(self) -> None:
        """Return when the server has read all that was written before, and we have all it sent before."""
        await self.api("INFO")

    # Asking.

    async def ask(
        self,
        subject: str,
        payload: bytes,
        head: bytes = b"",
        *,
        seconds: float,
        into: list[Arrival] | None = None,
    ) -> Arrival | None:
        """Ask once; None when there is no server or the connection changed: then no answer comes.

        An answer with status 503 means that nobody listens there. Raises TimeoutError after ``seconds``,
        Denied when we may not ask this.
        """
        self._serial += 1
        token = f"{self._serial:x}"
        question = self._questions[token] = _Question(subject, into)
        try:
            if not self.write(subject, payload, f"{self.inbox}.answer.{token}", head):
                return None
            with anyio.fail_after(seconds):
                await question.ended.wait()
        finally:
            del self._questions[token]
        if question.error is not None:
            raise question.error
        return question.answer

    def _on_answer(self, message: Arrival) -> None:
        question = self._questions.get(message.subject.rpartition(".")[2])
        if question is None:
            return
        if question.into is not None and not status_of(message):
            question.into.append(message)
            return
        question.answer = message
        question.ended.set()

    async def request(
        self, subject: str, payload: bytes, *, awaited: str, seconds: float, into: list[Arrival] | None = None
    ) -> Arrival:
        """Ask until there is an answer. Only for idempotent requests.

        The messages of a batch are appended to ``into``. If it breaks off, its last message is the answer.
        The server may take ``seconds`` for it, and may be away for as long as the patience lasts. Raises
        BusUnavailable that names ``awaited``, Denied when we may not ask this.
        """
        pause, left = 0.02, seconds
        while left > 0:
            await self.wait_connected(awaited)
            asked = monotonic()
            with contextlib.suppress(TimeoutError):
                allowed = max(0.05, min(left, _TRY_SECONDS))
                answer = await self.ask(subject, payload, seconds=allowed, into=into)
                if answer is not None and status_of(answer) != "503":
                    return answer
            if into:
                return into[-1]
            await anyio.sleep(pause)
            pause = min(2 * pause, 1.0)
            left -= monotonic() - asked
        raise self._unavailable(awaited, seconds)

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

    # Callbacks of nats-py.

    def _changed(self) -> None:
        self._changed_state.set()
        self._changed_state = anyio.Event()
        for question in self._questions.values():
            question.ended.set()
        for callback in list(self._watchers):
            callback(None)

    async def _on_error(self, error: Exception) -> None:
        text = str(error) or repr(error)
        if (found := _DENIED.search(text)) is not None:
            action = "publish" if found[1].lower() == "publish" else "subscribe"
            self._on_denied(Denied(action, found[2]))
        if text != self._last_error:
            log.debug("bus connection: %s", text)
        self._last_error = text

    def _on_denied(self, error: Denied) -> None:
        """End the waits for this subject: the server sends nothing else about it."""
        self.counts["denied"] += 1
        log.warning("%s", error.what)
        for question in self._questions.values():
            for subject in (question.subject, self.inbox):
                if error.concerns(subject):  # the server writes it in lower case
                    question.error = Denied(error.action, subject)
                    question.ended.set()
        for callback in list(self._watchers):
            callback(error)

    async def _on_disconnected(self) -> None:
        self.counts["disconnects"] += 1
        # A server that comes for a moment and goes again has been away all the time.
        self._away_since = self._away_since or monotonic()
        self.client.drop_unsent()
        self._changed()

    async def _on_reconnected(self) -> None:
        self.counts["reconnects"] += 1
        self._away_since = None
        log.info("bus reconnected to %s", self.url)
        self._changed()

    async def _on_lame_duck(self) -> None:
        """Leave a server that is about to end: its streams are gone before its connections are."""
        self.counts["lame_ducks"] += 1
        log.warning("the server at %s is about to end; reconnecting", self.url)
        await self.client.force_reconnect()

    async def _on_closed(self) -> None:
        self.closed = True
        self._changed()

    # Start, watch, close.

    async def start(self, name: str, login: dict[str, Any], who: str, seconds: float) -> None:
        """Connect for the first time with options of nats-py; ``who`` names the login in errors.

        Raises BusUnavailable, or BusError for a wrong login or server.
        """
        refusal: BusError | None = None
        starting = True

        async def on_error(error: Exception) -> None:
            nonlocal refusal
            await self._on_error(error)
            if starting:
                self.client.abort()  # nats-py forgets the socket of a try that failed half-way
                refusal = refusal or self._refusal(error, who)
                if refusal is not None:
                    scope.cancel()

        with anyio.move_on_after(seconds) as scope:
            await self.client.connect(
                self.url.split(","),
                **login,
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
        starting = False
        if refusal is not None:
            raise refusal
        if not self.connected:
            raise self._unavailable(f"connection to {self.url}", seconds)
        await self.subscribe(f"{self.inbox}.answer.*", self._on_answer)
        await self._check_server()

    def _refusal(self, error: Exception, who: str) -> BusError | None:
        """Return the error of a server that will not let us in at another try either."""
        if isinstance(error, ssl.SSLError):
            what = f"TLS with the broker at {self.url} failed: {error}"
            return BusError(what, remedy="Pass the CA of its certificate (bus.ca, --ca) for this host name.")
        if re.search("authori[sz]ation", str(error), re.IGNORECASE):
            remedy = (
                "Pass the run's token (SPADE_BUS_TOKEN), percent-encoded credentials in bus.url, or the key "
                "of a role (--credentials) that was written together with the server's account.conf. "
                "Is another server on this port?"
            )
            return BusError(f"the server at {self.url} refused {who}", remedy=remedy)
        return None

    async def _check_server(self) -> None:
        """Raise BusError for a server that is too old or has no JetStream, Denied for another role's key."""
        version = self.client.connected_server_version
        if (version.major, version.minor) < _OLDEST_SERVER:
            raise BusError(f"nats-server {version} is too old", remedy="Use 2.14 or newer.")
        answer = None
        with contextlib.suppress(TimeoutError):  # a cluster without a leader says nothing
            answer = await self.ask("$JS.API.INFO", b"", seconds=_TRY_SECONDS)
        error = msgspec.json.decode(answer.data or b"{}").get("error", {}) if answer else {}
        if (answer and status_of(answer)) or error.get("err_code") in _NO_JETSTREAM:
            raise BusError(
                f"the server at {self.url} has no JetStream, which stores the messages of a run",
                remedy="Start it with -js or with a jetstream block in its configuration "
                "(docs/bus-security.md).",
            )

    async def watchdog(self) -> None:
        """Revive dead loops of nats-py and detect a blocked event loop.

        While the loop was blocked, leases of work may have ended.
        """
        while not self.closed:
            before = monotonic()
            await anyio.sleep(_WATCHDOG_SECONDS)
            lag = monotonic() - before - _WATCHDOG_SECONDS
            if lag > _LAG_SECONDS:
                log.warning("the event loop of the bus was blocked for %.1f s", lag)
            if ended := await self.client.revive():
                log.warning("%s ended; reconnecting", ended)
                self.counts["revived"] += 1

    async def close(self) -> None:
        """Send the buffer and close. Never raises; takes at most 3 s."""
        with anyio.move_on_after(_CLOSE_SECONDS, shield=True):
            try:
                await self.client.close()
            except (nats.errors.Error, OSError, TimeoutError, AttributeError, RuntimeError) as error:
                log.debug("closing the bus connection: %r", error)
        # nats-py leaves the socket open when it was refused as it connected; TLS waits for a good-bye.
        self.client.abort()
        with anyio.CancelScope(shield=True):
            for _ in range(_LAST_TURNS):
                await checkpoint()
        await self._on_closed()


@asynccontextmanager
async def open_connection(
    url: str,
    *,
    name: str,
    role: str = "",
    token: str = "",
    seed_file: Path | str | None = None,
    tls: Path | str | None = None,
    patience: float = 900.0,
    connect_seconds: float = 10.0,
) -> AsyncIterator[Connection]:
    """Connect, keep the connection alive, close it.

    ``url`` may name several servers, separated by commas, and hold percent-encoded credentials. ``seed_file``
    holds the nkey of ``role``, ``tls`` is a file of CA certificates. ``patience`` is how many
    seconds a call waits for a server that is away. Raises BusUnavailable when no server answers within
    ``connect_seconds``; BusError when it refuses us, has no JetStream, or we do not trust it; Denied when the
    key is another role's.
    """
    servers, login = split_url(url)
    who = "the credentials in bus.url" if login else "a client without a token or a key"
    if seed_file:
        who, login = f"the key {seed_file}", {"nkeys_seed_str": read_seed(seed_file)}
    elif token:
        who, login = "the token", {"token": token}
    options = {**login, "tls": trust(tls) if tls else None}
    connection = Connection(",".join(servers), patience=patience, role=role)
    try:
        await connection.start(name, options, who, connect_seconds)
        async with flat_task_group() as group:
            group.start_soon(connection.watchdog)
            yield connection
            group.cancel_scope.cancel()
    finally:
        await connection.close()
