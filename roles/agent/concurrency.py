"""How many episodes an agent holds: a pure state machine, without a clock.

Servers are kept full, and no more is leased than keeps them full: what waits here could be played by another
agent. The number follows from what servers and sandbox have room for now (feed-forward), under a limit that
grows by a constant a round trip and halves on congestion (:class:`engine.inference.concurrency.Aimd`).
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


class Sight(NamedTuple):
    """What an agent sees of its dependencies. ``servers`` are the requests that the serving servers take at
    once, ``waiting`` those of this agent that wait for a place there: others' queue is none that it could
    shorten. ``cuts`` and ``missed`` count since the start: limits cut because a server preempted, queued or
    stood still, and deadlines missed.
    ``sandbox`` is how many instances the sandbox has for this agent, those that it holds included.
    """

    servers: int
    waiting: int
    cuts: int
    missed: int
    sandbox: int

    @classmethod
    def of(
        cls, pool: Mapping[str, float], sandbox: Mapping[str, float], *, waiting: int, missed: int, held: int
    ) -> Sight:
        """Read the ``statistics()`` of the inference pool and of the sandbox, while ``held`` are played, of
        which ``waiting`` wait for a server.
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


class Places:
    """``limit`` is how many episodes may be in hand, from 1 to ``most``; any thread may read it.

    A little more than the servers take is held, so that the next episode has its instance and its prompt when
    a place gets free; and as many more as are away from the servers, in a step of their program, on average.
    Without a server that serves it is 1.
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
        """How often the limit was halved."""
        return self._growth.cuts

    def look(self, sight: Sight, *, held: int, away: int, ended: int) -> int:
        """Take in what is seen, ``ended`` requests after the last look; return the new limit.

        ``held`` episodes are in hand, ``away`` of them in a step of their program.
        """
        for _ in range(min(ended, 2 * self._most)):
            self._growth.ended(in_flight=held, success=True)
        if self._congested(sight):
            self._growth.congested(in_flight=held)
        self._away += _SMOOTHING * (min(away, sight.servers) - self._away)
        self.limit = max(_NONE, min(self._most, self._growth.limit, sight.sandbox, self._room(sight)))
        return self.limit

    def _room(self, sight: Sight) -> int:
        if sight.servers <= 0:
            return _NONE
        ahead = max(_AHEAD_LEAST, math.ceil(sight.servers * _AHEAD_SHARE))
        return sight.servers + ahead + min(round(self._away), sight.servers)

    def _congested(self, sight: Sight) -> bool:
        """Whether a server had to be relieved, a deadline was missed, or a long queue does not end; while no
        server serves nothing is too much for them.
        """
        relieved = sight.cuts > self._cuts or sight.missed > self._missed
        self._cuts, self._missed = sight.cuts, sight.missed
        self._crowded = self._crowded + 1 if sight.servers and 2 * sight.waiting > sight.servers else 0
        if self._crowded >= _PATIENCE:
            self._crowded = 0
            return True
        return relieved and sight.servers > 0
