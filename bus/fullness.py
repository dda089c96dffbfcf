"""Telling a person that a stream is full, which one, and what to do."""

from __future__ import annotations

import logging
import math
from time import monotonic

from bus.subjects import BUCKETS, STREAMS

log = logging.getLogger("spade.bus")
_SECONDS = 60.0


class Fullness:
    """Warns when a stream (server's name) takes no more, at most once a minute for each."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def tell(self, stream: str, why: str) -> None:
        """Warn that ``stream`` refused a message, which waits; ``why`` are the server's words."""
        now = monotonic()
        if now - self._said.get(stream, -math.inf) < _SECONDS:
            return
        self._said[stream] = now
        log.warning(
            "stream %s is full (%s; its part is %g %% of bus.store_gb): what is published there waits. %s",
            stream,
            why,
            100 * _share(stream),
            remedy(stream),
        )


def remedy(stream: str) -> str:
    """Return what to do about a full stream."""
    known = STREAMS.get(stream.split("_", 1)[0])
    return (known and known.hint) or "Raise bus.store_gb."


def _share(stream: str) -> float:
    known = STREAMS.get(stream.split("_", 1)[0]) or BUCKETS.get(stream.rsplit("_", 1)[-1])
    return known.share if known is not None else math.nan
