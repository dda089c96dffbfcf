"""Checkpoints that are kept beside the newest ones: the best one, and those that await their score."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import msgspec

from engine.files import replace
from engine.lineage import Lineage, Version

BEST = "best.json"
_WAITING = 2


class Best(msgspec.Struct, frozen=True):
    """The best checkpoint so far.

    ``score`` (higher is better) is that of the packed ``version`` by the measure ``by``; a suite may have
    been played a little after the checkpoint. None stands for the checkpoint's own version.
    """

    checkpoint: str
    score: float
    by: str
    version: int | None = None


class Place(NamedTuple):
    """A checkpoint by its name."""

    version: Version
    name: str

    @property
    def step(self) -> int:
        """The step of its version."""
        return self.version.step


class Retention:
    """Tracks the best checkpoint by ``by`` (see ``learner.best_by``), and those that must stay for it.

    A suite is played some time after its version was served, every ``every`` steps: the two newest
    checkpoints at such steps stay until a later one has its score. A score belongs to the checkpoint of the
    version that answered, else to the nearest one within half of ``every``, because a suite may begin late.
    Only weights on the path to the current ones count, of any start of the learner: on that path a step
    names the same weights.
    """

    def __init__(self, by: str, *, every: int = 0, best: Best | None = None) -> None:
        self._by, self._every = by, every
        self.best = best if best is not None and best.by == by else None
        self._waiting: list[Place] = []
        self._lineage = Lineage()

    def settle(self, lineage: Lineage) -> bool:
        """Apply the forks of the run; return whether the best checkpoint was discarded.

        It is when it, or the version that it was judged by, was abandoned.
        """
        self._lineage = lineage
        self._waiting = [place for place in self._waiting if lineage.survives(place.version)]
        best = self.best
        if best is None:
            return False
        judged = [_place(best.checkpoint).version]
        judged += [Version.unpack(best.version)] if best.version is not None else []
        if all(map(lineage.survives, judged)):
            return False
        self.best = None
        return True

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

    def scored(self, low: Version, high: Version, score: float, there: list[str]) -> bool:
        """Note the ``score`` of versions ``low`` to ``high``; return whether a checkpoint is the best now.

        ``there`` are the names of the checkpoints.
        """
        survives = self._lineage.survives
        if not (survives(low) and survives(high)):
            return False
        places = [place for place in map(_place, there) if survives(place.version)]
        exact = [place for place in places if low.step <= place.step <= high.step]
        near = [place for place in places if abs(place.step - low.step) * 2 <= self._every]
        found = min(exact or near, key=lambda place: (abs(place.step - low.step), place.step), default=None)
        if found is None:
            return False
        self._waiting = [place for place in self._waiting if place.step > found.step]
        return self._take(found.name, score, low.pack())

    def spared(self) -> frozenset[str]:
        """Return the names of checkpoints that stay at any age."""
        best = {self.best.checkpoint} if self.best else set()
        return frozenset(best | {place.name for place in self._waiting})

    def _take(self, name: str, score: float, version: int | None = None) -> bool:
        if not math.isfinite(score) or (self.best is not None and score <= self.best.score):
            return False
        self.best = Best(name, score, self._by, version)
        return True


def read_best(directory: Path) -> Best | None:
    """Return what :func:`write_best` wrote, None without it or when that checkpoint is gone."""
    try:
        best = msgspec.json.decode((directory / BEST).read_bytes(), type=Best)
    except (OSError, msgspec.DecodeError):
        return None
    return best if (directory / best.checkpoint).is_dir() else None


def write_best(directory: Path, best: Best | None) -> None:
    """Store atomically the best checkpoint of ``directory``, None when there is none."""
    if best is None:
        (directory / BEST).unlink(missing_ok=True)
        return
    replace(directory / BEST, msgspec.json.encode(best))


def _place(name: str) -> Place:
    fence, step, _ = name.split("-")
    return Place(Version(int(fence), int(step)), name)
