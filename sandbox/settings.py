"""Limits of the pool. The first ten fields carry the names of the recipe's ``[sandbox]`` table."""

from __future__ import annotations

import msgspec


class SandboxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Walls and limits (reference spec sandbox 6.4 and 6.7). Times in seconds, sizes as named.

    ``zygotes`` 0 takes one for two cores; ``max_live`` 0 derives the number of live instances from
    memory, descriptors and process limits. ``cpu_call_seconds`` is CPU time of one call,
    ``wall_call_seconds`` the wall time after which a sleeping program is killed and
    ``wall_hard_seconds`` the one after which any is. ``in_flight`` 0 allows four calls a core.
    """

    min_level: int = 2
    allow_unsafe: bool = False
    zygotes: int = 0
    preload: tuple[str, ...] = ("numpy",)
    memory_mb: int = 256
    cpu_call_seconds: float = 2.0
    cpu_load_seconds: float = 5.0
    wall_call_seconds: float = 10.0
    cpu_life_seconds: int = 30
    max_live: int = 0

    wall_hard_seconds: float = 30.0
    in_flight: int = 0
    queue: int = 4096
    queue_seconds: float = 120.0
    spawn_seconds: float = 20.0
    start_seconds: float = 60.0
    idle_seconds: float = 900.0
    strikes: int = 2
    nice: int = 10
    max_action_bytes: int = 64 << 10
    max_source_bytes: int = 128 << 10
    max_reply_bytes: int = 256 << 10
    max_observation_bytes: int = 64 << 10
    max_output_bytes: int = 16 << 10
    low_memory_share: float = 0.1
