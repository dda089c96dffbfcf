"""Frames: a small envelope that anybody can read, and a body that only its kind can.

Wire form: one msgpack array ``[v, kind, id, run, role, instance, ts, attempt, body]``. ``body`` is the
message as a msgpack map. Fields may be appended after ``body``; readers ignore what they do not know.
``v`` changes only when a reader must not guess.

A body that is too large to travel lies in a stream of pieces. Its frame has ``body`` nil and one field more,
the reference ``[id, size, sha256, chunk, stream]``; :func:`decode` gives a :class:`Claim` for it.
"""

from __future__ import annotations

import functools
import re
import time
from typing import ClassVar

import msgspec

from bus import messages
from bus.errors import BusError, Undecodable, UnknownKind
from bus.messages import base
from bus.subjects import PIECES

VERSION = 1
_FIRST_STORE = "BLOB"


class Envelope(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Who said it and when. ``ts`` is the wall clock in ns at creation, ``attempt`` the producer's
    attempt (0 when it does not count), ``id`` the message's deterministic key.
    """

    v: int
    kind: str
    id: str
    run: str
    role: str
    instance: str
    ts: int
    attempt: int


class BlobRef(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that lie in the stream ``where``: ``size`` bytes in pieces of ``chunk``, ``sha256`` (32 bytes)
    over all of them. Older builds put all of them into BLOB and do not say so.
    """

    id: str
    size: int
    sha256: bytes
    chunk: int
    where: str = _FIRST_STORE

    @property
    def count(self) -> int:
        """Return the number of pieces; an empty blob has none."""
        return -(-self.size // self.chunk)


class Claim(messages.Message, frozen=True, kw_only=True, tag="claim"):
    """Stands for a message whose body lies elsewhere, until it is fetched. Never leaves this package."""

    stream: ClassVar[str] = ""
    envelope: Envelope
    ref: BlobRef

    @property
    def key(self) -> str:
        return self.envelope.id


class Frame(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An envelope and its body, flat in one array; ``blob`` says where the body is if it is nil."""

    v: int
    kind: str
    id: str
    run: str
    role: str
    instance: str
    ts: int
    attempt: int
    body: msgspec.Raw
    blob: BlobRef | None = None

    @property
    def envelope(self) -> Envelope:
        """Return the part before the body."""
        return Envelope(self.v, self.kind, self.id, self.run, self.role, self.instance, self.ts, self.attempt)


_NAME = re.compile("[A-Za-z0-9_-]{1,64}")
_encoder = msgspec.msgpack.Encoder()
_frames = msgspec.msgpack.Decoder(Frame)


def kind_of(message: messages.Message) -> str:
    """Return the wire tag of a message, for example ``episode_finished.v1``. Raises BusError when its class
    is not registered: no reader could decode it.
    """
    kind = type(message)
    tag = base.kind_of(kind)
    if base.class_of(tag) is not kind:
        raise BusError(
            f"message class {kind.__module__}.{kind.__qualname__} is not registered",
            remedy="Decorate it with bus.messages.register_message.",
        )
    return tag


@functools.cache
def _body_decoder(kind: type[messages.Message]) -> msgspec.msgpack.Decoder[messages.Message]:
    return msgspec.msgpack.Decoder(kind)


def encode(
    message: messages.Message, *, run: str, role: str, instance: str, ts: int | None = None, attempt: int = 0
) -> bytes:
    """Return the frame of ``message``. ``ts`` (ns) defaults to the wall clock."""
    if isinstance(message, Claim):
        return encode_claim(message.envelope, message.ref)
    stamp = time.time_ns() if ts is None else ts
    return _encoder.encode(
        (VERSION, kind_of(message), message.key, run, role, instance, stamp, attempt, message)
    )


def encode_body(message: messages.Message) -> bytes:
    """Return what a frame of ``message`` holds as its body."""
    return _encoder.encode(message)


def encode_claim(envelope: Envelope, ref: BlobRef) -> bytes:
    """Return the frame of a message whose body lies in the blob ``ref``."""
    where = msgspec.structs.astuple(ref)
    told = where if ref.where != _FIRST_STORE else where[:-1]
    return _encoder.encode((*msgspec.structs.astuple(envelope), None, told))


def decode(data: bytes) -> tuple[Envelope, messages.Message]:
    """Return the envelope and the message, or its :class:`Claim`.

    Raises Undecodable, and nothing else, on any bytes.
    """
    try:
        frame = _frames.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Undecodable(f"no frame: {error}") from error
    if frame.v != VERSION:
        raise Undecodable(f"envelope version {frame.v}, this build reads {VERSION}", kind=frame.kind)
    if base.class_of(frame.kind) is None:
        raise UnknownKind(frame.kind)
    if frame.blob is None:
        return frame.envelope, decode_body(frame.kind, frame.body)
    if not _NAME.fullmatch(frame.blob.id) or len(frame.blob.sha256) != 32:
        raise Undecodable("its body lies nowhere: the reference makes no sense", kind=frame.kind)
    if frame.blob.chunk < 1 or frame.blob.size < 0:
        raise Undecodable("the sizes of its reference make no sense", kind=frame.kind)
    if frame.blob.where not in PIECES:
        raise Undecodable(f"its body lies in a stream {frame.blob.where!r}", kind=frame.kind)
    return frame.envelope, Claim(envelope=frame.envelope, ref=frame.blob)


def decode_body(kind: str, body: bytes | msgspec.Raw) -> messages.Message:
    """Return the message of ``kind`` that ``body`` holds. Raises Undecodable."""
    known = base.class_of(kind)
    if known is None:
        raise UnknownKind(kind)
    try:
        return _body_decoder(known).decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Undecodable(str(error), kind=kind) from error


def envelope_of(frame: bytes) -> Envelope:
    """Return the envelope of a frame that this build wrote."""
    return _frames.decode(frame).envelope


def claim_in(frame: bytes) -> BlobRef | None:
    """Return the reference in a frame, None when it has none or is no frame."""
    try:
        _, message = decode(frame)
    except Undecodable:
        return None
    return message.ref if isinstance(message, Claim) else None
