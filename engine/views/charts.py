"""Charts of the report and the live page: traces and figures as the dictionaries that Plotly draws."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

BLUE, ORANGE, GREEN, RED, GREY = "#2563a8", "#d9822b", "#2e8b57", "#c0392b", "#8a8f98"
COLOURS = (BLUE, ORANGE, GREEN, RED, "#7b4fa3", "#138d90", GREY)
GRID = "#e8ebef"

Row = dict[str, Any]


def trace(points: Sequence[tuple[Any, float]], colour: str, name: str = "") -> list[Row]:
    """Return one line through ``points``, [] without points."""
    if not points:
        return []
    x, y = zip(*points, strict=True)
    return [{"x": list(x), "y": list(y), "name": name, "line": {"color": colour}, "mode": "lines"}]


def curves(
    title: str,
    rows: Sequence[Row],
    names: dict[str, str],
    span: tuple[float, float] | None = None,
    x: str = "round",
) -> Row | None:
    """Draw columns of ``rows`` against their round; columns without values are left out."""
    traces = []
    for colour, (key, name) in zip(COLOURS, names.items(), strict=False):
        points = [(row["round"], row[key]) for row in rows if row.get(key) is not None]
        traces += trace(points, colour, name)
    return figure(title, traces, x, span)


def by_name(
    title: str, points: Iterable[tuple[Any, str, float]], x: str, span: tuple[float, float]
) -> Row | None:
    """Draw win rates, one line per name through ``points`` of (x, name, rate)."""
    lines: dict[str, list[tuple[Any, float]]] = {}
    for at, name, value in points:
        lines.setdefault(name, []).append((at, value))
    colours = itertools.cycle(COLOURS)
    traces = [one for name, line in sorted(lines.items()) for one in trace(line, next(colours), name)]
    return figure(title, traces, x, span, y="win rate")


def figure(
    title: str, traces: list[Row], x: str, span: tuple[float, float] | None = None, y: str = ""
) -> Row | None:
    """Return a chart of ``traces`` over ``x``, y in ``span`` or from zero; None without traces.

    The vertical axis is named ``y``, or as the title says before its brackets.
    """
    if not traces:
        return None
    vertical = {"range": list(span)} if span else {"rangemode": "tozero"}
    layout = {
        "height": 300,
        "xaxis": {"title": {"text": x}, "gridcolor": GRID},
        "yaxis": vertical | {"title": {"text": y or title.partition(" (")[0]}, "gridcolor": GRID},
        "showlegend": len(traces) > 1,
    }
    return drawn(title, traces, layout)


def drawn(title: str, traces: list[Row], layout: Row) -> Row:
    """Return ``traces`` as what Plotly draws, with the common layout and ``layout`` over it."""
    common = {
        "title": {"text": title, "font": {"size": 14}, "x": 0.02},
        "margin": {"l": 60, "r": 10, "t": 40, "b": 85},
        "legend": {"orientation": "h", "y": -0.34, "yanchor": "top", "x": 0.0, "xanchor": "left"},
        "font": {"family": "system-ui, sans-serif", "size": 12},
    }
    return {"data": traces, "layout": common | layout}
