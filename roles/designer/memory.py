"""What the designer remembers of its environments: pure, rebuilt from the facts on the bus.

Two facts make a record: ``environment.ready`` brings the program, ``environment.scored`` the verdict of a
whole window. The reference writes a record once, after the first round, and shows negatives by file name
only (reference spec 7); here a record is the closed window, and a negative says what the game was.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

from bus.messages import EnvironmentReady, EnvironmentScored

_SUMMARY_CHARACTERS = 6000
_NEGATIVE_STATES = ("mastered", "intractable", "degenerate")
_BEST = 10


@dataclass(frozen=True)
class Record:
    """One closed window. ``source`` is whole unless ``cut`` is set; ``regret`` None without a hint."""

    environment: str
    skill: str
    document: str
    win: float
    regret: float | None
    state: str
    title: str
    source: str
    cut: bool
    family: str | None
    difficulty: float | None

    def view(self, polarity: Literal["positive", "negative"]) -> dict[str, Any]:
        """Return what a prompt template sees; a negative shows its title, not its program."""
        return {
            "polarity": polarity,
            "skill": self.skill,
            "win": self.win,
            "regret": self.regret,
            "state": self.state,
            "title": self.title,
            "family": self.family,
            "difficulty": self.difficulty,
            "source": self.source if polarity == "positive" else "",
            "cut": self.cut,
        }


class Memory:
    """At most ``records`` closed windows, oldest out first, one a program.

    Programs whose window is still open wait in a second bounded store; a program that was pushed out of it
    is remembered without its text.
    """

    def __init__(self, records: int, *, open_windows: int = 1024) -> None:
        self._limit, self._open_limit = records, open_windows
        self._open: OrderedDict[str, EnvironmentReady] = OrderedDict()
        self._records: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def waiting(self) -> int:
        """Programs whose window has not closed yet."""
        return len(self._open)

    def ready(self, fact: EnvironmentReady) -> None:
        """Keep the program of ``fact`` until its window closes."""
        self._open[fact.design] = fact
        while len(self._open) > self._open_limit:
            self._open.popitem(last=False)

    def scored(self, fact: EnvironmentScored) -> None:
        """Make a record of a closed window; the same program again replaces its older record."""
        ready = self._open.pop(fact.design, None)
        source = ready.source if ready else ""
        self._records.pop(fact.environment, None)
        self._records[fact.environment] = Record(
            environment=fact.environment,
            skill=fact.skill,
            document=fact.document,
            win=fact.win,
            regret=fact.regret,
            state=fact.state,
            title=ready.title if ready else "",
            source=source[:_SUMMARY_CHARACTERS],
            cut=len(source) > _SUMMARY_CHARACTERS,
            family=fact.family,
            difficulty=fact.difficulty,
        )
        while len(self._records) > self._limit:
            self._records.popitem(last=False)

    def examples(
        self, skill: str, *, positive: int, negative: int, rng: random.Random
    ) -> list[dict[str, Any]]:
        """Return up to ``positive`` frontier and ``negative`` mastered, intractable or degenerate records.

        Positives are drawn from the best by regret (the top ``max(3 * positive, 10)``), negatives
        uniformly; both from ``skill`` only and without repetition. The same state and the same generator
        give the same examples.
        """
        mine = [record for record in self._records.values() if record.skill == skill]
        frontier = sorted(
            (record for record in mine if record.state == "frontier" and record.source),
            key=lambda record: (-(record.regret or 0.0), record.environment),
        )
        best = frontier[: max(3 * positive, _BEST)]
        missed = [record for record in mine if record.state in _NEGATIVE_STATES]
        return [
            *(record.view("positive") for record in rng.sample(best, min(positive, len(best)))),
            *(record.view("negative") for record in rng.sample(missed, min(negative, len(missed)))),
        ]
