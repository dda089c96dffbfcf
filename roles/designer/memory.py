"""The designer's memory of its environments. Pure: facts in, examples for the prompt out.

``environment.ready`` creates a record, the summary of each round updates it, ``environment.scored`` completes
it with the values of the whole window. A negative example describes in words the game and the reason of its
failure; the public implementation shows its file name only.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from bus.messages import (
    EnvironmentReady,
    EnvironmentScored,
    EnvironmentStanding,
    EnvironmentState,
    RoundSummary,
)
from roles.designer.memory_record import MemoryRecord

_NEGATIVE: frozenset[EnvironmentState] = frozenset(("mastered", "intractable", "degenerate"))
_FINAL: frozenset[EnvironmentState] = frozenset(("mastered", "degenerate"))
_BY_WIN: frozenset[EnvironmentState] = frozenset(("mastered", "intractable"))
_BEST = 10
_SETTLED = 1 << 16
# What a template writes around an example, in tokens, generously.
_FRAME = 48
_SHORTEST_CUT = 64


class MemoryState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a memory without the texts of its programs, which are in the archive."""

    closed: tuple[MemoryRecord, ...] = ()
    open: tuple[MemoryRecord, ...] = ()
    settled: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()


class Memory:
    """Up to ``records`` closed windows, one per program, and ``open_windows`` open ones, newest kept.

    A program that was once mastered or degenerate is never a positive example again, whatever a later window
    of it shows; the digests of the last 65,536 such programs are kept. A program that misses in a window that
    is still open is no positive example either. A design makes one record, however often its fact arrives:
    the names of the last 65,536 scored designs are kept.
    """

    def __init__(self, records: int, *, open_windows: int = 1024) -> None:
        self._limit, self._open_limit = records, open_windows
        self._open: OrderedDict[str, MemoryRecord] = OrderedDict()
        self._closed: OrderedDict[str, MemoryRecord] = OrderedDict()
        self._settled: OrderedDict[str, None] = OrderedDict()
        self._finished: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._closed)

    @property
    def waiting(self) -> int:
        """Environments whose window has not closed yet."""
        return len(self._open)

    def states(self) -> Counter[EnvironmentState]:
        """Return how many records are in each state, open windows included."""
        return Counter(record.state for record in self._all())

    def programs(self) -> Iterator[MemoryRecord]:
        """Yield the records whose program is known, oldest first."""
        return (record for record in self._all() if record.source)

    def ready(self, fact: EnvironmentReady) -> None:
        """Keep the program of ``fact`` until its window closes; a known design changes nothing."""
        if fact.design in self._open or fact.design in self._finished:
            return
        self._open[fact.design] = MemoryRecord(
            design=fact.design,
            environment=fact.environment,
            skill=fact.skill,
            document=fact.document,
            title=fact.title,
            summary=fact.summary,
            source=fact.source,
            hint=fact.hint is not None,
            trivial=fact.trivial_win_rate,
            trivially=fact.degenerate,
            flag=fact.flag,
            flag_reason=fact.flag_reason,
            family=fact.family,
            difficulty=fact.difficulty,
            state="degenerate" if fact.degenerate or fact.flag else "fresh",
        )
        _shrink(self._open, self._open_limit)

    def played(self, fact: RoundSummary) -> None:
        """Update the records of open windows by the summary of a round."""
        for standing in fact.standings:
            record = self._open.get(standing.design)
            if record is not None:
                self._open[standing.design] = msgspec.structs.replace(record, **_measured(standing))

    def scored(self, fact: EnvironmentScored) -> None:
        """Close a window; the same program again replaces its older record."""
        known = self._open.pop(fact.design, None)
        _note(self._finished, fact.design)
        if known is None or known.environment != fact.environment:
            known = MemoryRecord(
                design=fact.design, environment=fact.environment, skill=fact.skill, document=fact.document
            )
        self._closed.pop(fact.environment, None)
        self._closed[fact.environment] = msgspec.structs.replace(
            known,
            family=fact.family,
            difficulty=fact.difficulty,
            regret_low=fact.regret_low,
            closed=True,
            **_measured(fact),
        )
        if self._closed[fact.environment].state in _FINAL:
            _note(self._settled, fact.environment)
        _shrink(self._closed, self._limit)

    def examples(
        self,
        skill: str,
        *,
        positive: int,
        negative: int,
        rng: random.Random,
        tokens: Callable[[str], int] | None = None,
        limit: int = 0,
    ) -> list[dict[str, Any]]:
        """Return up to ``positive`` frontier and ``negative`` mastered, intractable or degenerate records.

        Positives are drawn from the best by regret (the top ``max(3 * positive, 10)``; a hint that leaks the
        answer counts as regret 0), negatives uniformly; both from ``skill`` only and without repetition. The
        same state and the same generator give the same examples. With ``tokens``, which counts a text, they
        take at most ``limit`` tokens together: programs that fit are preferred to the beginning of one that
        does not.
        """
        return self.draw(skill, positive=positive, negative=negative, rng=rng).views(tokens, limit)

    def draw(self, skill: str, *, positive: int, negative: int, rng: random.Random) -> DrawnExamples:
        """Draw the records for :meth:`examples`; later facts do not change them."""
        mine = [record for record in self._all() if record.skill == skill]
        missing = {record.environment for record in self._all() if record.state in _NEGATIVE}
        sound = [one for one in filter(self._exemplary, mine) if one.environment not in missing]
        best = sorted(sound, key=lambda r: (-_regret(r), r.environment))
        drawn = _shuffled(best[: max(3 * positive, _BEST)], rng)
        missed = _shuffled([record for record in mine if record.state in _NEGATIVE], rng)
        return DrawnExamples(positive, drawn, missed[:negative])

    def freeze(self) -> MemoryState:
        """Return the whole memory as plain data, without the texts of programs."""
        return MemoryState(
            closed=tuple(map(_bare, self._closed.values())),
            open=tuple(map(_bare, self._open.values())),
            settled=tuple(self._settled),
            finished=tuple(self._finished),
        )

    def thaw(self, frozen: MemoryState, sources: Mapping[str, str]) -> None:
        """Take the content of ``frozen``; ``sources`` maps digests to programs.

        Raises KeyError, and changes nothing, when one is missing.
        """
        closed = OrderedDict((r.environment, _clad(r, sources)) for r in frozen.closed)
        opened = OrderedDict((r.design, _clad(r, sources)) for r in frozen.open)
        self._closed, self._open = closed, opened
        self._settled = OrderedDict.fromkeys(frozen.settled)
        self._finished = OrderedDict.fromkeys(frozen.finished)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Memory) and self._parts() == other._parts()

    __hash__ = None  # type: ignore[assignment]

    def _parts(self) -> tuple[list[MemoryRecord], list[MemoryRecord], list[str], list[str]]:
        return [*self._closed.values()], [*self._open.values()], [*self._settled], [*self._finished]

    def _all(self) -> Iterator[MemoryRecord]:
        yield from self._closed.values()
        yield from self._open.values()

    def _exemplary(self, record: MemoryRecord) -> bool:
        sound = record.state == "frontier" and bool(record.source) and not record.flag
        return sound and record.environment not in self._settled


