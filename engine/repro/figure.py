"""The figures of a matrix as SVG: one panel a quantity, one line a cell, a band for several seeds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from xml.sax.saxutils import escape

from engine.repro.plan import Cell, Plan
from engine.repro.record import Record
from engine.repro.table import NORMAL, interval
from engine.views.charts import COLOURS, GREY

Point = tuple[float, float, float]
_COLOURS = (*COLOURS, "#7b4fa3", "#00808a", "#b8860b", GREY, "#444444", "#c71585", "#556b2f", "#1e90ff")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP, _ACROSS = 300, 170, 44, 26, 30, 3
_SMOOTH = 5
_ROUNDS = {
    "level": "mean level of designs",
    "band": "share won in 40-60 %",
    "gradient": "share of plays with a gradient",
    "plain": "plain win rate",
    "hinted": "hinted win rate",
    "reward": "designer reward",
    "vendi": "Vendi score of a round",
    "near_duplicates": "near-duplicates",
    "staleness": "mean staleness",
}


def render(plan: Plan, records: Sequence[Record]) -> dict[str, str]:
    """Return two figures by name: held-out results by plays, and the means of rounds."""
    cells = [cell for cell in plan.cell if any(one.cell == cell.name for one in records)]
    groups = {cell.name: [one for one in records if one.cell == cell.name] for cell in cells}
    held_out = {
        f"{suite}: win rate by plays": {name: _held_out(found, suite) for name, found in groups.items()}
        for suite in plan.reported
    }
    rounds = {
        f"{title}, by round": {name: _by_round(found, key) for name, found in groups.items()}
        for key, title in _ROUNDS.items()
    }
    return {"held-out": _draw(plan, cells, held_out), "rounds": _draw(plan, cells, rounds)}


def _draw(plan: Plan, cells: Sequence[Cell], figures: dict[str, dict[str, list[Point]]]) -> str:
    colours = {cell.name: _COLOURS[index % len(_COLOURS)] for index, cell in enumerate(plan.cell)}
    panels = [(title, lines) for title, lines in figures.items() if any(lines.values())]
    rows = -(-len(panels) // _ACROSS)
    width, height = _ACROSS * (_WIDTH + _GAP) + _GAP, rows * (_HEIGHT + _TOP + _GAP) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, (title, lines) in enumerate(panels):
        x = _GAP / 2 + index % _ACROSS * (_WIDTH + _GAP)
        y = index // _ACROSS * (_HEIGHT + _TOP + _GAP)
        parts += _panel(title, lines, colours, x, y)
    for index, cell in enumerate(cells):
        x, y = 20 + index * (width - 40) / len(cells), height - 12
        parts.append(f'<rect x="{x:.0f}" y="{y - 8}" width="12" height="4" fill="{colours[cell.name]}"/>')
        parts.append(f'<text x="{x + 16:.0f}" y="{y}">{escape(cell.title)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _held_out(records: Sequence[Record], suite: str) -> list[Point]:
    """Average the n-th evaluation of all seeds, so the x is their mean number of plays.

    The interval of one seed is that of its episodes.
    """
    # of two evaluations after the same plays (the last step, the final batch) the later one counts
    curves = [
        list({one.plays: one for one in record.evaluations if one.suite == suite}.values())
        for record in records
    ]
    points = []
    for column in zip(*(curve for curve in curves if curve), strict=False):
        x, y, half = _point([one.plays for one in column], [one.win for one in column])
        points.append((x, y, half or NORMAL * column[0].stderr))
    return points


def _by_round(records: Sequence[Record], key: str) -> list[Point]:
    """Average the seeds in each round, each a running mean of its own."""
    found = []
    for number in range(min(len(record.rounds) for record in records)):
        values = []
        for record in records:
            window = [row[key] for row in record.rounds[max(0, number - _SMOOTH + 1) : number + 1]]
            known = [value for value in window if value is not None]
            values += [fmean(known)] if known else []
        if values:
            found.append(_point([number], values))
    return found


def _point(x: Sequence[float], values: Sequence[float]) -> Point:
    return fmean(x), fmean(values), interval(values) or 0.0


def _panel(
    title: str, lines: dict[str, list[Point]], colours: dict[str, str], left: float, top: float
) -> list[str]:
    points = [point for line in lines.values() for point in line]
    right = max(x for x, _, _ in points) or 1.0
    low = min(0.0, *(y for _, y, _ in points))
    high = max(y + half for _, y, half in points) * 1.05 or 1.0
    x0, y0, plot = left + _LEFT, top + _TOP, _WIDTH - _LEFT

    def at(x: float, y: float) -> str:
        y = min(max(y, low), high)
        return f"{x0 + plot * x / right:.1f},{y0 + _HEIGHT - _HEIGHT * (y - low) / (high - low):.1f}"

    parts = [f'<text x="{x0}" y="{y0 - 8}" font-weight="bold">{escape(title)}</text>']
    for share in (0.0, 0.5, 1.0):
        y, value = y0 + _HEIGHT * (1 - share), low + share * (high - low)
        parts.append(f'<path d="M{x0} {y:.1f}h{plot}" stroke="#ddd"/>')
        parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        tick = f"{share * right:,.0f}"
        parts.append(
            f'<text x="{x0 + plot * share:.1f}" y="{y0 + _HEIGHT + 14}" text-anchor="middle">{tick}</text>'
        )
    for name, line in lines.items():
        if any(half for _, _, half in line):
            edge = [at(x, y + half) for x, y, half in line] + [
                at(x, y - half) for x, y, half in reversed(line)
            ]
            parts.append(f'<polygon points="{" ".join(edge)}" fill="{colours[name]}" opacity="0.12"/>')
        drawn = " ".join(at(x, y) for x, y, _ in line)
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colours[name]}" stroke-width="1.8"/>')
    return parts
