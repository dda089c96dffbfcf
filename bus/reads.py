"""Reading stored messages by number or subject, without a consumer."""

from __future__ import annotations

import base64
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Any

import anyio
import msgspec
import nats.errors
from nats.aio.msg import Msg

from bus import codec
from bus.connection import Connection, status_of
from bus.errors import BusError, BusUnavailable, Denied, NotFound, Undecodable
from bus.interface import Record, StreamInfo
from bus.lane import Arrival
from bus.mailbox import Mailbox
from bus.subjects import Names

_SECONDS = 20.0
_SILENCE_SECONDS = 3.0
_PAUSE_SECONDS = 0.25
_NO_END = 1 << 62
_BATCH = 256
_LINE_END = b"\r\n"
_NO_HEADERS = b"NATS/1.0\r\n"
_BATCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as it lies in a stream, read or not: its bytes, the id it was stored under (empty when
    it had none), and when, in seconds since the epoch.
    """

    sequence: int
    tail: str
    frame: bytes
    id: str
    at: float


def stored_of(names: Names, message: Msg) -> Stored:
    """Return what a direct answer holds, without looking into it."""
    headers = message.headers or {}
    return Stored(
        sequence=int(headers["Nats-Sequence"]),
        tail=names.tail(headers["Nats-Subject"]),
        frame=message.data,
        id=headers.get("Nats-Msg-Id", ""),
        at=datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp(),
    )


def record_of(names: Names, message: Msg) -> Record:
    """Return the record in a direct answer. Raises Undecodable."""
    headers = message.headers or {}
    envelope, content = codec.decode(message.data)
    return Record(int(headers["Nats-Sequence"]), content, names.tail(headers["Nats-Subject"]), envelope)


async def stream_info(connection: Connection, names: Names, stream: str) -> StreamInfo:
    """Return the state of a stream. Raises NotFound."""
    info = await connection.api(f"STREAM.INFO.{names.stream(stream)}")
    state = info["state"]
    return StreamInfo(
        first=state["first_seq"],
        last=state["last_seq"],
        messages=state["messages"],
        bytes=state["bytes"],
        bound=max(0, info["config"]["max_bytes"]),
    )


async def direct(connection: Connection, stream: str, request: dict[str, object], what: str) -> Msg | None:
    """Ask a stream (server's name) for one message; None when there is none."""
    answer = await connection.request(
        f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(request), awaited=what, seconds=_SECONDS
    )
    status = status_of(answer)
    if status == "404":
        return None
    if status:
        raise BusError(f"{what}: the server answers status {status}")
    return answer


async def newest(connection: Connection, stream: str, request: dict[str, object], what: str) -> Msg | None:
    """Ask as :func:`direct` does, but a cluster's leader: any copy answers a direct request, also one that
    does not have the newest messages yet. Keys of an older provision may not ask the leader.
    """
    if not connection.clustered:
        return await direct(connection, stream, request, what)
    try:
        answer = await connection.api(f"STREAM.MSG.GET.{stream}", dict(request), seconds=_SECONDS)
    except NotFound:
        return None
    except Denied:
        return await direct(connection, stream, request, what)
    return _as_direct(answer["message"])


def _as_direct(found: dict[str, Any]) -> Arrival:
    """Return the leader's answer in the form of a direct one."""
    head = base64.b64decode(found.get("hdrs") or "").removesuffix(_LINE_END) or _NO_HEADERS
    # The last of two headers with one name counts: what was published cannot pretend to be these.
    told = {"Nats-Sequence": found["seq"], "Nats-Subject": found["subject"], "Nats-Time-Stamp": found["time"]}
    lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
    data = base64.b64decode(found.get("data") or "")
    return Arrival(str(found["subject"]), "", data, head + f"{lines}\r\n".encode())


async def get(connection: Connection, names: Names, stream: str, sequence: int) -> Record:
    """Return one record. Raises NotFound or Undecodable."""
    what = f"message {sequence} of {stream}"
    answer = await direct(connection, names.stream(stream), {"seq": sequence}, what)
    if answer is None and connection.clustered:
        answer = await newest(connection, names.stream(stream), {"seq": sequence}, what)
    headers = (answer.headers or {}) if answer is not None else {}
    if answer is None or int(headers["Nats-Sequence"]) != sequence:
        raise NotFound(f"no {what}")
    return record_of(names, answer)


class _Source:
    """The messages of one filter, in order, fetched in batches from ``position`` on."""

    def __init__(self, connection: Connection, stream: str, subject: str, position: int, last: int) -> None:
        self._connection, self._stream, self._subject = connection, stream, subject
        self._position, self._last = position, last
        self._ready: list[Msg] = []
        self._ended = False
        self._silence = 0.0

    async def head(self) -> tuple[int, Msg] | None:
        """Return the next message with its sequence without taking it, None at the end."""
        while not self._ready and not self._ended:
            await self._fetch()
        if not self._ready:
            return None
        sequence = _sequence(self._ready[-1])
        return (sequence, self._ready[-1]) if sequence <= self._last else None

    def take(self) -> None:
        """Drop the head."""
        self._ready.pop()

    async def _fetch(self) -> None:
        if self._position > self._last:
            self._ended = True
            return
        await self._connection.wait_connected(f"connection to replay {self._stream}")
        began = monotonic()
        inbox = f"{self._connection.inbox}.replay.{secrets.token_hex(6)}"
        answers: Mailbox[Msg] = Mailbox()
        unwatch = self._connection.watch(answers.end)
        try:
            subscription = await self._connection.subscribe(inbox, answers.put)
            try:
                await self._ask(inbox)
                self._ready = await self._collect(answers)
            finally:
                with anyio.CancelScope(shield=True):
                    await self._connection.unsubscribe(subscription)
        finally:
            unwatch()
        self._ready.reverse()
        if self._ended and self._connection.clustered and await self._is_behind():
            self._ended = False
            await anyio.sleep(_PAUSE_SECONDS)
        self._silence = 0.0 if self._ready or self._ended else self._silence + monotonic() - began
        if self._silence > _SECONDS:
            raise BusUnavailable(f"answer of stream {self._stream} to a replay", _SECONDS)

    async def _is_behind(self) -> bool:
        """Whether the leader holds more than the copy that answered: any server of a cluster answers a
        direct request, also one that does not have the newest messages yet.
        """
        request = {"seq": self._position, "next_by_subj": self._subject}
        try:
            answer = await self._connection.api(f"STREAM.MSG.GET.{self._stream}", request)
        except NotFound:
            return False
        return int(answer["message"]["seq"]) <= self._last

    async def _ask(self, inbox: str) -> None:
        request = {
            "seq": self._position,
            "next_by_subj": self._subject,
            "batch": _BATCH,
            "max_bytes": _BATCH_BYTES,
        }
        # A server that went away meanwhile is noticed by whoever collects the answers.
        with contextlib.suppress(nats.errors.OutboundBufferLimitError, nats.errors.ConnectionClosedError):
            await self._connection.send(
                f"$JS.API.DIRECT.GET.{self._stream}", msgspec.json.encode(request), reply=inbox
            )

    async def _collect(self, answers: Mailbox[Msg]) -> list[Msg]:
        """Return what arrives until the end mark or a silence; the next fetch goes on from there."""
        got: list[Msg] = []
        while True:
            with anyio.move_on_after(_SILENCE_SECONDS) as scope:
                try:
                    message = await anext(answers)
                except StopAsyncIteration:
                    return got
            if scope.cancelled_caught:
                return got
            status = status_of(message)
            if status in ("404", "204"):
                pending = int((message.headers or {}).get("Nats-Num-Pending", "0"))
                self._ended = status == "404" or pending == 0
                return got
            if status == "503":
                await anyio.sleep(_PAUSE_SECONDS)  # it starts, or elects a leader
                return got
            if status:
                raise BusError(f"replay of {self._stream}: the server answers status {status}")
            got.append(message)
            self._position = _sequence(message) + 1


async def find_stored(
    connection: Connection, stream: str, subject: str, message_id: str, *, after: int
) -> int | None:
    """Return the sequence of the message that was stored under ``message_id``, later than ``after``.

    With ``after`` 0 only the last message on the subject is looked at. ``stream`` is the server's name.
    """
    if after == 0:
        last = await newest(connection, stream, {"last_by_subj": subject}, f"last message on {subject}")
        return _sequence(last) if last is not None and _has_id(last, message_id) else None
    source = _Source(connection, stream, subject, after + 1, _NO_END)
    while (head := await source.head()) is not None:
        if _has_id(head[1], message_id):
            return head[0]
        source.take()
    return None


def _has_id(message: Msg, message_id: str) -> bool:
    return (message.headers or {}).get("Nats-Msg-Id") == message_id


def _sequence(message: Msg) -> int:
    return int((message.headers or {})["Nats-Sequence"])


async def _messages(
    connection: Connection, names: Names, stream: str, *, start: int, tails: Sequence[str], last: int
) -> AsyncIterator[Msg]:
    """Yield what lies in ``start`` .. ``last``, merged over the filters."""
    name = names.stream(stream)
    subjects = [names.subject(tail) for tail in tails] or [">"]
    sources = [_Source(connection, name, subject, max(1, start), last) for subject in subjects]
    while True:
        heads = [(head, source) for source in sources if (head := await source.head()) is not None]
        if not heads:
            return
        (_, message), source = min(heads, key=lambda pair: pair[0][0])
        source.take()
        yield message


async def replay(
    connection: Connection, names: Names, stream: str, *, start: int, tails: Sequence[str], last: int
) -> AsyncIterator[Record | Undecodable]:
    """Yield what lies in ``start`` .. ``last``, merged over the filters; Undecodable in its place."""
    async for message in _messages(connection, names, stream, start=start, tails=tails, last=last):
        try:
            yield record_of(names, message)
        except Undecodable as error:
            yield error


async def raw(
    connection: Connection, names: Names, stream: str, *, start: int, tails: Sequence[str], last: int
) -> AsyncIterator[Stored]:
    """Yield what lies in ``start`` .. ``last`` as it was stored, also what nobody can decode."""
    async for message in _messages(connection, names, stream, start=start, tails=tails, last=last):
        yield stored_of(names, message)
