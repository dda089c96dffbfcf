"""Messages between engine and instance and between engine and zygote, on the engine's side. Pure.

Frames to and from an instance are ``u32 little endian length | UTF-8 JSON``. Replies are decoded by
typed Structs, which refuse NaN, infinities, lone surrogates, booleans for numbers and unknown fields in
microseconds. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from sandbox.settings import SandboxSettings

_PREFIX = 4
# Limits that the runner keeps; a forged frame must keep them too.
MAX_ERROR = (100, 1000, 2000, 16)  # type, message, traceback, phase
MAX_CLASS, MAX_CALLS, MAX_TURNS, MAX_REWARD = 128, 16, 1 << 31, 10.0


class Malformed(ValueError):
    """Bytes from an instance that are not the one reply expected."""


class ProgramInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of a loaded program.

    Its class name, its ``max_turns``, the methods that may be called, true for a tool environment, and its
    declaration as JSON ("" for none).
    """

    cls: str
    turns: int | None
    calls: tuple[str, ...]
    tools: bool = False
    meta: str = ""


class RunnerReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One answer; ``err`` is (type, message, traceback, phase), ``p`` a StepResult's ``instructions``."""

    i: int
    o: str = ""
    r: float = 0.0
    te: bool = False
    tr: bool = False
    err: tuple[str, str, str, str] | None = None
    out: str = ""
    p: tuple[int, int] | None = None
    m: ProgramInfo | None = None


class StepResult(msgspec.Struct, frozen=True):
    """One step of an environment. ``reward`` is finite and in [-10, 10]; nobody reads its ``info``.

    ``instructions`` of a tool environment are the number of those that are done, and of all.
    """

    observation: str
    reward: float
    terminated: bool
    truncated: bool
    instructions: tuple[int, int] | None = None

    @property
    def done(self) -> bool:
        """True when the episode is over."""
        return self.terminated or self.truncated


_encoder = msgspec.json.Encoder()
_replies = msgspec.json.Decoder(RunnerReply)


def pack(message: object) -> bytes:
    """Return ``message`` as one frame."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_PREFIX, "little") + body


def cut(buffer: bytearray, limit: int) -> bytes | None:
    """Remove and return the first complete frame of ``buffer``, None while it is incomplete.

    Raises Malformed when a frame announces more than ``limit`` bytes.
    """
    if len(buffer) < _PREFIX:
        return None
    size = int.from_bytes(buffer[:_PREFIX], "little")
    if size > limit:
        raise Malformed(f"a frame of {size} bytes, at most {limit} are allowed")
    if len(buffer) < _PREFIX + size:
        return None
    body = bytes(buffer[_PREFIX : _PREFIX + size])
    del buffer[: _PREFIX + size]
    return body


def read_reply(body: bytes, expected: int, limits: SandboxSettings) -> RunnerReply:
    """Decode the answer to request ``expected``. Raises Malformed for anything else."""
    try:
        reply = _replies.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not a reply: {str(error)[:200]}") from None
    if reply.i != expected:
        raise Malformed(f"answer to request {reply.i}, expected {expected}")
    if not math.isfinite(reply.r) or abs(reply.r) > MAX_REWARD:
        raise Malformed("reward outside its range")
    # a byte is at most one character, so the child's cut in bytes bounds the characters too
    if len(reply.o) > limits.max_observation_bytes or len(reply.out) > limits.max_output_bytes:
        raise Malformed("text longer than agreed")
    if reply.err is not None and any(map(lambda part, most: len(part) > most, reply.err, MAX_ERROR)):
        raise Malformed("error longer than agreed")
    if reply.p is not None and not 0 <= reply.p[0] <= reply.p[1] <= MAX_CALLS:
        raise Malformed("instructions out of range")
    about = reply.m
    if about is not None and (len(about.cls) > MAX_CLASS or len(about.calls) > MAX_CALLS):
        raise Malformed("a program description larger than agreed")
    if about is not None and not 0 <= (about.turns or 0) < MAX_TURNS:
        raise Malformed("a number of turns out of range")
    return reply


def read_value(text: str) -> Any:
    """Decode the JSON value returned by a call. Raises Malformed."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Malformed(f"not a value: {str(error)[:200]}") from None


class ZygoteReady(msgspec.Struct, frozen=True, tag_field="op", tag="ready"):
    """Report of a zygote that can fork; ``canary`` ran behind all walls, ``bare`` behind all but seccomp."""

    walls: dict[str, str]
    uid_mode: str
    kernel: str
    canary: dict[str, str]
    bare: dict[str, str]


class ZygoteFailed(msgspec.Struct, frozen=True, tag_field="op", tag="failed"):
    """A zygote could not start."""

    reason: str


class ChildSpawned(msgspec.Struct, frozen=True, tag_field="op", tag="spawned"):
    """A child was forked; its pidfd travels with the message."""

    id: int


class ChildRefused(msgspec.Struct, frozen=True, tag_field="op", tag="refused"):
    """A child could not be forked."""

    id: int
    reason: str


class ChildExited(msgspec.Struct, frozen=True, tag_field="op", tag="exit"):
    """A child was reaped: raw wait ``status`` and ``cpu`` seconds."""

    id: int
    status: int
    cpu: float


ZygoteMessage = ZygoteReady | ZygoteFailed | ChildSpawned | ChildRefused | ChildExited
_zygote_messages: msgspec.json.Decoder[ZygoteMessage] = msgspec.json.Decoder(ZygoteMessage)


def read_zygote_message(data: bytes) -> ZygoteMessage:
    """Decode a datagram of a zygote. Raises msgspec.DecodeError."""
    return _zygote_messages.decode(data)
