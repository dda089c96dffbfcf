"""Limits of the pool; the ``[sandbox]`` table of a recipe."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class SandboxSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits. Times in seconds, sizes as named.

    ``allow_unsafe`` runs programs on a host without a filter of system calls, too. ``zygotes`` 0 takes one
    per two cores; ``preload`` names packages that are imported once, before programs run. ``max_live`` 0
    derives the number of live instances from memory, descriptors and process limits. ``cpu_call_seconds``,
    ``cpu_load_seconds`` and ``cpu_life_seconds`` bound the CPU time of one call, of loading a program and of
    all calls of a process; ``wall_call_seconds`` is the wall time after which a sleeping program is killed,
    ``wall_hard_seconds`` the one after which any is.

    ``queue`` spawns may wait, each for ``queue_seconds``. A zygote gets ``start_seconds`` to start and
    ``spawn_seconds`` to fork or reap. Instances without a call for ``idle_seconds`` are closed; a program
    that was killed ``strikes`` times is not started again (0: no limit). Below ``low_memory_share`` of free
    memory no instance starts, and the largest are ended.
    """

    allow_unsafe: bool = False
    zygotes: Annotated[int, Meta(ge=0)] = 0
    preload: tuple[str, ...] = ("numpy",)
    memory_mb: Annotated[int, Meta(ge=1)] = 256
    cpu_call_seconds: Annotated[float, Meta(gt=0)] = 2.0
    cpu_load_seconds: Annotated[float, Meta(gt=0)] = 5.0
    wall_call_seconds: Annotated[float, Meta(gt=0)] = 10.0
    cpu_life_seconds: Annotated[int, Meta(ge=1)] = 30
    max_live: Annotated[int, Meta(ge=0)] = 0

    wall_hard_seconds: float = 300.0
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
