"""The designer's memory of its environments. Pure: facts in, examples for the prompt out.

``environment.ready`` creates a record, the summary of each round updates it, ``environment.scored`` completes
it with the values of the whole window. A negative example describes in words the game and the reason of its
failure; the public implementation shows its file name only.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from bus.messages import (
    EnvironmentReady,
    EnvironmentScored,
    EnvironmentStanding,
    EnvironmentState,
    Finding,
    RoundSummary,
)

_NEGATIVE: frozenset[EnvironmentState] = frozenset(("mastered", "intractable", "degenerate"))
_FINAL: frozenset[EnvironmentState] = frozenset(("mastered", "degenerate"))
_BY_WIN: frozenset[EnvironmentState] = frozenset(("mastered", "intractable"))
_BEST = 10
_SETTLED = 1 << 16
# Tokens that a template writes around an example, generously.
_FRAME = 48
_SHORTEST_CUT = 64
_HELPS = 0.15
_FEW = 0.5


class MemoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One environment.

    ``standing`` holds the results of its window so far, or of the whole window once it is ``closed``; None
    before the first. ``source`` is the whole program, "" when it is unknown; ``hint``: it has one.
    """

    design: str
    environment: str
    skill: str
    source: str = ""
    hint: bool = False
    finding: Finding = Finding()
    standing: EnvironmentStanding | None = None
    closed: bool = False

    @property
    def state(self) -> EnvironmentState:
        """The state of the environment.

        An interval of zero width carries no information, so a state that follows from the win rate is then
        fresh.
        """
        standing = self.standing
        if standing is None:
            return "degenerate" if self.finding.degenerate or self.finding.flag else "fresh"
        if standing.state in _BY_WIN and not standing.win_low < standing.win_high:
            return "fresh"
        return standing.state

    @property
    def paid_regret(self) -> float:
        """The regret by which examples are ordered; that of a hint that gives the answer away is none."""
        return 0.0 if self.standing is None or self.standing.leak else self.standing.regret or 0.0

    def view(self, polarity: Literal["positive", "negative"], source: str | None = None) -> dict[str, Any]:
        """Return the values for a prompt template.

        A positive example shows its program, or its beginning ``source``; a negative one shows ``title``,
        ``summary`` and ``why``.
        """
        shown = "" if polarity == "negative" else self.source if source is None else source
        return {
            "polarity": polarity,
            "environment": self.environment,
            "state": self.state,
            "title": self.finding.title,
            "summary": self.finding.summary,
            "win": self.standing.win if self.standing else 0.0,
            "regret": self.standing.regret if self.standing else None,
            "leak": bool(self.standing and self.standing.leak),
            "why": why(self),
            "source": shown,
            "cut": polarity == "positive" and shown != self.source,
        }


