"""Frames: a small envelope that every client can read, and a body that only readers of its kind can.

Wire form: one msgpack array ``[v, kind, run, role, instance, ts, attempt, body]``. ``body`` is the message as
a msgpack map; its deterministic id is the header ``Nats-Msg-Id``. Fields may be appended after ``body``;
readers ignore what they do not know. ``v`` changes only when a reader must not guess.
"""

from __future__ import annotations

import functools
import time

import msgspec

from bus import messages
from bus.errors import BusError, Undecodable, UnknownKind
from bus.messages import base
from bus.nats_client import read_headers

VERSION = 1
_ORIGIN = "Nats-Stream"


class Envelope(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Sender and time of a message.

    ``ts`` is the wall clock in ns at creation, ``attempt`` the producer's attempt (0: it does not count).
    """

    v: int
    kind: str
    run: str
    role: str
    instance: str
    ts: int
    attempt: int


class Frame(Envelope, frozen=True, gc=False, array_like=True):
    """An envelope and its body, flat in one array."""

    body: msgspec.Raw

    @property
    def envelope(self) -> Envelope:
        """Return the part before the body."""
        return Envelope(*msgspec.structs.astuple(self)[:-1])


_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(Frame)


@functools.cache
def _body_decoder(kind: type[messages.Message]) -> msgspec.msgpack.Decoder[messages.Message]:
    return msgspec.msgpack.Decoder(kind)


def encode(message: messages.Message, *, run: str, role: str, instance: str) -> bytes:
    """Return the frame of ``message``.

    Raises BusError when its class is not registered: no reader could decode it.
    """
    kind = type(message)
    tag = base.kind_of(kind)
    if base.class_of(tag) is not kind:
        raise BusError(
            f"message class {kind.__module__}.{kind.__qualname__} is not registered",
            remedy="Decorate it with bus.messages.register_message.",
        )
    return _encoder.encode((VERSION, tag, run, role, instance, time.time_ns(), 0, message))


def decode(data: bytes, head: bytes = b"") -> tuple[Envelope, messages.Message]:
    """Return the envelope and the message.

    ``head`` are the headers under which a stream delivered it. The server sends an answer to any subject that
    the asker names, and a stream stores it, though the asker may not write into that stream; an answer still
    names the stream that it was read from.

    Raises UnknownKind for a whole frame of a kind that is not registered, else Undecodable, and nothing else,
    on any bytes; also Undecodable for a message that was copied into its stream.
    """
    if head and (origin := read_headers(head).get(_ORIGIN)) is not None:
        raise Undecodable(f"copied from stream {origin}, not published")
    try:
        frame = _frames.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Undecodable(f"no frame: {error}") from error
    if frame.v != VERSION:
        raise Undecodable(f"envelope version {frame.v}, this build reads {VERSION}", kind=frame.kind)
    known = base.class_of(frame.kind)
    if known is None:
        raise UnknownKind(frame.kind)
    try:
        return frame.envelope, _body_decoder(known).decode(frame.body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Undecodable(str(error), kind=frame.kind) from error
