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
from engine.records import history, status
from engine.run import RunDirectory
from engine.views import report_diversity
from engine.views.charts import BLUE, COLOURS, GREEN, GREY, Row, curves, figure, trace
from engine.views.overview import about

SHOWN = 3
_RANKED = """SELECT s.design, s.round, s.win, s.regret, s.reward, s.state, e.title, e.skill, e.source, e.hint,
    e.family, e.difficulty, l.flag, json_extract(l.fields, '$.flag_reason') AS flag_reason,
    json_extract(s.fields, '$.noise_floor') AS noise,
    s.low, json_extract(s.fields, '$.regret_high') AS high,
    json_extract(s.fields, '$.regret_paid') AS paid,
    json_extract(s.fields, '$.leak') AS leak
FROM (SELECT *, json_extract(fields, '$.regret_low') AS low FROM scores ORDER BY {0} LIMIT ?) s
JOIN environments e USING (design) LEFT JOIN labels l USING (design) ORDER BY {0}"""
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
            remedy="Check that the run has started and that its disk has room, then repeat `spade report`.",
        ) from error
    return run.report


def render(run: RunDirectory, connection: sqlite3.Connection) -> str:
    """Return the page as HTML. Raises sqlite3.Error."""
    import plotly.offline

    state = status.read(connection)
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
        start=state.notes.get("started"),
        written=time.strftime("%Y-%m-%d %H:%M"),
        recipe=run.config_file.read_text(encoding="utf-8") if run.config_file.exists() else "",
        library=markupsafe.Markup(plotly.offline.get_plotlyjs()),
        figures=figures(connection),
        diversity=report_diversity.section(connection),
        groups=[("Best environments", best), ("Worst environments", worst)],
    )


def figures(connection: sqlite3.Connection) -> list[Row]:
    """Return the curves of a run; a curve without data is left out. Raises sqlite3.Error."""
    rounds = [json.loads(row[0]) for row in connection.execute("SELECT summary FROM rounds ORDER BY round")]
    tree = status.lineage(connection)
    batches = status.surviving(connection, tree)
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
        *_learner(batches),
        *_tool_use(connection),
        _tokens(connection, batches),
        *(_lengths(batches, role) for role in ("agent", "designer")),
    ]
    return [one for one in drawn if one]


def extremes(connection: sqlite3.Connection) -> tuple[list[Row], list[Row]]:
    """Return the environments with the highest and with the lowest reward, each with its transcripts.

    Many share the highest and the lowest reward; among those the lower bound of the regret decides.
    """
    best = _rows(connection, _RANKED.format("reward DESC, low DESC, win, design"), SHOWN)
    shown = {row["design"] for row in best}
    worst = _rows(connection, _RANKED.format("reward, low, win DESC, design DESC"), 2 * SHOWN)
    worst = [row for row in worst if row["design"] not in shown][:SHOWN]
    for row in (*best, *worst):
        row["plays"] = _plays(connection, row["design"])
    return best, worst


def _plays(connection: sqlite3.Connection, design: str) -> list[Row]:
    """Return a plain and a hinted episode of a design: if recorded, a lost plain and a won hinted one."""
    rows = _rows(
        connection,
        "SELECT * FROM transcripts WHERE design = ? ORDER BY arm DESC, (arm = 'plain') = won, episode",
        design,
    )
    chosen = {row["arm"]: row for row in reversed(rows)}
    return [row | {"turns": json.loads(row["turns"])} for row in chosen.values()]


def _learner(batches: Sequence[Row]) -> list[Row | None]:
    """Draw the learner's own figures over the steps of the surviving batches."""
    rows = [{"round": row["step"], **json.loads(row["metrics"])} for row in batches]
    return [
        curves(title, rows, names, x="step")
        for title, names in (
            ("Loss", {"loss": "loss"}),
            ("Entropy of the policy", {"entropy": "entropy"}),
            ("Gradient norm", {"grad_norm": "norm"}),
            ("Importance ratio: KL and clipping", {"kl": "KL", "clip_fraction": "clipped share"}),
        )
    ]


