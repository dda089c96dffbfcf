"""What publishing is made of: limits, the server's answer, a message on its way, the window of a stream."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

import msgspec

from bus.errors import BusError
from bus.lane import headers_block

ID = "Nats-Msg-Id"


@dataclass(frozen=True)
class Limits:
    """``window`` messages and ``window_bytes`` may be unacknowledged per stream. A message is written
    again after ``ack_seconds`` without an answer; ``unanswered`` such times in a row while the server is
    there, or ``absent_seconds`` without a stream, are an error. ``full_seconds`` bounds back-pressure.
    """

    window: int = 256
    window_bytes: int = 16 << 20
    ack_seconds: float = 5.0
    unanswered: int = 6
    absent_seconds: float = 10.0
    full_seconds: float = 6 * 3600.0


class Fault(msgspec.Struct, gc=False):
    """Why the server refused."""

    err_code: int = 0
    description: str = ""


class PubAck(msgspec.Struct, gc=False):
    """The server's answer: the stream sequence, or an error."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: Fault | None = None


@dataclass(slots=True)
class Window:
    """How much of one stream is on its way, and who waits for room. ``floor`` is the highest sequence that
    was acknowledged.
    """

    messages: int = 0
    bytes: int = 0
    floor: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Entry(msgspec.Struct, eq=False):
    """A message on its way. It ends with an ``answer`` or an ``error``; ``waiter`` is woken by either.

    Of ``unsure`` writes nobody knows the fate; the first was at ``written``, when the stream was known to
    reach ``floor``.
    """

    stream: str
    subject: str
    payload: bytes
    head: bytes
    token: str
    size: int
    born: float
    due: float
    window: Window
    answer: PubAck | None = None
    error: BusError | None = None
    waiter: asyncio.Future[None] | None = None
    tries: int = 0
    unanswered: int = 0
    refused: bool = False
    absent_since: float = 0.0
    full_since: float = 0.0
    unsure: int = 0
    written: float = 0.0
    floor: int = 0

    @property
    def ended(self) -> bool:
        """Whether the server has stored it or we have given it up."""
        return self.answer is not None or self.error is not None


def head_of(message_id: str, headers: dict[str, str] | None) -> bytes:
    """Return the block of headers of a message."""
    if headers or not message_id.isprintable():
        return headers_block({ID: message_id, **(headers or {})})
    return f"NATS/1.0\r\n{ID}: {message_id}\r\n\r\n".encode()
