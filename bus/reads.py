"""Reading stored messages by sequence or subject, without a consumer."""

from __future__ import annotations

import base64
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from time import monotonic

import anyio
import msgspec
from nats.aio.msg import Msg

from bus import codec
from bus.concurrency import ArrivalQueue
from bus.connection import Connection, status_of
from bus.errors import BusError, BusUnavailable, NotFound, Undecodable
from bus.interface import Record, StreamInfo
from bus.nats_client import Arrival
from bus.subjects import Names

_SECONDS = 20.0
_SILENCE_SECONDS = 3.0
_PAUSE_SECONDS = 0.25
_NO_END = 1 << 62
_BATCH = 256
_BATCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A message as it lies in a stream.

    Its bytes, the id it was stored under (empty when it had none), and when, in seconds since the epoch.
    """

    sequence: int
    tail: str
    frame: bytes
    id: str
    at: float


def stored_of(names: Names, message: Msg | Arrival) -> Stored:
    """Return the content of an answer, without decoding its frame."""
    headers = message.headers or {}
    return Stored(
        sequence=int(headers["Nats-Sequence"]),
        tail=names.tail(headers["Nats-Subject"]),
        frame=message.data,
        id=headers.get("Nats-Msg-Id", ""),
        at=datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp(),
    )


def record_of(names: Names, message: Msg | Arrival) -> Record:
    """Return the record in an answer. Raises Undecodable."""
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
    """Ask any copy of a stream (server's name) for one message; None when that copy has none."""
    answer = await connection.request(
        f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(request), awaited=what, seconds=_SECONDS
    )
    status = status_of(answer)
    if status == "404":
        return None
    if status:
        raise BusError(f"{what}: the server answers status {status}")
    return answer


async def certain(connection: Connection, stream: str, request: dict[str, object]) -> Arrival | None:
    """Ask the leader of a stream (server's name) for one message; None when there is none.

    Only the leader of a cluster has the newest messages for certain.
    """
    try:
        answer = await connection.api(f"STREAM.MSG.GET.{stream}", dict(request), seconds=_SECONDS)
    except NotFound as error:
        if "stream not found" in str(error):
            raise
        return None
    found = answer["message"]
    head = base64.b64decode(found.get("hdrs") or "").removesuffix(b"\r\n") or b"NATS/1.0\r\n"
    # The last of two headers with one name counts: what was published cannot pretend to be these.
    ours = {"Nats-Sequence": found["seq"], "Nats-Subject": found["subject"], "Nats-Time-Stamp": found["time"]}
    lines = "".join(f"{name}: {value}\r\n" for name, value in ours.items())
    data = base64.b64decode(found.get("data") or "")
    return Arrival(str(found["subject"]), "", data, head + f"{lines}\r\n".encode())


async def get(connection: Connection, names: Names, stream: str, sequence: int) -> Record:
    """Return one record. Raises NotFound or Undecodable."""
    name, request, what = names.stream(stream), {"seq": sequence}, f"message {sequence} of {stream}"
    answer: Msg | Arrival | None = await direct(connection, name, dict(request), what)
    if answer is None and connection.clustered:
        answer = await certain(connection, name, dict(request))
    if answer is None or int((answer.headers or {})["Nats-Sequence"]) != sequence:
        raise NotFound(f"no {what}")
    return record_of(names, answer)


async def ask_batch(
    connection: Connection, stream: str, request: dict[str, object], what: str
) -> tuple[list[Arrival], int | None]:
    """Ask a stream (server's name) for many messages at once; return them and how many more there are.

    The second is None when the answer was cut short, by a reconnect or a silence: ask again for the rest.
    """
    await connection.wait_connected(f"connection to read {what}")
    inbox = f"{connection.inbox}.batch.{secrets.token_hex(6)}"
    answers: ArrivalQueue[Arrival] = ArrivalQueue()
    unwatch = connection.watch(answers.end)
    subscription = None
    try:
        subscription = await connection.subscribe(inbox, answers.put)
        connection.write(f"$JS.API.DIRECT.GET.{stream}", msgspec.json.encode(request), inbox)
        return await _collect(answers, what)
    finally:
        unwatch()
        if subscription is not None:
            with anyio.CancelScope(shield=True):
                await connection.unsubscribe(subscription)


async def _collect(answers: ArrivalQueue[Arrival], what: str) -> tuple[list[Arrival], int | None]:
    """Return the messages until the end mark or a silence."""
    got: list[Arrival] = []
    while True:
        message: Arrival | None = None
        with anyio.move_on_after(_SILENCE_SECONDS), contextlib.suppress(StopAsyncIteration):
            message = await anext(answers)
        if message is None:
            return got, None
        status = status_of(message)
        if status in ("404", "204"):
            pending = (message.headers or {}).get("Nats-Num-Pending", "0")
            return got, 0 if status == "404" else int(pending)
        if status == "503":
            await anyio.sleep(_PAUSE_SECONDS)  # it starts, or elects a leader
            return got, None
        if status:
            raise BusError(f"reading {what}: the server answers status {status}")
        got.append(message)


class _FilterReader:
    """The messages of one filter, in order, fetched in batches from ``position`` on."""

    def __init__(self, connection: Connection, stream: str, subject: str, position: int, last: int) -> None:
        self._connection, self._stream, self._subject = connection, stream, subject
        self._position, self._last = position, last
        self._ready: list[Arrival] = []
        self._ended = False

    async def head(self) -> tuple[int, Arrival] | None:
        """Return the next message with its sequence without taking it, None at the end."""
        silence = 0.0
        while not self._ready and not self._ended:
            began = monotonic()
            await self._fetch()
            silence += monotonic() - began
            if silence > _SECONDS and not self._ready and not self._ended:
                raise BusUnavailable(f"answer of stream {self._stream} to a replay", _SECONDS)
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
        request: dict[str, object] = {"seq": self._position, "next_by_subj": self._subject}
        found, pending = await ask_batch(
            self._connection,
            self._stream,
            {**request, "batch": _BATCH, "max_bytes": _BATCH_BYTES},
            self._stream,
        )
        if found:
            self._position = _sequence(found[-1]) + 1
        self._ready = found[::-1]
        self._ended = pending == 0
        if self._ended and self._connection.clustered:
            # The copy that answered may be behind the leader.
            request["seq"] = self._position
            more = await certain(self._connection, self._stream, request)
            if more is not None and _sequence(more) <= self._last:
                self._ended = False
                await anyio.sleep(_PAUSE_SECONDS)


async def find_stored(
    connection: Connection, stream: str, subject: str, message_id: str, *, after: int
) -> int | None:
    """Return the sequence of the message that was stored under ``message_id``, later than ``after``.

    With ``after`` 0 only the last message on the subject is examined. ``stream`` is the server's name.
    """
    if after == 0:
        last = await certain(connection, stream, {"last_by_subj": subject})
        return _sequence(last) if last is not None and _has_id(last, message_id) else None
    source = _FilterReader(connection, stream, subject, after + 1, _NO_END)
    while (head := await source.head()) is not None:
        if _has_id(head[1], message_id):
            return head[0]
        source.take()
    return None


def _has_id(message: Arrival, message_id: str) -> bool:
    return (message.headers or {}).get("Nats-Msg-Id") == message_id


def _sequence(message: Arrival) -> int:
    return int((message.headers or {})["Nats-Sequence"])


async def messages(
    connection: Connection, names: Names, stream: str, *, start: int, tails: Sequence[str], last: int
) -> AsyncIterator[Arrival]:
    """Yield the messages ``start`` .. ``last`` of a stream, merged over the filters, in order."""
    name = names.stream(stream)
    subjects = [names.subject(tail) for tail in tails] or [">"]
    sources = [_FilterReader(connection, name, subject, max(1, start), last) for subject in subjects]
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
    """Yield the records ``start`` .. ``last``, merged over the filters; Undecodable in its place."""
    async for message in messages(connection, names, stream, start=start, tails=tails, last=last):
        try:
            yield record_of(names, message)
        except Undecodable as error:
            yield error


async def raw(
    connection: Connection, names: Names, stream: str, *, start: int, tails: Sequence[str], last: int
) -> AsyncIterator[Stored]:
    """Yield the messages ``start`` .. ``last`` as they are stored, also those that cannot be decoded."""
    async for message in messages(connection, names, stream, start=start, tails=tails, last=last):
        yield stored_of(names, message)
