"""The report of a run: one self-contained HTML file with curves, environments and transcripts."""

from __future__ import annotations

import itertools
import json
import math
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import jinja2
import markupsafe

from engine.errors import SpadeError
from engine.files import replace
from engine.lineage import Lineage
from engine.records import diversity, history, status
from engine.records.envs import Catalogue
from engine.run import RunDirectory
from engine.views.charts import BLUE, COLOURS, GREEN, GREY, Row, by_name, curves, figure, trace
from engine.views.overview import about

SHOWN = 3
LISTED = 2000
_RANKED = """SELECT s.design, s.round, s.win, s.regret, s.reward, s.state, e.title, e.skill, e.source, e.hint,
    e.family, e.difficulty, l.flag, json_extract(l.fields, '$.flag_reason') AS flag_reason,
    json_extract(s.fields, '$.noise_floor') AS noise,
    s.low, json_extract(s.fields, '$.regret_high') AS high,
    json_extract(s.fields, '$.regret_paid') AS paid,
    json_extract(s.fields, '$.leak') AS leak
FROM (SELECT *, json_extract(fields, '$.regret_low') AS low FROM scores ORDER BY {0} LIMIT ?) s
JOIN environments e USING (design) LEFT JOIN labels l USING (design) ORDER BY {0}"""
_FLAGS = """SELECT cohort, flag, COUNT(*) * 1.0 / SUM(COUNT(*)) OVER (PARTITION BY cohort)
FROM environments JOIN labels USING (design) GROUP BY cohort, flag ORDER BY cohort"""
_REJECTED = "SELECT cohort, rung, COUNT(*) FROM rejections GROUP BY cohort, rung ORDER BY cohort"
_FAILED = "SELECT round, failure, COUNT(*) FROM failures GROUP BY round, failure ORDER BY round"
_SKILLS = """SELECT s.round, e.skill, AVG(s.win) FROM scores s JOIN environments e USING (design)
GROUP BY s.round, e.skill ORDER BY s.round"""
_AXES = """SELECT round, (MAX(at) - MIN(MIN(at)) OVER ()) / 3600 AS hours, SUM(COUNT(*)) OVER (ORDER BY round)
AS plays, SUM(SUM(tokens)) OVER (ORDER BY round) AS tokens FROM episodes GROUP BY round"""
_TEMPLATE = Path(__file__).with_name("report.html.j2")


def write(run: RunDirectory, beside: RunDirectory | None = None) -> Path:
    """Write ``report.html`` of ``run`` and return its path, with the curves of ``beside`` over its own.

    Raises SpadeError when a run has no readable history or the file cannot be written.
    """
    try:
        over: list[Row] = []
        if beside is not None:
            with closing(history.open_for_reading(beside.database)) as connection:
                over = figures(connection)
        with closing(history.open_for_reading(run.database)) as connection:
            page = render(run, connection, over, beside.root.name if beside else "")
        replace(run.report, page.encode())
    except (sqlite3.Error, OSError) as error:
        raise SpadeError(
            f"The report of run {run.root.name} cannot be written: {error}.",
            remedy="Check that the run has started and that its disk has room, then repeat `spade report`.",
        ) from error
    return run.report


def render(
    run: RunDirectory, connection: sqlite3.Connection, over: Sequence[Row] = (), other: str = ""
) -> str:
    """Return the page as HTML, with the curves ``over`` of the run ``other``. Raises sqlite3.Error."""
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
        figures=overlaid(figures(connection), over, run.root.name, other) if other else figures(connection),
        other=other,
        axes=axes(connection),
        environments=Catalogue(connection).select(sort="regret_low", limit=LISTED),
        listed=LISTED,
        groups=[
            ("Environments with the surest regret", best),
            ("Environments with the lowest reward", worst),
        ],
    )


def figures(connection: sqlite3.Connection) -> list[Row]:
    """Return the curves of a run; a curve without data is left out. Raises sqlite3.Error."""
    rounds = [json.loads(row[0]) for row in connection.execute("SELECT summary FROM rounds ORDER BY round")]
    tree = status.lineage(connection)
    batches = status.surviving(connection, tree)
    shares = {"in_band": "environments in the band", "gradient_share": "plays with a gradient"}
    ages = {"max_staleness": "max", "mean_staleness": "mean"}
    drawn = [
        *_held_out(connection, tree),
        curves("Designer difficulty (mean level of live programs)", rounds, {"difficulty": "level"}),
        curves("Return of the agent", rounds, {"plain": "plain", "hinted": "hinted"}),
        curves("Shares", rounds, shares, (0, 1)),
        _regret(connection),
        _validity(connection),
        _stacked(connection, "Rejected designs by rung", "designs", _REJECTED),
        _stacked(connection, "Failed episodes by kind", "episodes", _FAILED),
        _win_rates(rounds),
        by_name("Win rate by skill (closed windows)", connection.execute(_SKILLS), "round", (0, 1)),
        *_diversity(connection),
        _flagged(connection),
        curves("Designer reward (mean)", rounds, {"reward": "reward"}),
        curves("Staleness of trained tokens (steps)", batches, ages),
        *_learner(batches),
        *_tool_use(connection),
        curves(
            "Seconds of a step and of a weight update",
            _seconds(connection, batches),
            {"step": "step", "update": "update"},
        ),
        *_waits(connection, batches),
        _tokens(connection, batches),
        *(_lengths(batches, role) for role in ("agent", "designer")),
    ]
    return [one for one in drawn if one]


