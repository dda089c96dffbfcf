"""Stored messages of a stream, also those that cannot be decoded. Reading consumes nothing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import anyio
import msgspec

from bus import Bus, BusError, codec, reads
from bus.errors import Undecodable
from bus.messages import registered
from bus.reads import Stored
from bus.subjects import STREAMS, stream_of
from engine.errors import ConfigError
from engine.lineage import Version
from engine.text import clean, shorten

_POLL_SECONDS = 0.25
_BLOCK = 512
_TEXT = 100


@dataclass(frozen=True)
class StreamSelection:
    """Messages of ``stream``: with subject ``tails`` (empty: all) and of one ``kind`` (empty: any)."""

    stream: str
    tails: tuple[str, ...] = ()
    kind: str = ""

    @classmethod
    def of(cls, stream: str, tails: Sequence[str], kind: str) -> StreamSelection:
        """Check a selection; an empty ``stream`` follows from the tails or the kind, else it is EVENT.

        Raises ConfigError for an unknown stream or kind, and for subjects that no message of a stream has.
        """
        kinds = {tag.partition(".")[0]: message for tag, message in registered().items()}
        if kind and kind not in kinds:
            stored = sorted(name for name, message in kinds.items() if message.stream)
            raise ConfigError(f"There is no kind {kind!r} of message.", remedy=f"Kinds: {', '.join(stored)}.")
        if kind and not kinds[kind].stream:
            raise ConfigError(f"Messages of kind {kind} are not stored.", remedy="Name another kind.")
        try:
            homes = {stream_of(tail) for tail in tails}
        except BusError as error:
            raise ConfigError(f"{error.what}.", remedy=error.remedy) from error
        wanted = stream.upper() or next(iter(homes), kinds[kind].stream if kind else "EVENT")
        if wanted not in STREAMS:
            raise ConfigError(f"There is no stream {stream!r}.", remedy=f"Streams: {', '.join(STREAMS)}.")
        if homes - {wanted}:
            raise ConfigError(
                f"{', '.join(tails)} does not lie in stream {wanted} alone.", remedy="Name one stream."
            )
        return cls(wanted, tuple(tails), kind)


class DecodedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A stored message, decoded without its type.

    ``error`` says why its type cannot be used; ``body`` is None when nothing can be read. ``time`` is the
    author's, or of the storage, in seconds since the epoch.
    """

    stream: str
    sequence: int
    tail: str
    id: str
    time: float
    kind: str
    sender: str
    size: int
    body: dict[str, Any] | None
    error: str | None

    def record(self) -> dict[str, Any]:
        """Return the message as JSON types; bytes become ``{"bytes": n}``."""
        moment = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="milliseconds")
        return {**_json(msgspec.structs.asdict(self)), "time": moment}

    def line(self) -> str:
        """Return the message on one line: time, place, sender, kind, fields."""
        moment = time.strftime("%m-%d %H:%M:%S", time.localtime(self.time))
        head = [moment, f"{self.stream} {self.sequence}", self.sender or "?", self.kind or self.tail]
        if self.error is not None:
            head.append(f"UNREADABLE ({shorten(self.error, _TEXT)}), {self.size} bytes")
        fields = [f"{name}={_short(name, value)}" for name, value in (self.body or {}).items()]
        return clean("  ".join([*head, *(field for field in fields if not field.endswith("="))]))


def decode(stream: str, stored: Stored) -> DecodedMessage:
    """Decode a stored message as far as possible; never fails."""
    error = envelope = body = None
    name = stored.id
    try:
        name = codec.decode(stored.frame)[1].key
    except Undecodable as refused:
        error = refused.reason
    try:
        frame = msgspec.msgpack.decode(stored.frame, type=codec.Frame)
        envelope = frame.envelope
        body = msgspec.msgpack.decode(frame.body, type=dict[str, Any])
        body.pop("kind", None)
    except (msgspec.DecodeError, ValueError, RecursionError):
        pass
    return DecodedMessage(
        stream=stream,
        sequence=stored.sequence,
        tail=stored.tail,
        id=name,
        time=envelope.ts / 1e9 if envelope else stored.at,
        kind=envelope.kind if envelope else "",
        sender=f"{envelope.role}/{envelope.instance}" if envelope else "",
        size=len(stored.frame),
        body=body,
        error=error,
    )


async def between(
    bus: Bus, wanted: StreamSelection, first: int, last: int
) -> AsyncIterator[tuple[Stored, DecodedMessage]]:
    """Yield the selected messages of the sequences ``first`` .. ``last``, in order."""
    found = reads.between(
        bus.connection, bus.names, wanted.stream, start=first, last=last, tails=wanted.tails
    )
    async for stored in found:
        message = decode(wanted.stream, stored)
        if not wanted.kind or message.kind.partition(".")[0] == wanted.kind:
            yield stored, message


async def newest(bus: Bus, wanted: StreamSelection, count: int) -> tuple[list[DecodedMessage], int]:
    """Return the last ``count`` selected messages, oldest first, and the last sequence of the stream.

    Reads backwards in growing blocks, so a rare kind in a long stream costs one pass over it.
    """
    info = await bus.stream_info(wanted.stream)
    found: deque[DecodedMessage] = deque()
    block, stop = max(_BLOCK, 2 * count), info.last
    while len(found) < count and stop >= info.first:
        start = max(info.first, stop - block + 1)
        kept: deque[DecodedMessage] = deque(maxlen=count - len(found))
        async for _, message in between(bus, wanted, start, stop):
            kept.append(message)
        found.extendleft(reversed(kept))
        stop, block = start - 1, 2 * block
    return list(found), info.last


async def following(bus: Bus, wanted: StreamSelection, after: int) -> AsyncIterator[DecodedMessage]:
    """Yield selected messages behind sequence ``after`` until cancelled, by polling.

    No consumer is created, so a work queue can be watched; a task that is stored and acknowledged between
    two polls is not seen. Raises BusUnavailable when the broker stays away.
    """
    while True:
        last = (await bus.stream_info(wanted.stream)).last
        async for _, message in between(bus, wanted, after + 1, last):
            yield message
        after = max(after, last)
        await anyio.sleep(_POLL_SECONDS)


def _short(name: str, value: Any) -> str:
    if name in ("version", "version_high") and isinstance(value, int) and value >= 0:
        return str(Version.unpack(value))
    if isinstance(value, bytes | list):
        return f"[{len(value)}]"
    return "" if value is None else shorten(str(value), _TEXT)


def _json(value: Any) -> Any:
    match value:
        case bytes():
            return {"bytes": len(value)}
        case dict():
            return {str(key): _json(item) for key, item in value.items()}
        case list():
            return [_json(item) for item in value]
        case None | bool() | int() | float() | str():
            return value
    return str(value)