def _held_out(connection: sqlite3.Connection, tree: Lineage) -> Row | None:
    """Draw the win rates by the weights on the path to the current ones."""
    alive = status.alive_evaluation(tree)
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
                "error_y": {"type": "data", "array": intervals, "width": 3},
                "name": suite,
                "mode": "lines+markers",
                "line": {"color": colour},
            }
        )
    return figure("Held-out win rate (95 % intervals)", traces, "step", (0, 1))


def _regret(connection: sqlite3.Connection) -> Row | None:
    """Draw the mean regret of the windows that closed in a round with its 95 % interval.

    The noise is the standard error of a single environment's regret.
    """
    rows = _rows(
        connection,
        "SELECT round, COUNT(*) AS n, AVG(regret) AS mean, AVG(regret * regret) AS square, "
        "AVG(json_extract(fields, '$.noise_floor')) AS noise FROM scores "
        "WHERE regret IS NOT NULL GROUP BY round ORDER BY round",
    )
    if not rows:
        return None
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
    return figure("Regret: hinted - plain return, closed windows", [band, *line, *floor], "round")


def _tool_use(connection: sqlite3.Connection) -> list[Row | None]:
    """Draw what plays with tools do; nothing for games, and for runs from before this was recorded."""
    if not _rows(connection, "SELECT name FROM sqlite_master WHERE name = 'tool_use'"):
        return []
    rows = _rows(
        connection,
        "SELECT round, AVG(calls) AS calls, 1.0 * SUM(malformed) / MAX(SUM(turns), 1) AS malformed, "
        "1.0 * SUM(done) / MAX(SUM(instructions), 1) AS done FROM tool_use GROUP BY round ORDER BY round",
    )
    shares = {"malformed": "turns with malformed calls", "done": "instructions completed"}
    return [
        curves("Tool calls per play", rows, {"calls": "calls"}),
        curves("Tool use: shares", rows, shares, (0, 1)),
    ]


def _validity(rounds: Sequence[Row]) -> Row | None:
    points = [
        (row["round"], row["accepted"] / (row["accepted"] + row["rejected"]))
        for row in rounds
        if row["accepted"] + row["rejected"]
    ]
    return figure("Share of designs that pass the validator", trace(points, GREEN), "round", (0, 1))


def _tokens(connection: sqlite3.Connection, batches: Sequence[Row]) -> Row | None:
    """Draw tokens per second between the ends of two batches: all episodes of the later one's round."""
    tokens = dict(connection.execute("SELECT round, SUM(tokens) FROM episodes GROUP BY round").fetchall())
    points = [
        (later["round"], tokens[later["round"]] / (later["at"] - earlier["at"]))
        for earlier, later in itertools.pairwise(batches)
        if later["round"] in tokens and later["at"] > earlier["at"]
    ]
    return figure("Sampled tokens per second, whole loop", trace(points, GREY), "round")


def _lengths(batches: Sequence[Row], role: str) -> Row | None:
    """Draw the lengths of samples as generated and as trained: one bar per power of two."""
    metrics = json.loads(batches[-1]["metrics"]) if batches else {}
    traces = []
    for colour, kind in ((GREY, "generated"), (BLUE, "trained")):
        prefix = f"{kind}_{role}_under_"
        counts = {int(name.removeprefix(prefix)): n for name, n in metrics.items() if name.startswith(prefix)}
        if counts:
            bars = {
                "x": [f"< {bound}" for bound in sorted(counts)],
                "y": [counts[bound] for bound in sorted(counts)],
            }
            traces.append(bars | {"type": "bar", "name": kind, "marker": {"color": colour}})
    return figure(f"Lengths of {role} samples (count by tokens)", traces, "tokens")


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
