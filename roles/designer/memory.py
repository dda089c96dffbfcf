"""What the designer remembers of its environments. Pure: facts in, examples for the prompt out.

``environment.ready`` makes a record, every round's standings correct it, ``environment.scored`` gives it the
verdict of the whole window. The reference writes a record once, after the first round, and shows negatives by
file name only (reference spec 7); here a negative says in words what the game was and why it missed.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from bus.messages import EnvironmentReady, EnvironmentScored, EnvironmentState, Flag, RoundSummary, Standing
from roles.designer.memory_feedback import why

_NEGATIVE: frozenset[EnvironmentState] = frozenset(("mastered", "intractable", "degenerate"))
_FINAL: frozenset[EnvironmentState] = frozenset(("mastered", "degenerate"))
_BY_WIN: frozenset[EnvironmentState] = frozenset(("mastered", "intractable"))
_BEST = 10
_SETTLED = 1 << 16
# What a template writes around an example, in tokens, generously.
_FRAME = 48
_SHORTEST_CUT = 64


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One environment. ``win`` and the fields after it are of its window so far, or of the whole once it is
    ``closed``; ``regret`` is None without a hint. ``source`` is whole, "" when it was not seen; blind play
    wins ``trivial`` of the instances, which ``trivially`` calls too many.
    """

    design: str
    environment: str
    skill: str
    document: str = ""
    title: str = ""
    summary: str = ""
    source: str = ""
    hint: bool = False
    trivial: float = 0.0
    trivially: bool = False
    flag: Flag = ""
    flag_reason: str = ""
    family: str | None = None
    difficulty: float | None = None
    state: EnvironmentState = "fresh"
    closed: bool = False
    plays: int = 0
    win: float = 0.0
    win_low: float = 0.0
    win_high: float = 1.0
    hinted: float | None = None
    hinted_plays: int = 0
    regret: float | None = None
    regret_low: float | None = None
    turns: float | None = None
    noise_floor: float | None = None
    leak: bool = False

    def view(self, polarity: Literal["positive", "negative"], source: str | None = None) -> dict[str, Any]:
        """Return what a prompt template sees. A positive shows its program, or ``source``, a beginning of it;
        a negative shows ``title``, ``summary`` and ``why``.
        """
        shown = "" if polarity == "negative" else self.source if source is None else source
        return {
            "polarity": polarity,
            "environment": self.environment,
            "skill": self.skill,
            "win": self.win,
            "win_low": self.win_low,
            "win_high": self.win_high,
            "plays": self.plays,
            "hinted": self.hinted,
            "regret": self.regret,
            "noise_floor": self.noise_floor,
            "leak": self.leak,
            "turns": self.turns,
            "state": self.state,
            "title": self.title,
            "summary": self.summary,
            "why": why(self),
            "family": self.family,
            "difficulty": self.difficulty,
            "source": shown,
            "cut": polarity == "positive" and shown != self.source,
        }


class Frozen(msgspec.Struct, frozen=True, kw_only=True):
    """A memory at rest, without the texts of its programs, which are in the archive."""

    closed: tuple[Record, ...] = ()
    open: tuple[Record, ...] = ()
    settled: tuple[str, ...] = ()
    finished: tuple[str, ...] = ()


