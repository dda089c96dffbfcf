"""Whether the stream of samples gets full before a checkpoint makes room in it."""

from __future__ import annotations

from typing import NamedTuple

from bus import Bus, Record
from bus.subjects import STREAMS

SHARE = 0.5
"""From here on each round is followed by a checkpoint: two of them make room, and a round has to fit beside
what they still need."""
NEEDED = 2
"""How many checkpoints may hold on to samples in a stream that gets full."""


class Tight(NamedTuple):
    """A stream that gets full: the ``bytes`` in it, of at most ``bound``."""

    stream: str
    bytes: int
    bound: int


class Room:
    """Looks at the bounds of the stream of samples, and of the one where their large bodies lie.

    Only a checkpoint lets samples go. When the stream is full no round can be closed in it, so a learner
    that waited for its next checkpoint to become due would wait for ever.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._beside = False

    def saw(self, record: Record) -> None:
        """Take note of a sample: whether it has its body beside it."""
        self._beside |= record.blob > 0

    async def tight(self) -> Tight | None:
        """Return a stream that has passed its share and that a checkpoint makes room in, None without one."""
        bodies = STREAMS["SAMPLE"].bodies
        for stream in ("SAMPLE", bodies) if self._beside and bodies else ("SAMPLE",):
            info = await self._bus.stream_info(stream)
            if info.bound and info.bytes > SHARE * info.bound:
                return Tight(stream, info.bytes, info.bound)
        return None
