"""The report of a run: one self-contained HTML file with curves, environments and transcripts."""

from __future__ import annotations

import itertools
import json
import math
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from engine.errors import SpadeError
from engine.lineage import Lineage
from engine.records import history
from engine.records import status as standing
from engine.run import RunDirectory
from engine.views import report_diversity
from engine.views.charts import BLUE, COLOURS, GREEN, GREY, Row, curves, figure, trace
from engine.views.overview import about

SHOWN = 3
_RANKED = """SELECT s.design, s.round, s.win, s.regret, s.reward, s.state, e.title, e.skill, e.source, e.hint,
    e.family, e.difficulty, json_extract(s.fields, '$.noise_floor') AS noise,
    json_extract(s.fields, '$.regret_low') AS low, json_extract(s.fields, '$.regret_high') AS high,
    json_extract(s.fields, '$.regret_paid') AS paid,
    json_extract(s.fields, '$.leak') AS leak
FROM (SELECT * FROM scores s ORDER BY {0} LIMIT ?) s JOIN environments e USING (design) ORDER BY {0}"""
_TEMPLATE = Path(__file__).with_name("report.html.j2")


def write(run: RunDirectory) -> Path:
    """Write ``report.html`` of ``run`` and return its path.

    Raises SpadeError when the run has no readable history or the file cannot be written.
    """
    try:
        connection = history.open_for_reading(run.database)
        try:
            page = render(run, connection)
        finally:
            connection.close()
        temporary = run.report.with_suffix(".tmp")
        temporary.write_text(page, encoding="utf-8")
        temporary.replace(run.report)
    except (sqlite3.Error, OSError) as error:
        raise SpadeError(
            f"The report of run {run.root.name} cannot be written: {error}.",
            remedy="Check that the run has begun and that its disk has room, then call `spade report` again.",
        ) from error
    return run.report


def render(run: RunDirectory, connection: sqlite3.Connection) -> str:
    """Return the page as HTML. Raises sqlite3.Error."""
    import plotly.offline

    state = standing.read(connection)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATE.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["python"] = _highlighted
    best, worst = extremes(connection)
    return environment.get_template(_TEMPLATE.name).render(
        facts=about(run, state),
        state=state,
        written=time.strftime("%Y-%m-%d %H:%M"),
        recipe=run.config_file.read_text(encoding="utf-8") if run.config_file.exists() else "",
        # The library's own code, and figures that escape what they carry.
        library=markupsafe.Markup(plotly.offline.get_plotlyjs()),
        figures=[markupsafe.Markup(drawn) for drawn in figures(connection)],
        diversity=report_diversity.section(connection),
        groups=[("Best environments", best), ("Worst environments", worst)],
    )


def figures(connection: sqlite3.Connection) -> list[str]:
    """Return the curves as HTML fragments; a curve without data is left out."""
    rounds = [json.loads(row[0]) for row in connection.execute("SELECT summary FROM rounds ORDER BY round")]
    tree = standing.lineage(connection)
    batches = standing.surviving(connection, tree)
    shares = {"in_band": "environments in the band", "gradient_share": "plays with a gradient"}
    ages = {"max_staleness": "max", "mean_staleness": "mean"}
    drawn = [
        _held_out(connection, tree),
        curves("Designer difficulty (mean level of live programs)", rounds, {"difficulty": "level"}),
        curves("Return of the agent", rounds, {"plain": "plain", "hinted": "hinted"}),
        curves("Shares", rounds, shares, (0, 1)),
        _regret(connection),
        _validity(rounds),
        curves("Designer reward (mean)", rounds, {"reward": "reward"}),
        curves("Staleness of trained tokens (steps)", batches, ages),
        _tokens(connection, batches),
        *(_lengths(batches, role) for role in ("agent", "designer")),
    ]
    return [one for one in drawn if one]


def extremes(connection: sqlite3.Connection) -> tuple[list[Row], list[Row]]:
    """Return the environments with the highest and with the lowest reward, each with its transcripts."""
    best = _rows(connection, _RANKED.format("s.reward DESC, s.round DESC, s.design"), SHOWN)
    shown = {row["design"] for row in best}
    worst = _rows(connection, _RANKED.format("s.reward, s.round, s.design DESC"), 2 * SHOWN)
    worst = [row for row in worst if row["design"] not in shown][:SHOWN]
    for row in (*best, *worst):
        row["plays"] = _plays(connection, row["design"])
    return best, worst


def _plays(connection: sqlite3.Connection, design: str) -> list[Row]:
    """Return one plain and one hinted play of a design, won ones first where there are any."""
    rows = _rows(
        connection, "SELECT * FROM transcripts WHERE design = ? ORDER BY arm DESC, won DESC, episode", design
    )
    chosen = {row["arm"]: row for row in reversed(rows)}
    return [row | {"turns": json.loads(row["turns"])} for row in chosen.values()]


