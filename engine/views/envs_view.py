"""Environments of a run as text for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.records.envs import EnvironmentRecord
from engine.text import clean, interval, number, shorten

_LONG = 2000
_NARROWEST_TITLE = 20
_NAMES = ("step", "id", "skill", "document", "state", "win", "regret", "turns", "title")
_RIGHT = frozenset({"step", "win", "regret", "turns"})


def table(entries: Sequence[EnvironmentRecord], *, width: int | None = None) -> str:
    """Return one line per environment below a header; titles are cut so that lines fit ``width`` columns."""
    rows = [dict(zip(_NAMES, _NAMES, strict=True)), *map(_cells, entries)]
    widths = {name: max(len(row[name]) for row in rows) for name in _NAMES}
    lines = []
    for row in rows:
        cells = [
            row[name].rjust(widths[name]) if name in _RIGHT else row[name].ljust(widths[name])
            for name in _NAMES[:-1]
        ]
        line = "  ".join(cells)
        room = None if width is None else max(_NARROWEST_TITLE, width - len(line) - 2)
        lines.append(f"{line}  {row['title'][:room]}".rstrip())
    return "\n".join(lines)


def _cells(entry: EnvironmentRecord) -> dict[str, str]:
    cells = {
        "step": str(entry.step),
        "id": entry.id,
        "skill": entry.skill,
        "document": entry.document or "-",
        "state": f"{entry.state} {entry.flag}",
        "win": interval(entry.win, entry.win_low, entry.win_high),
        "regret": interval(entry.regret, entry.regret_low, entry.regret_high),
        "turns": number(entry.turns, 1),
        "title": entry.title,
    }
    return {name: shorten(value, len(value) + 1) for name, value in cells.items()}


def facts(entry: EnvironmentRecord) -> list[tuple[str, str]]:
    """Return the known facts of an environment as (name, value)."""
    level = "" if entry.difficulty is None else f", level {entry.difficulty:.2f}"
    paid = entry.regret_paid if entry.regret_paid != entry.regret else None
    rows = [
        ("environment", entry.environment),
        ("design", entry.design),
        ("step", f"{entry.step}, attempt {entry.attempt + 1}"),
        ("skill", entry.skill),
        ("document", entry.document or "none"),
        ("state", entry.state if entry.round is None else f"{entry.state}, closed in round {entry.round}"),
        ("flag", f"{entry.flag}: {entry.flag_reason}" if entry.flag else ""),
        ("summary", entry.summary),
        ("prompt", entry.prompt),
        ("win rate", interval(entry.win, entry.win_low, entry.win_high) + _of(entry.plays)),
        ("regret", interval(entry.regret, entry.regret_low, entry.regret_high) + _of(entry.hinted_plays)),
        ("regret noise", "" if entry.noise_floor is None else number(entry.noise_floor)),
        ("regret paid", "" if paid is None else number(paid)),
        ("other versions", f"in {entry.pairs_apart} of {entry.pairs} pairs" if entry.pairs_apart else ""),
        ("hint", "holds the answer" if entry.leak else ""),
        ("reward", number(entry.reward)),
        ("advantage", "" if entry.advantage is None else f"{entry.advantage:+.3f}"),
        ("turns", number(entry.turns, 1)),
        ("trivial policies", f"win {entry.trivial_win_rate:.0%}{', degenerate' if entry.degenerate else ''}"),
        ("family", f"{entry.family}{level}" if entry.family else ""),
        ("similarity", "" if entry.similarity is None else f"{entry.similarity:.3f} to a remembered one"),
    ]
    return [(name, clean(value)) for name, value in rows if value]


def sheet(entry: EnvironmentRecord) -> str:
    """Return title and facts of an environment."""
    return "\n".join(
        [clean(entry.title) or entry.id, *(f"  {name:<18}{value}" for name, value in facts(entry))]
    )


def play(row: dict[str, Any]) -> str:
    """Return a recorded episode: observations, replies, actions and rewards."""
    lines = [f"{row['arm']} episode of round {row['round']}, return {row['returned']:.2f}"]
    if row["reason"]:
        lines[0] += f" ({clean(row['reason'])})"
    for observation, reply, action, reward in row["turns"]:
        lines += _indented("saw", observation) + _indented("said", reply)
        lines += _indented("did", f"{'nothing' if action is None else action}   reward {reward:g}")
    return "\n".join(lines)


def _of(plays: int | None) -> str:
    return "" if plays is None else f", {plays} episodes"


def _indented(name: str, text: str) -> list[str]:
    shown = clean(text)
    lines = (shown if len(shown) <= _LONG else f"{shown[:_LONG]} ...").splitlines() or [""]
    return [f"  {name if at == 0 else '':<6}{line}" for at, line in enumerate(lines)]