class MemoryState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a memory as plain data."""

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
            source=fact.source,
            hint=fact.hint is not None,
            finding=fact.finding,
        )
        _shrink(self._open, self._open_limit)

    def played(self, fact: RoundSummary) -> None:
        """Update the records of open windows by the summary of a round."""
        for standing in fact.standings:
            record = self._open.get(standing.design)
            if record is not None:
                self._open[standing.design] = msgspec.structs.replace(record, standing=standing)

    def scored(self, fact: EnvironmentScored) -> None:
        """Close a window; the same program again replaces its older record."""
        known = self._open.pop(fact.design, None)
        _note(self._finished, fact.design)
        if known is None or known.environment != fact.environment:
            known = MemoryRecord(design=fact.design, environment=fact.environment, skill=fact.skill)
        standing = msgspec.convert(fact, EnvironmentStanding, from_attributes=True)
        record = msgspec.structs.replace(known, standing=standing, closed=True)
        self._closed.pop(fact.environment, None)
        self._closed[fact.environment] = record
        if record.state in _FINAL:
            _note(self._settled, fact.environment)
        _shrink(self._closed, self._limit)

    def draw(self, skill: str, *, positive: int, negative: int, rng: random.Random) -> DrawnExamples:
        """Draw up to ``positive`` frontier and ``negative`` mastered, intractable or degenerate records.

        Positives are drawn from the best by regret (the top ``max(3 * positive, 10)``), negatives uniformly;
        both from ``skill`` only and without repetition. The same state and the same generator give the same
        examples, and later facts do not change them.
        """
        mine = [record for record in self._all() if record.skill == skill]
        missing = {record.environment for record in self._all() if record.state in _NEGATIVE}
        sound = [one for one in filter(self._exemplary, mine) if one.environment not in missing]
        best = sorted(sound, key=lambda r: (-r.paid_regret, r.environment))
        drawn = _shuffled(best[: max(3 * positive, _BEST)], rng)
        missed = _shuffled([record for record in mine if record.state in _NEGATIVE], rng)
        return DrawnExamples(positive, drawn, missed[:negative])

    def freeze(self) -> MemoryState:
        """Return the whole memory as plain data."""
        return MemoryState(
            closed=tuple(self._closed.values()),
            open=tuple(self._open.values()),
            settled=tuple(self._settled),
            finished=tuple(self._finished),
        )

    def thaw(self, frozen: MemoryState) -> None:
        """Take the content of ``frozen``."""
        self._closed = OrderedDict((record.environment, record) for record in frozen.closed)
        self._open = OrderedDict((record.design, record) for record in frozen.open)
        self._settled = OrderedDict.fromkeys(frozen.settled)
        self._finished = OrderedDict.fromkeys(frozen.finished)

    def _all(self) -> Iterator[MemoryRecord]:
        yield from self._closed.values()
        yield from self._open.values()

    def _exemplary(self, record: MemoryRecord) -> bool:
        sound = record.state == "frontier" and bool(record.source) and not record.finding.flag
        return sound and record.environment not in self._settled


class DrawnExamples(NamedTuple):
    """Records in the order of the draw: of ``positives`` the first ``wanted`` that fit are shown."""

    wanted: int
    positives: list[MemoryRecord]
    negatives: list[MemoryRecord]

    def views(self, tokens: Callable[[str], int], limit: int) -> list[dict[str, Any]]:
        """Return the values for a prompt template, which take at most ``limit`` tokens together.

        ``tokens`` counts a text. Programs that fit are preferred to the beginning of one that does not.
        """
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
    """Tokens that are left for examples."""

    def __init__(self, tokens: Callable[[str], int], limit: int) -> None:
        self._tokens, self._left = tokens, limit

    def take(self, text: str) -> bool:
        """Pay for one example; False, and nothing paid, when it does not fit."""
        cost = self._tokens(text) + _FRAME
        if cost > self._left:
            return False
        self._left -= cost
        return True

    def beginning(self, text: str) -> str:
        """Return as many first lines of ``text`` as fit, "" when too few do."""
        lines, room = text.splitlines(keepends=True), self._left - _FRAME
        if room < _SHORTEST_CUT:
            return ""
        low, high = 0, len(lines)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._tokens("".join(lines[:middle])) <= room else (low, middle - 1)
        return "".join(lines[:low])


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


# --- measurements in words ----------------------------------------------------------------------------


def why(record: MemoryRecord) -> str:
    """Return the measurements and their meaning in one to three sentences; "" for a fresh record."""
    found, standing, state = record.finding, record.standing, record.state
    if found.flag:
        return f"It did not count: {found.flag_reason}."
    if standing is not None and standing.leak:
        return f"Its hint gave the answer away: with it they won {_percent(standing.hinted or 0.0)} at once."
    played = standing if standing is not None and standing.plays else None
    if state == "degenerate":
        if found.degenerate:
            won = _percent(found.trivial_win_rate)
            return f"It can be won without looking: blind play won {won}."
        seen = f" ({_measured(played)})" if played else ""
        return f"It paid without being played, or broke in most plays{seen}."
    if played is None:
        return ""
    verdict = {"mastered": "Too easy", "intractable": "Too hard"}.get(state, "About right")
    hint = "" if state == "frontier" else _hint(record, played)
    return f"{verdict}: {_measured(played)}.{hint and ' ' + hint}"


def _measured(standing: EnvironmentStanding) -> str:
    won = f"players won {_percent(standing.win)} of {standing.plays} plays"
    if standing.win_low < standing.win_high:
        low = _percent(standing.win_low, sign=False)
        won += f" (95 % interval {low}-{_percent(standing.win_high)})"
    return won if standing.turns is None else f"{won}, in {standing.turns:.1f} turns on average"


def _hint(record: MemoryRecord, standing: EnvironmentStanding) -> str:
    if standing.hinted is None:
        return "There was no hint to it." if not record.hint else ""
    won = _percent(standing.hinted)
    if standing.hinted - standing.win >= _HELPS:
        return f"With a hint they won {won}: what it tells cannot be found by playing."
    if record.state == "intractable" and standing.hinted < _FEW:
        return f"A hint did not help ({won}): the text may be unclear, or the goal out of reach."
    return f"A hint made no difference ({won})."


def _percent(share: float, *, sign: bool = True) -> str:
    return f"{share * 100:.0f}{' %' if sign else ''}"
