"""The number of episodes that an agent holds: a pure state machine, without a clock.

An agent leases enough episodes to keep the servers full and no more: one that waits here could be played by
another agent. The number follows from what servers and sandbox have room for now (feed-forward), under a
limit that grows by a constant per round trip and halves on congestion
(:class:`engine.inference.concurrency.Aimd`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from engine.inference.concurrency import Aimd

_AHEAD_SHARE, _AHEAD_LEAST = 1 / 4, 2
_SMOOTHING = 0.2
_PATIENCE = 8
_NONE = 1
_ROUND_TRIPS = 32.0  # from nothing back to the whole


class LoadSnapshot(NamedTuple):
    """The load of an agent's dependencies.

    ``servers`` is how many requests the serving servers take at once, ``waiting`` how many of this agent wait
    for a place there (it could not shorten the queue of others). ``cuts`` and ``missed`` count since the
    start: limits cut because a server preempted, queued or stood still, and missed deadlines. ``sandbox`` is
    how many instances the sandbox has for this agent, those that it holds included.
    """

    servers: int
    waiting: int
    cuts: int
    missed: int
    sandbox: int

    @classmethod
    def of(
        cls, pool: Mapping[str, float], sandbox: Mapping[str, float], *, waiting: int, missed: int, held: int
    ) -> LoadSnapshot:
        """Return the load by the ``statistics()`` of the inference pool and of the sandbox.

        ``held`` episodes are played, ``waiting`` of them wait for a server.
        """
        known = max(1.0, pool.get("servers", 0.0))
        others = max(0.0, sandbox.get("live", 0.0) + sandbox.get("waiting", 0.0) - held)
        return cls(
            servers=int(pool.get("limit", 0.0) * pool.get("serving", 0.0) / known),
            waiting=waiting,
            cuts=int(pool.get("limit_cuts", 0.0)),
            missed=missed,
            sandbox=int(max(0.0, sandbox["max_live"] - others)),
        )


class EpisodeLimit:
    """``limit`` is how many episodes may be in hand, from 1 to ``most``; any thread may read it.

    It is a little more than the servers take, so that the next episode has its instance and its prompt when a
    place gets free, and as many more as are in a step of their program on average. Without a serving server
    it is 1.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._growth = Aimd(most, floor=min(8, most), increase=max(1.0, most / _ROUND_TRIPS))
        self._away = 0.0
        self._crowded = 0
        self._cuts = self._missed = 0
        self.limit = _NONE

    @property
    def cuts(self) -> int:
        """Number of times that the limit was halved."""
        return self._growth.cuts

    def look(self, load: LoadSnapshot, *, held: int, away: int, ended: int) -> int:
        """Take in the load, ``ended`` requests after the last look; return the new limit.

        ``held`` episodes are in hand, ``away`` of them in a step of their program.
        """
        for _ in range(min(ended, 2 * self._most)):
            self._growth.ended(in_flight=held, success=True)
        if self._congested(load):
            self._growth.congested(in_flight=held)
        self._away += _SMOOTHING * (min(away, load.servers) - self._away)
        self.limit = max(_NONE, min(self._most, self._growth.limit, load.sandbox, self._room(load)))
        return self.limit

    def _room(self, load: LoadSnapshot) -> int:
        if load.servers <= 0:
            return _NONE
        ahead = max(_AHEAD_LEAST, math.ceil(load.servers * _AHEAD_SHARE))
        return load.servers + ahead + min(round(self._away), load.servers)

    def _congested(self, load: LoadSnapshot) -> bool:
        """Return whether a server had to be relieved, a deadline was missed, or a long queue does not end.

        False while no server serves.
        """
        relieved = load.cuts > self._cuts or load.missed > self._missed
        self._cuts, self._missed = load.cuts, load.missed
        self._crowded = self._crowded + 1 if load.servers and 2 * load.waiting > load.servers else 0
        if self._crowded >= _PATIENCE:
            self._crowded = 0
            return True
        return relieved and load.servers > 0
