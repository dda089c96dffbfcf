"""Limits of the pool; the ``[sandbox]`` table of a recipe."""

from __future__ import annotations

import msgspec

from sandbox.frames import Bounds


class SandboxSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Walls and limits. Times in seconds, sizes as named.

    ``min_level`` 1 closes files and network, 2 does it by seccomp, 3 adds a second wall around files, 4
    namespaces; a host that does less is refused. ``zygotes`` 0 takes one per two cores; ``preload`` names
    packages that are imported once, before programs run. ``max_live`` 0 derives the number of live instances
    from memory, descriptors and process limits. ``cpu_call_seconds``, ``cpu_load_seconds`` and
    ``cpu_life_seconds`` bound the CPU time of one call, of loading a program and of all calls of a process;
    ``wall_call_seconds`` is the wall time after which a sleeping program is killed, ``wall_hard_seconds`` the
    one after which any is.

    ``in_flight`` bounds the calls that run at a time (0: four per core); ``queue`` spawns may wait, each for
    ``queue_seconds``. A zygote gets ``start_seconds`` to start and ``spawn_seconds`` to fork or reap.
    Instances without a call for ``idle_seconds`` are closed; a program that was killed ``strikes`` times is
    not started again (0: no limit). Below ``low_memory_share`` of free memory no instance starts, and the
    largest are ended.
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

    @property
    def bounds(self) -> Bounds:
        """The bounds of one reply, which both the runner and the engine keep."""
        return Bounds(
            reply=self.max_reply_bytes,
            observation=self.max_observation_bytes,
            output=self.max_output_bytes,
        )
