"""The table of a matrix: means over seeds with 95 % intervals, and differences paired by seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from engine.repro.plan import Plan
from engine.repro.record import Evaluation, Record

NORMAL = 1.96
_LAST = 20


def interval(values: Sequence[float]) -> float | None:
    """Return half of the 95 % interval of a mean over seeds; None for less than two."""
    if len(values) < 2:
        return None
    from scipy.stats import t  # takes a second

    return float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def shown(values: Sequence[float | None], *, signed: bool = False, digits: int = 3) -> str:
    """Return a mean over seeds with its interval, "-" without values."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    half = interval(known)
    mean = f"{fmean(known):{'+' if signed else ''}.{digits}f}"
    return mean if half is None else f"{mean} ± {half:.{digits}f}"


def last(record: Record, suite: str) -> Evaluation | None:
    """Return the evaluation of a suite after the last step."""
    found = [one for one in record.evaluations if one.suite == suite]
    return max(found, key=lambda one: one.step, default=None)


def mean(record: Record, name: str, start: float = 0.0, stop: float = 1.0) -> float | None:
    """Return the mean of a figure over a part of the rounds of a run."""
    rounds = record.rounds[int(start * len(record.rounds)) : max(1, round(stop * len(record.rounds)))]
    known = [value for row in rounds if (value := row[name]) is not None]
    return fmean(known) if known else None


def held_out(records: Sequence[Record], suite: str, base: dict[int, Record] | None = None) -> str:
    """Return the mean win rate on a suite, or its mean difference to ``base``, paired by seed.

    The interval is over seeds; of one seed it is that of its episodes.
    """
    found = []
    for record in records:
        ends = [last(one, suite) for one in (record, (base or {}).get(record.seed)) if one is not None]
        known = [one for one in ends if one is not None]
        if len(known) == (1 if base is None else 2):
            other = known[-1] if base is not None else None
            value = known[0].win - (other.win if other else 0.0)
            found.append((value, math.hypot(known[0].stderr, other.stderr if other else 0.0)))
    values = [value for value, _ in found]
    if len(found) != 1:
        return shown(values, signed=base is not None)
    return f"{values[0]:{'' if base is None else '+'}.3f} ± {NORMAL * found[0][1]:.3f}"


def render(plan: Plan, records: Sequence[Record]) -> str:
    """Return Markdown: the held-out results of the cells, the figures of their designs, and each run."""
    groups = {cell: [one for one in records if one.cell == cell.name] for cell in plan.cell}
    groups = {cell: found for cell, found in groups.items() if found}
    base = {one.seed: one for one in records if one.cell == plan.cell[0].name}
    suite = plan.reported[0]
    results = []
    for cell, found in groups.items():
        ends = [one for record in found if (one := last(record, suite)) is not None]
        results.append(
            [
                cell.title,
                ", ".join(str(one.seed) for one in found),
                *(held_out(found, one) for one in plan.reported),
                "" if cell is plan.cell[0] else held_out(found, suite, base),
                f"{max((one.overlap for one in ends), default=0)}",
                f"{fmean(one.plays for one in ends):,.0f}" if ends else "-",
            ]
        )
    designs = [
        [cell.title, *(shown([value(one) for one in found], digits=2) for value in _FIGURES.values())]
        for cell, found in groups.items()
    ]
    runs = [
        [
            f"{cell.title}, {one.seed}",
            ", ".join(f"{end.win:.2f} ({end.plays:,})" for end in one.evaluations if end.suite == suite),
            *(f"{_or_dash(mean(one, name, 0, 0.25))}, {_or_dash(mean(one, name, 0.75))}" for name in _BY_RUN),
            f"{one.seconds:,.0f}",
            f"{one.processor:,.0f}",
            f"{one.load:.0f}",
        ]
        for cell, found in groups.items()
        for one in found
    ]
    said = (
        "Held-out win rate after the last step, and the difference to the first cell, paired by seed. "
        "Intervals are 95 %, over seeds; those of one seed are of its episodes. Overlap: designs that repeat "
        f"a program of {suite}.",
        "Designs and plays, means over seeds:",
        f"Each run: {suite} (plays) at each evaluation; means of the first and of the last quarter; seconds, "
        "processor seconds and the load of the machine.",
    )
    tables = (
        _table(["cell", "seeds", *plan.reported, f"difference on {suite}", "overlap", "plays"], results),
        _table(["cell", *_FIGURES], designs),
        _table(["cell, seed", f"{suite} (plays)", *_BY_RUN, "seconds", "processor", "load"], runs),
    )
    return "\n\n".join(part for pair in zip(said, tables, strict=True) for part in pair) + "\n"


_FIGURES: dict[str, Callable[[Record], float | None]] = {
    "level, first quarter": lambda one: mean(one, "level", 0, 0.25),
    "level, last quarter": lambda one: mean(one, "level", 0.75),
    "band, last quarter": lambda one: mean(one, "band", 0.75),
    f"gradient, last {_LAST}": lambda one: mean(one, "gradient", 1 - _LAST / max(_LAST, len(one.rounds))),
    "plain, last quarter": lambda one: mean(one, "plain", 0.75),
    "hinted, last quarter": lambda one: mean(one, "hinted", 0.75),
    "reward, last quarter": lambda one: mean(one, "reward", 0.75),
    "valid": lambda one: mean(one, "valid"),
    "Vendi": lambda one: mean(one, "vendi"),
    "near duplicates": lambda one: mean(one, "near_duplicates"),
    "staleness": lambda one: mean(one, "staleness"),
}
_BY_RUN = ("level", "band", "gradient", "plain", "reward", "valid")


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
