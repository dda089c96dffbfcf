"""The learner's time by what it does: waiting, training, publishing, writing checkpoints."""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

Activity = Literal["waiting", "training", "publishing", "checkpoints"]
PREFIX = "share_"


class TimeShares:
    """Adds up seconds by activity. Pure; times are arguments, the first one that of the start."""

    def __init__(self, now: float) -> None:
        self._since, self._doing = now, "waiting"
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def begin(self, activity: Activity, now: float) -> None:
        """Note that the learner does ``activity`` from ``now`` on."""
        self._seconds[self._doing] += now - self._since
        self._since, self._doing = now, activity

    def end_round(self, now: float) -> dict[str, float]:
        """Return the shares of the time since the last call as gauges, and wait from ``now`` on."""
        self.begin("waiting", now)
        whole = sum(self._seconds.values())
        shares = {f"{PREFIX}{name}": spent / whole for name, spent in self._seconds.items() if whole}
        self._seconds.clear()
        return shares
