"""Reading the stored messages of a stream as they are, also those that nobody can decode.

Nothing is consumed, acknowledged or moved to the dead letters by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import anyio

from bus import BusError, NatsBus, NotFound, reads
from bus.interface import check_tails
from bus.messages import Message, registered
from bus.reads import Stored
from bus.subjects import STREAMS, stream_of
from engine.busview.show import View, view
from engine.errors import ConfigError

POLL_SECONDS = 0.25
_BLOCK = 512


@dataclass(frozen=True)
class Filter:
    """What is read of ``stream``: subject ``tails`` (empty: all) and a ``kind`` (empty: any)."""

    stream: str
    tails: tuple[str, ...] = ()
    kind: str = ""

    def admits(self, seen: View) -> bool:
        """Whether a message that lies in ``tails`` is also of the wanted kind."""
        return not self.kind or seen.is_kind(self.kind)


def choose(stream: str, tails: Sequence[str], kind: str) -> Filter:
    """Return the filter for what a person asked for; ``stream`` empty is told from tails and kind.

    Raises ConfigError for an unknown stream or kind, and for tails that make no sense.
    """
    try:
        return _choose(stream, tails, kind)
    except BusError as error:
        raise ConfigError(f"{error.what}.", remedy=error.remedy) from error


def _choose(stream: str, tails: Sequence[str], kind: str) -> Filter:
    stems = {tag.partition(".")[0]: message for tag, message in registered().items()} | registered()
    if kind and kind not in stems:
        stored = sorted(name for name, message in stems.items() if message.stream and "." not in name)
        raise ConfigError(f"There is no kind {kind!r} of message.", remedy=f"Kinds: {', '.join(stored)}.")
    if kind and not stems[kind].stream:
        raise ConfigError(f"Messages of kind {kind} are sent once and not stored.")
    wanted = stream.upper()
    if not wanted:
        wanted = stream_of(tails[0]) if tails else stems[kind].stream if kind else "EVENT"
    if wanted not in STREAMS:
        raise ConfigError(f"There is no stream {stream or kind!r}.", remedy=f"Streams: {', '.join(STREAMS)}.")
    for tail in tails:
        if stream_of(tail) != wanted:
            raise ConfigError(f"{tail} lies in stream {stream_of(tail)}, not in {wanted}.")
    shared = shared_tail(stems[kind]) if kind and not tails else None
    return Filter(wanted, tuple(check_tails(tails or None)) or ((shared,) if shared else ()), kind)


def shared_tail(kind: type[Message]) -> str | None:
    """Return the tail that all messages of a kind have, None when it depends on what they say."""
    try:
        tail = vars(kind)["tail"].fget(None)
    except AttributeError:
        return None
    return str(tail)


async def between(bus: NatsBus, wanted: Filter, first: int, last: int) -> AsyncIterator[tuple[Stored, View]]:
    """Yield what ``wanted`` admits of the sequences ``first`` .. ``last``, in order."""
    found = reads.raw(bus.connection, bus.names, wanted.stream, start=first, tails=wanted.tails, last=last)
    async for stored in found:
        seen = view(wanted.stream, stored)
        if wanted.admits(seen):
            yield stored, seen


async def newest(bus: NatsBus, wanted: Filter, count: int) -> tuple[list[View], int]:
    """Return the last ``count`` messages that ``wanted`` admits, oldest first, and the end of the stream.

    Looks back in blocks that grow, so a rare kind in a long stream costs one pass over it.
    """
    info = await bus.stream_info(wanted.stream)
    found: deque[View] = deque()
    block, stop = max(_BLOCK, 2 * count), info.last
    while len(found) < count and stop >= info.first:
        start = max(info.first, stop - block + 1)
        kept: deque[View] = deque(maxlen=count - len(found))
        async for _, seen in between(bus, wanted, start, stop):
            kept.append(seen)
        found.extendleft(reversed(kept))
        stop, block = start - 1, 2 * block
    return list(found), info.last


async def following(bus: NatsBus, wanted: Filter, after: int) -> AsyncIterator[View]:
    """Yield what comes behind sequence ``after``, for ever; looks four times a second.

    No consumer is made for it, so a work queue can be watched too; what is taken from it between two
    looks is not seen. Raises BusUnavailable when the server stays away.
    """
    while True:
        last = (await bus.stream_info(wanted.stream)).last
        if last > after:
            async for _, seen in between(bus, wanted, after + 1, last):
                yield seen
            after = last
        else:
            await anyio.sleep(POLL_SECONDS)


async def sequence_at(bus: NatsBus, stream: str, at: float) -> int:
    """Return the first sequence stored at ``at`` (seconds since the epoch) or later; last + 1 if none."""
    answer = await reads.direct(
        bus.connection,
        bus.names.stream(stream),
        {"start_time": datetime.fromtimestamp(max(at, 0.0), UTC).isoformat()},
        f"first message of {stream} since then",
    )
    if answer is None:
        return (await bus.stream_info(stream)).last + 1
    return reads.stored_of(bus.names, answer).sequence


async def one(bus: NatsBus, stream: str, sequence: int) -> Stored:
    """Return one stored message. Raises NotFound."""
    found = reads.raw(bus.connection, bus.names, stream, start=sequence, tails=(), last=sequence)
    async for stored in found:
        return stored
    raise NotFound(f"no message {sequence} in {stream}")
