"""Whether the stream of samples gets full before a checkpoint makes room in it."""

from __future__ import annotations

from typing import NamedTuple

from bus import Bus

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


async def tight(bus: Bus) -> Tight | None:
    """Return the stream of samples when it has passed its share, None before.

    Only a checkpoint lets samples go. When the stream is full no round can be closed in it, so a learner that
    waited for its next checkpoint to become due would wait without end.
    """
    info = await bus.stream_info("SAMPLE")
    return Tight("SAMPLE", info.bytes, info.bound) if info.bound and info.bytes > SHARE * info.bound else None