class Memory:
    """At most ``records`` closed windows, one a program, and ``open_windows`` open ones; oldest out first.

    A program that was once mastered, or degenerate, is never an example to follow again, whatever a later
    window of the same program says; of such programs the last 65,536 are known by their digest. Nor is one
    that misses in a window that is still open, while it does, whatever an earlier window said. A design
    makes one record, however often it is told of: the last 65,536 that were scored are known by their name.
    """

    def __init__(self, records: int, *, open_windows: int = 1024) -> None:
        self._limit, self._open_limit = records, open_windows
        self._open: OrderedDict[str, Record] = OrderedDict()
        self._closed: OrderedDict[str, Record] = OrderedDict()
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

    def programs(self) -> Iterator[Record]:
        """Yield the records whose program is known, oldest first."""
        return (record for record in self._all() if record.source)

    def ready(self, fact: EnvironmentReady) -> None:
        """Keep the program of ``fact`` until its window closes; nothing for a design that is known."""
        if fact.design in self._open or fact.design in self._finished:
            return
        self._open[fact.design] = Record(
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
        """Correct the records of open windows by a round's standings."""
        for standing in fact.standings:
            record = self._open.get(standing.design)
            if record is not None:
                self._open[standing.design] = msgspec.structs.replace(record, **_measured(standing))

    def scored(self, fact: EnvironmentScored) -> None:
        """Close a window; the same program again replaces its older record."""
        known = self._open.pop(fact.design, None)
        _note(self._finished, fact.design)
        if known is None or known.environment != fact.environment:
            known = Record(
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

        Positives are drawn from the best by regret (the top ``max(3 * positive, 10)``; a hint that holds the
        answer counts as none), negatives uniformly;
        both from ``skill`` only and without repetition. The same state and the same generator give the same
        examples. With ``tokens``, which counts a text, they take at most ``limit`` tokens together: programs
        that fit are preferred to the beginning of one that does not.
        """
        return self.draw(skill, positive=positive, negative=negative, rng=rng).views(tokens, limit)

    def draw(self, skill: str, *, positive: int, negative: int, rng: random.Random) -> Drawn:
        """Draw as :meth:`examples` does. What was drawn does not change with the memory."""
        mine = [record for record in self._all() if record.skill == skill]
        missing = {record.environment for record in self._all() if record.state in _NEGATIVE}
        sound = [one for one in filter(self._exemplary, mine) if one.environment not in missing]
        best = sorted(sound, key=lambda r: (-_regret(r), r.environment))
        drawn = _shuffled(best[: max(3 * positive, _BEST)], rng)
        missed = _shuffled([record for record in mine if record.state in _NEGATIVE], rng)
        return Drawn(positive, drawn, missed[:negative])

    def freeze(self) -> Frozen:
        """Return the whole memory as plain data, without the texts of programs."""
        return Frozen(
            closed=tuple(map(_bare, self._closed.values())),
            open=tuple(map(_bare, self._open.values())),
            settled=tuple(self._settled),
            finished=tuple(self._finished),
        )

    def thaw(self, frozen: Frozen, sources: Mapping[str, str]) -> None:
        """Become what ``frozen`` was; ``sources`` maps digests to programs. Raises KeyError, with nothing
        changed, when one is missing.
        """
        closed = OrderedDict((r.environment, _clad(r, sources)) for r in frozen.closed)
        opened = OrderedDict((r.design, _clad(r, sources)) for r in frozen.open)
        self._closed, self._open = closed, opened
        self._settled = OrderedDict.fromkeys(frozen.settled)
        self._finished = OrderedDict.fromkeys(frozen.finished)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Memory) and self._parts() == other._parts()

    __hash__ = None  # type: ignore[assignment]

    def _parts(self) -> tuple[list[Record], list[Record], list[str], list[str]]:
        return [*self._closed.values()], [*self._open.values()], [*self._settled], [*self._finished]

    def _all(self) -> Iterator[Record]:
        yield from self._closed.values()
        yield from self._open.values()

    def _exemplary(self, record: Record) -> bool:
        sound = record.state == "frontier" and bool(record.source) and not record.flag
        return sound and record.environment not in self._settled


_MEASURED = (
    *("state", "plays", "win", "win_low", "win_high", "hinted", "hinted_plays", "regret", "turns"),
    *("noise_floor", "leak"),
)
_ABSENT = "\0"


def _regret(record: Record) -> float:
    return 0.0 if record.leak else record.regret or 0.0


class Drawn(NamedTuple):
    """Records in the order of the draw: of ``positives`` the first ``wanted`` that fit are shown."""

    wanted: int
    positives: list[Record]
    negatives: list[Record]

    def views(self, tokens: Callable[[str], int] | None, limit: int) -> list[dict[str, Any]]:
        """Return what a prompt template sees, within ``limit`` tokens."""
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


def _measured(fact: Standing | EnvironmentScored) -> dict[str, Any]:
    """Return what was measured. An interval without width tells nothing: no state that follows from the win
    rate is believed on its account.
    """
    found = {name: getattr(fact, name) for name in _MEASURED}
    if fact.state in _BY_WIN and not fact.win_low < fact.win_high:
        found["state"] = "fresh"
    return found


def _fitting(records: Iterable[Record], count: int, budget: _Budget) -> list[Record]:
    """Take the first ``count`` of different programs that the budget can pay."""
    taken: dict[str, Record] = {}
    for record in records:
        if len(taken) >= count:
            break
        if record.environment not in taken and budget.take(record.source):
            taken[record.environment] = record
    return list(taken.values())


def _shuffled(records: list[Record], rng: random.Random) -> list[Record]:
    return rng.sample(records, len(records))


def _note(known: OrderedDict[str, None], name: str) -> None:
    """Make ``name`` the newest of those that are known."""
    known.pop(name, None)
    known[name] = None
    _shrink(known, _SETTLED)


def _shrink(store: OrderedDict[str, Any], limit: int) -> None:
    while len(store) > limit:
        store.popitem(last=False)


def _bare(record: Record) -> Record:
    """Without the program; that there was none is kept."""
    return msgspec.structs.replace(record, source="" if record.source else _ABSENT)


def _clad(record: Record, sources: Mapping[str, str]) -> Record:
    source = "" if record.source == _ABSENT else sources[record.environment]
    return msgspec.structs.replace(record, source=source)
