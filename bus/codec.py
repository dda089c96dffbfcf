"""Frames: a small envelope that anybody can read, and a body that only its kind can.

Wire form: one msgpack array ``[v, kind, id, run, role, instance, ts, attempt, body]``. ``body`` is the
message as a msgpack map. Fields may be appended after ``body``; readers ignore what they do not know.
``v`` changes only when a reader must not guess.
"""

from __future__ import annotations

import time
import typing

import msgspec

from bus import messages
from bus.errors import Undecodable

VERSION = 1


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """Who said it and when. ``ts`` is the wall clock in ns at creation, ``attempt`` the producer's
    attempt (0 when it does not count), ``id`` the message's deterministic key."""

    v: int
    kind: str
    id: str
    run: str
    role: str
    instance: str
    ts: int
    attempt: int


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """An envelope and its body, flat in one array."""

    v: int
    kind: str
    id: str
    run: str
    role: str
    instance: str
    ts: int
    attempt: int
    body: msgspec.Raw

    @property
    def envelope(self) -> Envelope:
        """Return the part before the body."""
        return Envelope(self.v, self.kind, self.id, self.run, self.role, self.instance, self.ts, self.attempt)


def _kinds() -> dict[str, type[messages.Message]]:
    return {str(kind.__struct_config__.tag): kind for kind in typing.get_args(messages.AnyMessage)}


KINDS: dict[str, type[messages.Message]] = _kinds()
_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(Frame)
_bodies: dict[str, msgspec.msgpack.Decoder[messages.Message]] = {
    tag: msgspec.msgpack.Decoder(kind) for tag, kind in KINDS.items()
}


def kind_of(message: messages.Message) -> str:
    """Return the wire tag of a message, for example ``episode_finished.v1``."""
    return str(message.__struct_config__.tag)


def encode(
    message: messages.Message, *, run: str, role: str, instance: str, ts: int | None = None, attempt: int = 0
) -> bytes:
    """Return the frame of ``message``. ``ts`` (ns) defaults to the wall clock."""
    body = msgspec.Raw(_encoder.encode(message))
    stamp = time.time_ns() if ts is None else ts
    return _encoder.encode(
        Frame(VERSION, kind_of(message), message.key, run, role, instance, stamp, attempt, body)
    )


def decode(data: bytes) -> tuple[Envelope, messages.Message]:
    """Return the envelope and the message. Raises Undecodable, and nothing else, on any bytes."""
    try:
        frame = _frames.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Undecodable(f"no frame: {error}") from error
    if frame.v != VERSION:
        raise Undecodable(f"envelope version {frame.v}, this build reads {VERSION}", kind=frame.kind)
    decoder = _bodies.get(frame.kind)
    if decoder is None:
        raise Undecodable("unknown kind or version", kind=frame.kind)
    try:
        return frame.envelope, decoder.decode(frame.body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Undecodable(str(error), kind=frame.kind) from error
