"""Environments of a run as text for people. Pure, but for how wide the terminal is."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from engine.records.envs import Entry

_LONG = 2000
_NARROWEST_TITLE = 20
_RIGHT = frozenset({"step", "win", "regret", "turns", "reward"})


def table(entries: Sequence[Entry], *, width: int | None = None) -> str:
    """Return one line an environment under a line of names; titles are cut to ``width`` columns in all."""
    rows = [_cells(entry) for entry in entries]
    names = [*_cells_of_nothing()]
    wide = {name: max(len(name), *(len(row[name]) for row in rows)) if rows else len(name) for name in names}
    lines = []
    for row in ({name: name for name in names}, *rows):
        cells = [
            row[name].rjust(wide[name]) if name in _RIGHT else row[name].ljust(wide[name])
            for name in names[:-1]
        ]
        line = "  ".join(cells)
        room = None if width is None else max(_NARROWEST_TITLE, width - len(line) - 2)
        lines.append(f"{line}  {row['title'][:room]}".rstrip())
    return "\n".join(lines)


def facts(entry: Entry) -> list[tuple[str, str]]:
    """Return what is known about an environment as pairs of name and value."""
    rows = [
        ("environment", entry.environment),
        ("design", entry.design),
        ("step", f"{entry.step}, attempt {entry.attempt + 1}"),
        ("skill", entry.skill),
        ("document", entry.document or "none"),
        ("state", entry.state if entry.round is None else f"{entry.state}, closed in round {entry.round}"),
        ("flag", f"{entry.flag}: {entry.flag_reason}" if entry.flag else ""),
        ("about", entry.summary),
        ("prompt", entry.prompt),
        ("win rate", _with(interval(entry.win, entry.win_low, entry.win_high), _of(entry.plays))),
        (
            "regret",
            _with(interval(entry.regret, entry.regret_low, entry.regret_high), _of(entry.hinted_plays)),
        ),
        (
            "reward",
            _with(
                number(entry.reward), "" if entry.advantage is None else f"advantage {entry.advantage:+.3f}"
            ),
        ),
        ("turns", number(entry.turns, 1)),
        ("without looking", f"{entry.trivial_win_rate:.0%} won{', degenerate' if entry.degenerate else ''}"),
    ]
    if entry.noise_floor is not None:
        rows.append(("noise of regret", number(entry.noise_floor)))
    if entry.regret_paid is not None and entry.regret_paid != entry.regret:
        rows.append(("regret paid", number(entry.regret_paid)))
    if entry.pairs_apart:
        rows.append(("other versions", f"in {entry.pairs_apart} of {entry.pairs} pairs"))
    if entry.leak:
        rows.append(("hint", "holds the answer"))
    if entry.family:
        level = "" if entry.difficulty is None else f", level {entry.difficulty:.2f}"
        rows.append(("family", f"{entry.family}{level}"))
    if entry.similarity is not None:
        rows.append(("like one known", number(entry.similarity)))
    return [(name, clean(value)) for name, value in rows if value]


def sheet(entry: Entry) -> str:
    """Return title and facts of an environment."""
    return "\n".join(
        [clean(entry.title) or entry.id, *(f"  {name:<18}{value}" for name, value in facts(entry))]
    )


def beside(left: Entry, right: Entry) -> str:
    """Return the facts of two environments side by side."""
    both = [("", left.id, right.id), ("title", clean(left.title), clean(right.title))]
    other = dict(facts(right))
    both += [(name, value, other.pop(name, "-")) for name, value in facts(left)]
    both += [(name, "-", value) for name, value in other.items()]
    both = [(name, one[:64], two[:64]) for name, one, two in both]
    wide = max(len(one) for _, one, _ in both)
    return "\n".join(f"  {name:<18}{one:<{wide}}  {two}".rstrip() for name, one, two in both)


def play(row: dict[str, Any]) -> str:
    """Return a play that was kept: what the agent saw, said and got."""
    lines = [f"{row['arm']} play of round {row['round']}, return {row['returned']:.2f}"]
    if row["reason"]:
        lines[0] += f" ({clean(row['reason'])})"
    for observation, reply, action, reward in row["turns"]:
        lines += _indented("saw", observation) + _indented("said", reply)
        lines += _indented("did", f"{'nothing' if action is None else action}   reward {reward:g}")
    return "\n".join(lines)


def interval(value: float | None, low: float | None, high: float | None) -> str:
    """Return a figure with its interval, ``-`` for None."""
    if value is None:
        return "-"
    return number(value, 2) if low is None or high is None else f"{value:.2f} [{low:.2f}, {high:.2f}]"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def clean(text: str) -> str:
    """Return what a model wrote without characters that steer a terminal."""
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf")
        else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )


def _cells(entry: Entry) -> dict[str, str]:
    cells = _cells_of_nothing() | {
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
    return {name: " ".join(clean(value).split()) for name, value in cells.items()}


def _cells_of_nothing() -> dict[str, str]:
    names = ("step", "id", "skill", "document", "state", "win", "regret", "turns", "title")
    return dict.fromkeys(names, "")


def _of(plays: int | None) -> str:
    return "" if plays is None else f"{plays} plays"


def _with(figure: str, more: str) -> str:
    return f"{figure}, {more}" if more and figure != "-" else figure


def _indented(name: str, text: str) -> list[str]:
    shown = clean(text)
    lines = (shown if len(shown) <= _LONG else f"{shown[:_LONG]} ...").splitlines() or [""]
    return [f"  {name if at == 0 else '':<6}{line}" for at, line in enumerate(lines)]