def overlaid(ours: Sequence[Row], theirs: Sequence[Row], run: str, other: str) -> list[Row]:
    """Return the charts of ``run`` with the traces of the same chart of ``other`` as dashed lines."""
    by_title = {one["layout"]["title"]["text"]: one for one in theirs}
    laid = []
    for chart in ours:
        traces = [one | {"name": f"{run} {one.get('name', '')}".strip()} for one in chart["data"]]
        for one in by_title.get(chart["layout"]["title"]["text"], {}).get("data", []):
            dashed = {"line": {**one["line"], "dash": "dash"}} if "line" in one else {}
            traces.append(one | dashed | {"name": f"{other} {one.get('name', '')}".strip()})
        laid.append({"data": traces, "layout": chart["layout"] | {"showlegend": True}})
    return laid


def extremes(connection: sqlite3.Connection) -> tuple[list[Row], list[Row]]:
    """Return the environments with the surest regret and those with the lowest reward, with transcripts.

    The first are ranked by the lower bound of their regret: many share the highest reward by luck.
    """
    best = history.rows(connection, _RANKED.format("low DESC, reward DESC, win, design"), SHOWN)
    shown = {row["design"] for row in best}
    worst = history.rows(connection, _RANKED.format("reward, low, win DESC, design DESC"), 2 * SHOWN)
    worst = [row for row in worst if row["design"] not in shown][:SHOWN]
    for row in (*best, *worst):
        row["plays"] = _plays(connection, row["design"])
    return best, worst


def _plays(connection: sqlite3.Connection, design: str) -> list[Row]:
    """Return a plain and a hinted episode of a design: if recorded, a lost plain and a won hinted one."""
    rows = history.rows(
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
            (
                "Loss",
                {
                    "loss": "loss",
                    "loss_agent": "agent",
                    "loss_designer": "designer",
                    "loss_supervised": "mix",
                },
            ),
            ("Entropy of the policy", {"entropy": "entropy"}),
            ("Gradient norm", {"grad_norm": "norm"}),
            ("Learning rate", {"learning_rate": "rate"}),
            (
                "Trainer against server",
                {"ratio_deviation": "deviation of ratios", "router_mismatch": "other experts"},
            ),
            ("Importance ratio: KL and clipping", {"kl": "KL", "clip_fraction": "clipped share"}),
        )
    ]


def axes(connection: sqlite3.Connection) -> dict[str, dict[int, Row]]:
    """Return hours, plays and tokens up to the end of each round and step. Raises sqlite3.Error."""
    rounds = {row.pop("round"): row for row in history.rows(connection, _AXES)}
    steps = connection.execute("SELECT step, round FROM batches ORDER BY sequence").fetchall()
    return {"round": rounds, "step": {step: rounds[round_] for step, round_ in steps if round_ in rounds}}


def _held_out(connection: sqlite3.Connection, tree: Lineage) -> list[Row | None]:
    """Draw the win rates by the weights on the path to the current ones, in all and by family."""
    alive = status.alive_evaluation(tree)
    rows = history.rows(connection, f"SELECT * FROM evaluations WHERE {alive} ORDER BY suite, step, sequence")
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
    families = [
        by_name(
            f"Held-out win rate by family ({suite})",
            [(step, *one) for step, row in by_step.items() for one in json.loads(row["by_family"]).items()],
            "step",
            (0, 1),
        )
        for suite, by_step in suites.items()
    ]
    return [figure("Held-out win rate (95 % intervals)", traces, "step", (0, 1)), *families]


