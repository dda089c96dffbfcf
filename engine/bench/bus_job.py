"""What passes between the measuring process and the sides of a case. Nothing heavy is imported here."""

from __future__ import annotations

from typing import Any

import msgspec


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One side of one case, as its process receives it.

    ``side`` is ``produce``, ``consume`` or ``latency`` (one message at a time, its acceptance timed).
    ``rate`` 0 sends as fast as possible, else so many messages a second. ``where`` is the transport's.
    """

    transport: str
    side: str
    size: int
    seconds: float
    rate: float = 0.0
    cores: tuple[int, ...] = ()
    where: dict[str, Any] = {}


class Outcome(msgspec.Struct, kw_only=True):
    """What one side saw. Times are of the system's monotonic clock, ``cpu`` is CPU seconds of its process
    between them, ``milliseconds`` are latencies.
    """

    messages: int = 0
    bytes: int = 0
    first: float = 0.0
    last: float = 0.0
    cpu: float = 0.0
    frame: int = 0
    lost: int = 0
    duplicates: int = 0
    milliseconds: list[float] = []
