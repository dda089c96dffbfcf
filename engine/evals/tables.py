"""Results as text and HTML: one evaluation, two of them compared, several as rows of one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from engine.errors import ConfigError
from engine.evals.records import Summary, read_samples, read_summary, scores
from engine.evals.statistics import Estimate, difference


def summary_table(summary: Summary) -> str:
    """Return the figures of one evaluation, groups and baselines under each suite."""
    lines = [f"{'suite':<34} {'mean':>6} {'95 % interval':>16} {'items':>6} {'samples':>8}"]
    for name, suite in summary.suites.items():
        if suite.model is None:
            lines.append(f"{name:<34} not played: {suite.missing or 'no sample has an outcome'}")
            continue
        for label, one in [
            (name, suite.model),
            *((f"  {group}", found) for group, found in suite.groups.items()),
        ]:
            if label == name or len(suite.groups) > 1:
                lines.append(f"{label:<34} {_cells(one.mean)} {one.items:>6} {one.samples:>8}")
        lines += [f"{f'  ({policy} agent)':<34} {_cells(mean)}" for policy, mean in suite.baselines.items()]
        rates = [f"pass@{k} {rate:.3f}" for k, rate in suite.model.pass_at.items() if k > 1]
        lines += [f"  {', '.join(rates)}"] if rates else []
        lines += [f"  {suite.lost} samples have no result"] if suite.lost else []
        copies = [f"{count} of {source}" for source, count in suite.overlap.items() if count]
        lines += [f"  items that share text with the training: {', '.join(copies)}"] if copies else []
    return "\n".join(lines)


def compared(first: Path, second: Path) -> list[dict[str, Any]]:
    """Return the paired difference of each suite, or the reason why there is none."""
    before, after = read_summary(first), read_summary(second)
    ours, theirs = list(read_samples(first)), list(read_samples(second))
    rows = []
    for name in dict.fromkeys([*before.suites, *after.suites]):
        row: dict[str, Any] = {"suite": name, "items": 0, "left_out": 0, "note": ""}
        rows.append(row)
        old, new = (one.conditions.get("suites", {}).get(name) for one in (before, after))
        if old is None or new is None:
            row["note"] = f"only in {second if old is None else first}"
            continue
        if old["version"] != new["version"]:
            row["note"] = f"other data: {old['version']!r} and {new['version']!r}"
            continue
        if old["sampling"] != new["sampling"]:
            row["note"] = "sampled with other settings"
        found = difference(scores(ours, name), scores(theirs, name))
        if found is None:
            row["note"] = "no common item"
            continue
        row |= {"items": found.items, "left_out": found.left_out}
        row |= {"difference": found.mean.value, "low": found.mean.low, "high": found.mean.high}
    return rows


def across(results: Sequence[Path], *, select: str = "") -> dict[str, Any]:
    """Return several evaluations as rows and suites as columns.

    ``select`` chooses the best row by a suite of a validation split, which then is no column: a figure that
    chose a checkpoint is too high to be reported. Raises ConfigError for a suite of a test split.
    """
    summaries = [(path, read_summary(path)) for path in results]
    columns = list(dict.fromkeys(name for _, summary in summaries for name in summary.suites))
    if select:
        _require_validation(select, [summary for _, summary in summaries])
        columns.remove(select)
    rows, chosen, best = [], None, float("-inf")
    for path, summary in summaries:
        cells = {}
        for name in columns:
            found = summary.suites.get(name)
            if found is not None and found.model is not None:
                mean = found.model.mean
                cells[name] = {"mean": mean.value, "low": mean.low, "high": mean.high}
        row = {"name": _label(path, summary), "results": str(path), "suites": cells}
        judged = summary.suites[select].model if select else None
        if judged is not None and judged.mean.value > best:
            chosen, best = row["name"], judged.mean.value
        rows.append(row)
    return {"columns": columns, "rows": rows, "selected_by": select, "selected": chosen}


def text_table(table: dict[str, Any]) -> str:
    """Return :func:`across` as text."""
    width = max([4, *(len(row["name"]) for row in table["rows"])])
    lines = []
    for column in table["columns"]:
        lines.append(column)
        for row in table["rows"]:
            mark = "*" if row["name"] == table["selected"] else " "
            cell = row["suites"].get(column)
            shown = _cells(Estimate(cell["mean"], cell["low"], cell["high"])) if cell else "-"
            lines.append(f" {mark} {row['name']:<{width}} {shown}")
    if table["selected"]:
        lines.append(f"* chosen by {table['selected_by']}, which is not reported")
    return "\n".join(lines)


def page(table: dict[str, Any]) -> str:
    """Return :func:`across` as a page: the table, and each suite over the rows."""
    from plotly.offline import get_plotlyjs

    from engine.views.charts import BLUE, figure

    charts = []
    for column in table["columns"]:
        points = [(row["name"], row["suites"][column]) for row in table["rows"] if column in row["suites"]]
        line = {
            "x": [name for name, _ in points],
            "y": [cell["mean"] for _, cell in points],
            "error_y": {
                "type": "data",
                "symmetric": False,
                "array": [cell["high"] - cell["mean"] for _, cell in points],
                "arrayminus": [cell["mean"] - cell["low"] for _, cell in points],
            },
            "mode": "lines+markers",
            "line": {"color": BLUE},
            "name": column,
        }
        charts.append(figure(column, [line], "checkpoint", (0, 1)))
    environment = jinja2.Environment(loader=jinja2.PackageLoader("engine", "evals"), autoescape=True)
    return environment.get_template("page.html.j2").render(table, charts=charts, plotly=get_plotlyjs())


def _require_validation(select: str, summaries: Sequence[Summary]) -> None:
    for summary in summaries:
        found = summary.suites.get(select)
        if found is None or found.model is None:
            raise ConfigError(f"Not every evaluation has the suite {select!r}.", remedy="Evaluate it first.")
        if found.split != "validation":
            raise ConfigError(
                f"{select!r} is a test split: what is reported may not choose the checkpoint.",
                remedy="Choose by a validation split, such as reasoning-gym-hard:validation.",
            )


def _label(path: Path, summary: Summary) -> str:
    conditions = summary.conditions
    if "run" in conditions:
        return f"{conditions['run']}@{conditions['checkpoint']}"
    return str(conditions.get("model") or path.name)


def _cells(mean: Estimate) -> str:
    return f"{mean.value:6.3f} {f'[{mean.low:.3f}, {mean.high:.3f}]':>16}"
