"""Text and figures for a terminal: safe, short, with their interval. Shared by views and commands."""

from __future__ import annotations

import unicodedata

_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


def clean(text: str) -> str:
    """Return ``text`` with a replacement for every character that steers a terminal, except newline and tab.

    Models and programs write what they like; escape sequences among it must not reach a terminal.
    """
    return "".join(
        character
        if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf")
        else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )


def shorten(text: str, most: int) -> str:
    """Return ``text`` on one line, at most ``most`` characters long."""
    line = " ".join(clean(text).split())
    return line if len(line) <= most else f"{line[: max(most - 1, 0)]}…"


def number(value: float | None, digits: int = 3) -> str:
    """Return a figure, ``-`` for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    """Return a share in per cent, ``-`` for None."""
    return "-" if value is None else f"{value:.0%}"


def interval(value: float | None, low: float | None, high: float | None) -> str:
    """Return a figure with its interval, ``-`` for None."""
    if value is None or low is None or high is None:
        return number(value, 2)
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def duration(seconds: float | None) -> str:
    """Return a duration with one unit: ``0.2 s``, ``12 s``, ``5.2 min``, ``4.1 d``; ``-`` for None."""
    if seconds is None:
        return "-"
    seconds = max(seconds, 0.0)
    unit, length = next((pair for pair in _UNITS if seconds >= pair[1]), _UNITS[-1])
    value = seconds / length
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"
