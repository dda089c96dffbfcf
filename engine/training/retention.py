"""Which checkpoints stay beside the newest ones: the best one, and those whose score is still to come."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import NamedTuple

import msgspec

BEST = "best.json"
_WAITING = 2


class Best(msgspec.Struct, frozen=True):
    """The best checkpoint so far: its name, its ``score`` (higher is better), and what it was judged by."""

    checkpoint: str
    score: float
    by: str


class Place(NamedTuple):
    """What the name of a checkpoint says."""

    fence: int
    step: int
    name: str


class Retention:
    """Knows the best checkpoint by ``by`` (see ``learner.best_by``), and what must not be deleted for it.

    A suite is played a while after its version was served, ``every`` steps: the two newest checkpoints at
    such steps stay until a later one has its score. A score belongs to the checkpoint of the version that
    answered; the suite may have begun a little later than it was due, so else to the nearest one within half
    of ``every``, on the same branch.
    """

    def __init__(self, by: str, *, every: int = 0, best: Best | None = None) -> None:
        self._by, self._every = by, every
        self.best = best if best is not None and best.by == by else None
        self._waiting: list[Place] = []

    @property
    def suite(self) -> str:
        """The suite whose scores are wanted, empty for none."""
        return "" if self._by.startswith("metric:") else self._by

    @property
    def metric(self) -> str:
        """The metric of a batch that is wanted, empty for none."""
        return self._by.removeprefix("metric:").removeprefix("-") if self._by and not self.suite else ""

    def saved(self, name: str, metrics: dict[str, float]) -> bool:
        """Note a checkpoint and the metrics of its last batch; return whether it is the best one now."""
        if self.suite:
            place = _place(name)
            if place not in self._waiting and self._every and place.step % self._every == 0:
                self._waiting = [*self._waiting, place][-_WAITING:]
            return False
        value = metrics.get(self.metric)
        if not self.metric or value is None:
            return False
        return self._take(name, -value if self._by.startswith("metric:-") else value)

    def scored(self, fence: int, low: int, high: int, score: float, there: list[str]) -> bool:
        """Note that versions ``low`` to ``high`` of ``fence`` came to ``score``; ``there`` are the names of
        the checkpoints. Return whether one of them is the best now."""
        places = [place for place in map(_place, there) if place.fence == fence]
        exact = [place for place in places if low <= place.step <= high]
        near = [place for place in places if abs(place.step - low) * 2 <= self._every]
        found = min(exact or near, key=lambda place: (abs(place.step - low), place.step), default=None)
        if found is None:
            return False
        self._waiting = [place for place in self._waiting if place.step > found.step]
        return self._take(found.name, score)

    def spared(self) -> frozenset[str]:
        """Return the names of checkpoints that stay however old they are."""
        best = {self.best.checkpoint} if self.best else set()
        return frozenset(best | {place.name for place in self._waiting})

    def _take(self, name: str, score: float) -> bool:
        if not math.isfinite(score) or (self.best is not None and score <= self.best.score):
            return False
        self.best = Best(name, score, self._by)
        return True


def read_best(directory: Path) -> Best | None:
    """Return what :func:`write_best` wrote, None without it or when that checkpoint is gone."""
    try:
        best = msgspec.json.decode((directory / BEST).read_bytes(), type=Best)
    except (OSError, msgspec.DecodeError):
        return None
    return best if (directory / best.checkpoint).is_dir() else None


def write_best(directory: Path, best: Best) -> None:
    """Write down, atomically, which checkpoint in ``directory`` is the best."""
    temporary = directory / f".{BEST}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(msgspec.to_builtins(best)))
    temporary.replace(directory / BEST)


def _place(name: str) -> Place:
    fence, step, _ = name.split("-")
    return Place(int(fence), int(step), name)