def _regret(connection: sqlite3.Connection) -> Row | None:
    """Draw the mean regret of the windows that closed in a round with its 95 % interval.

    The noise is the standard error of a single environment's regret.
    """
    rows = history.rows(
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
    return figure("Regret: hinted - plain return, closed windows", [band, *line, *floor], "round", y="regret")


def _tool_use(connection: sqlite3.Connection) -> list[Row | None]:
    """Draw what plays with tools do; nothing for games, and for runs from before this was recorded."""
    if not history.rows(connection, "SELECT name FROM sqlite_master WHERE name = 'tool_use'"):
        return []
    rows = history.rows(
        connection,
        "SELECT round, AVG(calls) AS calls, 1.0 * SUM(malformed) / MAX(SUM(turns), 1) AS malformed, "
        "1.0 * SUM(done) / MAX(SUM(instructions), 1) AS done FROM tool_use GROUP BY round ORDER BY round",
    )
    shares = {"malformed": "turns with malformed calls", "done": "instructions completed"}
    return [
        curves("Tool calls per play", rows, {"calls": "calls"}),
        curves("Tool use: shares", rows, shares, (0, 1)),
    ]


def _diversity(connection: sqlite3.Connection) -> list[Row | None]:
    rows = diversity.rounds(connection)
    varied = {"vendi": "programs (Vendi score)", "effective_skills": "skills", "documents": "documents"}
    repeated = {"duplicates": "equal in the round", "near_duplicates": "nearly equal"}
    return [
        curves("Diversity: effective number", rows, varied),
        curves("Repeated programs (share)", rows, repeated, (0, 1)),
    ]


def _flagged(connection: sqlite3.Connection) -> Row | None:
    """Draw the shares of designs that do not match their ticket."""
    rows: dict[int, Row] = {}
    flags: dict[str, str] = {}
    for cohort, flag, share in connection.execute(_FLAGS):
        row = rows.setdefault(cohort, {"round": cohort})
        if flag:
            row[flag], flags[flag] = share, flag.replace("_", " ")
    shares = [dict.fromkeys(flags, 0.0) | row for row in rows.values()]
    return curves("Designs that miss their ticket (share)", shares, flags, (0, 1))


def _validity(connection: sqlite3.Connection) -> Row | None:
    points = sorted(history.valid_shares(connection).items())
    return figure("Share of designs that are valid", trace(points, GREEN), "round", (0, 1))


def _stacked(connection: sqlite3.Connection, title: str, counted: str, query: str) -> Row | None:
    """Draw the counts of ``query``, rows of (round, kind, count), as stacked bars."""
    kinds: dict[str, Row] = {}
    for round_, kind, count in connection.execute(query):
        bars = kinds.setdefault(kind, {"x": [], "y": [], "type": "bar", "name": kind})
        bars["x"].append(round_)
        bars["y"].append(count)
    chart = figure(title, [kinds[kind] for kind in sorted(kinds)], "round", y=counted)
    return chart and {
        "data": chart["data"],
        "layout": chart["layout"] | {"barmode": "stack", "showlegend": True},
    }


def _win_rates(rounds: Sequence[Row]) -> Row | None:
    """Draw how many environments of a round had which win rate."""
    kept = [row for row in rounds if sum(row["win_histogram"])]
    if not kept:
        return None
    bins = len(kept[0]["win_histogram"])
    counts = {
        "x": [row["round"] for row in kept],
        "y": [(at + 0.5) / bins for at in range(bins)],
        "z": [[row["win_histogram"][at] for row in kept] for at in range(bins)],
        "type": "heatmap",
        "colorscale": "Blues",
        "reversescale": True,
        "colorbar": {"thickness": 10},
    }
    return figure("Win rates of environments (count per round)", [counts], "round", (0, 1), y="win rate")


def _seconds(connection: sqlite3.Connection, batches: Sequence[Row]) -> list[Row]:
    """Return the seconds of each surviving step, and of the slowest server's update to its version."""
    updates = dict(
        connection.execute("SELECT version, MAX(seconds) FROM updates GROUP BY version").fetchall()
    )
    return [
        {"round": row["round"], "step": row["seconds"], "update": updates.get(row["version"])}
        for row in batches
    ]


def _waits(connection: sqlite3.Connection, batches: Sequence[Row]) -> list[Row | None]:
    """Draw who waits for whom: the learner's time, idle servers, and the last tenth of a round's plays."""
    idle: dict[int, float] = {}
    if history.rows(connection, "SELECT name FROM sqlite_master WHERE name = 'waits'"):
        idle = dict(connection.execute("SELECT round, idle FROM waits").fetchall())
    rows = [
        json.loads(row["metrics"]) | {"round": row["round"], "idle": idle.get(row["round"])}
        for row in batches
    ]
    shares = {
        "share_training": "learner trains",
        "share_publishing": "learner publishes",
        "share_waiting": "learner waits",
        "idle": "servers wait",
    }
    return [
        curves("Shares of the time of a round", rows, shares, (0, 1)),
        curves("Seconds for the last tenth of the plays", status.tails(connection), {"tail": "tail"}),
    ]


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
    return figure(f"Lengths of {role} samples (count by tokens)", traces, "tokens", y="samples")


def _highlighted(source: str) -> markupsafe.Markup:
    """Return Python source as coloured HTML; everything in it is escaped by the formatter."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    return markupsafe.Markup(highlight(source, PythonLexer(), HtmlFormatter(noclasses=True)))