_MEASURED = (
    *("state", "plays", "win", "win_low", "win_high", "hinted", "hinted_plays", "regret", "turns"),
    *("noise_floor", "leak"),
)
_ABSENT = "\0"


def _regret(record: MemoryRecord) -> float:
    return 0.0 if record.leak else record.regret or 0.0


class DrawnExamples(NamedTuple):
    """Records in the order of the draw: of ``positives`` the first ``wanted`` that fit are shown."""

    wanted: int
    positives: list[MemoryRecord]
    negatives: list[MemoryRecord]

    def views(self, tokens: Callable[[str], int] | None, limit: int) -> list[dict[str, Any]]:
        """Return the values for a prompt template, within ``limit`` tokens."""
        budget = _Budget(tokens, limit)
        negatives = [
            view
            for view in (record.view("negative") for record in self.negatives)
            if budget.take(f"{view['title']} {view['summary']} {view['why']}")
        ]
        positives = [record.view("positive") for record in _fitting(self.positives, self.wanted, budget)]
        none = self.positives and self.wanted and not positives
        if none and (beginning := budget.beginning(self.positives[0].source)):
            positives = [self.positives[0].view("positive", beginning)]
        return positives + negatives


class _Budget:
    """Tokens that are left for examples; without a counter there is no bound."""

    def __init__(self, tokens: Callable[[str], int] | None, limit: int) -> None:
        self._tokens, self._left = tokens, limit

    def take(self, text: str) -> bool:
        """Pay for one example; False, and nothing paid, when it does not fit."""
        cost = self._tokens(text) + _FRAME if self._tokens else 0
        if self._tokens and cost > self._left:
            return False
        self._left -= cost
        return True

    def beginning(self, text: str) -> str:
        """Return as many first lines of ``text`` as fit, "" when too few do."""
        lines, room = text.splitlines(keepends=True), self._left - _FRAME
        if self._tokens is None or room < _SHORTEST_CUT:
            return ""
        low, high = 0, len(lines)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._tokens("".join(lines[:middle])) <= room else (low, middle - 1)
        return "".join(lines[:low])


def _measured(fact: EnvironmentStanding | EnvironmentScored) -> dict[str, Any]:
    """Return the measured fields of a fact.

    An interval of zero width carries no information, so a state that follows from the win rate is then reset.
    """
    found = {name: getattr(fact, name) for name in _MEASURED}
    if fact.state in _BY_WIN and not fact.win_low < fact.win_high:
        found["state"] = "fresh"
    return found


def _fitting(records: Iterable[MemoryRecord], count: int, budget: _Budget) -> list[MemoryRecord]:
    """Take the first ``count`` of different programs that the budget can pay."""
    taken: dict[str, MemoryRecord] = {}
    for record in records:
        if len(taken) >= count:
            break
        if record.environment not in taken and budget.take(record.source):
            taken[record.environment] = record
    return list(taken.values())


def _shuffled(records: list[MemoryRecord], rng: random.Random) -> list[MemoryRecord]:
    return rng.sample(records, len(records))


def _note(known: OrderedDict[str, None], name: str) -> None:
    """Make ``name`` the newest of those that are known."""
    known.pop(name, None)
    known[name] = None
    _shrink(known, _SETTLED)


def _shrink(store: OrderedDict[str, Any], limit: int) -> None:
    while len(store) > limit:
        store.popitem(last=False)


def _bare(record: MemoryRecord) -> MemoryRecord:
    """Return the record without its program; a mark remembers that it had none."""
    return msgspec.structs.replace(record, source="" if record.source else _ABSENT)


def _clad(record: MemoryRecord, sources: Mapping[str, str]) -> MemoryRecord:
    source = "" if record.source == _ABSENT else sources[record.environment]
    return msgspec.structs.replace(record, source=source)