def _held_out(connection: sqlite3.Connection, tree: Lineage) -> str:
    """Draw the win rates of the weights on the path to the current ones."""
    alive = standing.alive_evaluation(tree)
    rows = _rows(connection, f"SELECT * FROM evaluations WHERE {alive} ORDER BY suite, step, sequence")
    suites: dict[str, dict[int, Row]] = {}
    for row in rows:
        suites.setdefault(row["suite"], {})[row["step"]] = row
    traces = []
    for colour, (suite, by_step) in zip(COLOURS * len(suites), suites.items(), strict=False):
        points = list(by_step.values())
        intervals = [1.96 * point["stderr"] for point in points]
        traces.append(
            {
                "x": [point["step"] for point in points],
                "y": [point["win"] for point in points],
                "error_y": {
                    "type": "data",
                    "array": intervals,
                    "width": 3,
                },
                "name": suite,
                "mode": "lines+markers",
                "line": {"color": colour},
            }
        )
    return figure("Held-out win rate (95 % intervals)", traces, "step", (0, 1))


def _regret(connection: sqlite3.Connection) -> str:
    """Draw the mean regret of the windows that closed in a round, with its 95 % interval, and what a single
    environment's regret would be by chance (a standard error).
    """
    rows = _rows(
        connection,
        "SELECT round, COUNT(*) AS n, AVG(regret) AS mean, AVG(regret * regret) AS square, "
        "AVG(json_extract(fields, '$.noise_floor')) AS noise FROM scores "
        "WHERE regret IS NOT NULL GROUP BY round ORDER BY round",
    )
    if not rows:
        return ""
    x = [row["round"] for row in rows]
    mean = [row["mean"] for row in rows]
    wide = [1.96 * math.sqrt(max(row["square"] - row["mean"] ** 2, 0) / row["n"]) for row in rows]
    above = [middle + half for middle, half in zip(mean, wide, strict=True)]
    below = [middle - half for middle, half in zip(mean, wide, strict=True)]
    band = {
        "x": x + x[::-1],
        "y": above + below[::-1],
        "fill": "toself",
        "mode": "lines",
        "line": {"width": 0},
        "fillcolor": "rgba(37, 99, 168, 0.15)",
        "name": "95 % interval",
        "hoverinfo": "skip",
    }
    line = trace(list(zip(x, mean, strict=True)), BLUE, "mean")
    noise = [(row["round"], row["noise"]) for row in rows if row["noise"] is not None]
    floor = trace(noise, GREY, "noise of one environment") if noise else []
    return figure("Regret (hinted - plain return) of closed windows", [band, *line, *floor], "round")


def _validity(rounds: Sequence[Row]) -> str:
    points = [
        (row["round"], row["accepted"] / (row["accepted"] + row["rejected"]))
        for row in rounds
        if row["accepted"] + row["rejected"]
    ]
    trace = {
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "name": "valid",
        "line": {"color": GREEN},
    }
    return figure("Share of designs that pass the validator", [trace] if points else [], "round", (0, 1))


def _tokens(connection: sqlite3.Connection, batches: Sequence[Row]) -> str:
    """Draw tokens a second between the ends of two batches: all plays of the later one's round."""
    tokens = dict(connection.execute("SELECT round, SUM(tokens) FROM episodes GROUP BY round").fetchall())
    points = [
        (later["round"], tokens[later["round"]] / (later["at"] - earlier["at"]))
        for earlier, later in itertools.pairwise(batches)
        if later["round"] in tokens and later["at"] > earlier["at"]
    ]
    trace = {
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "name": "tokens/s",
        "line": {"color": GREY},
    }
    return figure("Sampled tokens a second, over the whole loop", [trace] if points else [], "round")


def _lengths(batches: Sequence[Row], role: str) -> str:
    """Draw how long samples were when they were generated and when they were trained, over the whole run."""
    metrics = json.loads(batches[-1]["metrics"]) if batches else {}
    traces = []
    for colour, kind in ((GREY, "generated"), (BLUE, "trained")):
        prefix = f"{kind}_{role}_under_"
        counts = {int(name.removeprefix(prefix)): n for name, n in metrics.items() if name.startswith(prefix)}
        traces += trace(sorted(counts.items()), colour, kind)
    return figure(f"Lengths of {role} samples (how many below so many tokens)", traces, "tokens")


def _highlighted(source: str) -> markupsafe.Markup:
    """Return Python source as coloured HTML; everything in it is escaped by the formatter."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    return markupsafe.Markup(highlight(source, PythonLexer(), HtmlFormatter(noclasses=True)))


def _rows(connection: sqlite3.Connection, query: str, *parameters: Any) -> list[Row]:
    cursor = connection.execute(query, parameters)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]
