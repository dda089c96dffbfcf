"""A record in words: why a game missed, as a designer can use it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from roles.designer.memory import Record

_HELPS = 0.15
_FEW = 0.5


def why(record: Record) -> str:
    """Return what was measured and what it means, in one to three short sentences; "" for a fresh record."""
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


def _degenerate(record: Record) -> str:
    if record.trivially:
        return f"It can be won without looking: blind play won {_percent(record.trivial)}."
    played = f" ({_measured(record)})" if record.plays else ""
    return f"It paid without being played, or broke in most plays{played}."


def _measured(record: Record) -> str:
    won = f"players won {_percent(record.win)} of {record.plays} plays"
    if record.win_low < record.win_high:
        won += f" (95 % interval {_percent(record.win_low, sign=False)}-{_percent(record.win_high)})"
    return won if record.turns is None else f"{won}, in {record.turns:.1f} turns on average"


def _hint(record: Record) -> str:
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
