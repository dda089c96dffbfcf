"""One environment in the designer's memory, and its measurements in words for the design prompt."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from bus.messages import EnvironmentState, Flag

_HELPS = 0.15
_FEW = 0.5


class MemoryRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One environment.

    ``win`` and the fields after it are those of its window so far, or of the whole window once it is
    ``closed``; ``regret`` is None without a hint. ``source`` is the whole program, "" when it is unknown.
    ``trivial`` is the share of instances that blind play wins, ``trivially`` whether that is too many.
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
        """Return the values for a prompt template.

        A positive example shows its program, or its beginning ``source``; a negative one shows ``title``,
        ``summary`` and ``why``.
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


def why(record: MemoryRecord) -> str:
    """Return the measurements and their meaning in one to three sentences; "" for a fresh record."""
    if record.flag:
        return f"It did not count: {record.flag_reason}."
    if record.leak:
        return f"Its hint gave the answer away: with it they won {_percent(record.hinted or 0.0)} at once."
    if record.state == "degenerate":
        return _degenerate(record)
    if not record.plays:
        return ""
    parts = [f"{_VERDICT.get(record.state, 'About right')}: {_measured(record)}."]
    if record.state != "frontier" and (said := _hint(record)):
        parts.append(said)
    return " ".join(parts)


_VERDICT = {"mastered": "Too easy", "intractable": "Too hard"}


def _degenerate(record: MemoryRecord) -> str:
    if record.trivially:
        return f"It can be won without looking: blind play won {_percent(record.trivial)}."
    played = f" ({_measured(record)})" if record.plays else ""
    return f"It paid without being played, or broke in most plays{played}."


def _measured(record: MemoryRecord) -> str:
    won = f"players won {_percent(record.win)} of {record.plays} plays"
    if record.win_low < record.win_high:
        won += f" (95 % interval {_percent(record.win_low, sign=False)}-{_percent(record.win_high)})"
    return won if record.turns is None else f"{won}, in {record.turns:.1f} turns on average"


def _hint(record: MemoryRecord) -> str:
    if record.hinted is None:
        return "There was no hint to it." if not record.hint else ""
    if record.hinted - record.win >= _HELPS:
        return f"With a hint they won {_percent(record.hinted)}: what it tells cannot be found by playing."
    if record.state == "intractable" and record.hinted < _FEW:
        reason = "the text may be unclear, or the goal out of reach"
        return f"A hint did not help ({_percent(record.hinted)}): {reason}."
    return f"A hint made no difference ({_percent(record.hinted)})."


def _percent(share: float, *, sign: bool = True) -> str:
    return f"{share * 100:.0f}{' %' if sign else ''}"
