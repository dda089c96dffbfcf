"""Figures in the words of people. Pure."""

from __future__ import annotations

import re
import time

from engine.errors import ConfigError

_UNITS = (("d", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))
_SINCE = re.compile(r"(\d+(?:\.\d+)?)\s*(s|sec|m|min|h|d|w)")
_SECONDS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_NEAR_SECONDS = 20 * 3600.0


def span(seconds: float | None) -> str:
    """Return a duration with one unit: ``0.2 s``, ``12 s``, ``5.2 min``, ``4.1 d``; ``-`` for None."""
    if seconds is None:
        return "-"
    seconds = max(seconds, 0.0)
    unit, length = next((pair for pair in _UNITS if seconds >= pair[1]), _UNITS[-1])
    value = seconds / length
    return f"{value:.1f} {unit}" if value < 10 else f"{value:.0f} {unit}"


def size(count: float | None) -> str:
    """Return a number of bytes: ``512 B``, ``1.5 kB``, ``3.2 GB``; ``-`` for None."""
    return "-" if count is None else f"{_scaled(count, ('B', 'kB', 'MB', 'GB', 'TB'))}"


def amount(count: float | None) -> str:
    """Return a count: ``812``, ``12.3 k``, ``4.1 M``; ``-`` for None."""
    return "-" if count is None else _scaled(count, ("", "k", "M", "G")).strip()


def rate(per_second: float | None) -> str:
    """Return a rate per second without its unit: ``0``, ``0.4``, ``31``, ``12.3 k``; ``-`` for None."""
    if per_second is None:
        return "-"
    return f"{per_second:.1f}" if 0 < per_second < 10 else amount(round(per_second))


def share(part: float | None) -> str:
    """Return a share of 1 in per cent; ``-`` for None."""
    if part is None:
        return "-"
    return f"{part:.1%}" if 0 < part < 0.1 else f"{part:.0%}"


def moment(at: float, now: float) -> str:
    """Return a wall-clock time (seconds since the epoch), with its date when it is not recent."""
    form = "%H:%M:%S" if abs(now - at) < _NEAR_SECONDS else "%Y-%m-%d %H:%M:%S"
    return time.strftime(form, time.localtime(at))


def plain(text: str) -> str:
    """Return ``text`` without what would move a terminal's cursor or change its colours."""
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def cut(text: str, most: int) -> str:
    """Return ``text`` on one line, at most ``most`` characters long."""
    line = " ".join(plain(text).split())
    return line if len(line) <= most else f"{line[: max(most - 1, 0)]}…"


def seconds_of(text: str) -> float:
    """Return the seconds that ``30s``, ``15m``, ``2h``, ``3d`` or ``1w`` mean. Raises ConfigError."""
    found = _SINCE.fullmatch(text.strip().lower())
    if found is None:
        raise ConfigError(f"{text!r} is not a duration.", remedy="Examples: 30s, 15m, 2h, 3d, 1w.")
    return float(found[1]) * _SECONDS[found[2]]


def _scaled(count: float, units: tuple[str, ...]) -> str:
    value = float(count)
    for unit in units[:-1]:
        if abs(value) < 999.5:
            return f"{value:.0f} {unit}" if unit == units[0] or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} {units[-1]}"
