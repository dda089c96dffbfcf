"""Reading stored messages by sequence or subject, without a consumer."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from bus import codec
from bus.codec import Envelope
from bus.connection import Connection, status_of
from bus.errors import BusError, NotFound
from bus.messages import Message
from bus.nats_client import Arrival, headers_block
from bus.subjects import Names

_SECONDS = 20.0
_BATCH, _BATCH_BYTES = 256, 4 << 20


class Record(msgspec.Struct, frozen=True, gc=False):
    """One stored message: its ``sequence`` in the stream (from 1) and its subject ``tail``."""

    sequence: int
    message: Message
    tail: str
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """State of a stream.

    An empty stream has ``messages`` 0 and ``first`` = ``last`` + 1. ``bound`` is the most bytes that it may
    hold (0: no bound).
    """

    first: int
    last: int
    messages: int
    bytes: int
    bound: int = 0


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


def stored_of(names: Names, message: Arrival) -> Stored:
    """Return the content of an answer, without decoding its frame."""
    headers = message.headers
    return Stored(
        sequence=int(headers["Nats-Sequence"]),
        tail=names.tail(headers["Nats-Subject"]),
        frame=message.data,
        id=headers.get("Nats-Msg-Id", ""),
        at=datetime.fromisoformat(headers["Nats-Time-Stamp"]).timestamp(),
    )


def record_of(stored: Stored) -> Record:
    """Return the record in a stored message. Raises Undecodable."""
    envelope, content = codec.decode(stored.frame)
    return Record(stored.sequence, content, stored.tail, envelope)


async def from_leader(connection: Connection, stream: str, request: dict[str, Any]) -> Arrival | None:
    """Ask the leader of a stream (server's name) for one message; None when there is none.

    Only the leader of a cluster has the newest messages for certain.
    """
    try:
        answer = await connection.api(f"STREAM.MSG.GET.{stream}", request, seconds=_SECONDS)
    except NotFound as error:
        if "stream not found" in str(error):
            raise
        return None
    found = answer["message"]
    # The last of two headers with one name counts: what was published cannot pretend to be these.
    ours = {
        "Nats-Sequence": str(found["seq"]),
        "Nats-Subject": found["subject"],
        "Nats-Time-Stamp": found["time"],
    }
    theirs = base64.b64decode(found.get("hdrs") or "").removesuffix(b"\r\n")
    head = theirs + headers_block(ours).removeprefix(b"NATS/1.0\r\n" if theirs else b"")
    return Arrival(found["subject"], "", base64.b64decode(found.get("data") or ""), head)


async def from_any(connection: Connection, stream: str, request: dict[str, Any]) -> Arrival | None:
    """Ask any copy of a stream (server's name) for one message, and its leader when that copy has none.

    This is the fast way for many messages, and for large ones.
    """
    answer = await _direct(connection, stream, request)
    return await from_leader(connection, stream, request) if answer is None else answer


async def _batch_from_any(connection: Connection, stream: str, request: dict[str, Any]) -> Sequence[Arrival]:
    """Ask like :func:`from_any`, for the message of ``request`` and some of those behind it."""
    found = list[Arrival]()
    limits = {"batch": _BATCH, "max_bytes": _BATCH_BYTES}
    await _direct(connection, stream, request | limits, found)
    if not found and (one := await from_leader(connection, stream, request)) is not None:
        found.append(one)
    return found


async def _direct(
    connection: Connection, stream: str, request: dict[str, Any], into: list[Arrival] | None = None
) -> Arrival | None:
    """Ask any copy of a stream; None when it has no such message, or after a batch."""
    answer = await connection.request(
        f"$JS.API.DIRECT.GET.{stream}",
        msgspec.json.encode(request),
        awaited=f"answer of stream {stream}",
        seconds=_SECONDS,
        into=into,
    )
    status = status_of(answer)
    if status in ("204", "404"):
        return None
    if status:
        raise BusError(f"reading {stream}: the server answers status {status}")
    return answer


async def get(connection: Connection, names: Names, stream: str, sequence: int) -> Record:
    """Return one record. Raises NotFound or Undecodable."""
    answer = await from_any(connection, names.stream(stream), {"seq": sequence})
    if answer is None:
        raise NotFound(f"no message {sequence} of {stream}")
    return record_of(stored_of(names, answer))


async def between(
    connection: Connection, names: Names, stream: str, *, start: int, last: int, tails: Sequence[str] = ()
) -> AsyncIterator[Stored]:
    """Yield the messages ``start`` .. ``last`` of a stream as they are stored, merged over the filters."""

    async def after(subject: str, sequence: int) -> deque[Stored]:
        if sequence > last:
            return deque()
        request = {"seq": sequence, "next_by_subj": subject}
        found = await _batch_from_any(connection, names.stream(stream), request)
        return deque(one for answer in found if (one := stored_of(names, answer)).sequence <= last)

    subjects = [names.subject(tail) for tail in tails] or [">"]
    ahead = {subject: await after(subject, max(1, start)) for subject in subjects}
    while heads := [queue[0] for queue in ahead.values() if queue]:
        head = min(heads, key=lambda one: one.sequence)
        yield head
        for subject, queue in ahead.items():
            if queue and queue[0].sequence == head.sequence:
                queue.popleft()
                ahead[subject] = queue or await after(subject, head.sequence + 1)
