"""The report: self-contained, with curves and environments, and safe against what models write."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
from scenes import small_run
from scenes.small_run import batch, evaluation, events, finished, policy, ready, scored, summary

from bus.messages import Heartbeat
from engine import recipe
from engine.errors import SpadeError
from engine.machine import describe
from engine.records import history
from engine.run import RunDirectory
from engine.views import report


def run_of(path: Path, *, empty: bool = False) -> RunDirectory:
    run = RunDirectory(path / "toy")
    run.root.mkdir()
    run.config_file.write_text(recipe.dump(small_run.config(path)))
    connection = history.create(run.database)
    if not empty:
        messages = [
            policy(0),
            small_run.serving(0),
            evaluation(0),
            small_run.rejected("d9"),
            small_run.failed("x"),
        ]
        for at in range(3):
            messages += [summary(at), policy(at + 1), batch(at, at + 1), evaluation(at + 1)]
        for index in range(8):
            design = f"d{index}"
            messages += [ready(design), scored(design, round_=index % 3, reward=index / 10)]
            messages += [finished(f"{arm}{index}", design, 1.0, arm, round_=1) for arm in ("plain", "hinted")]
        history.apply(connection, events(messages))
        machine = msgspec.to_builtins(describe(["msgspec"]))
        started = {"at": 1.0, "command": ["spade", "run", "toy"], "commit": "c0ffee", "machine": machine}
        history.put_note(connection, "started", started)
        pool = {"pool.server-0.idle": 0.25, "pool.server-1.idle": 0.35, "pool.servers": 2.0}
        beat = Heartbeat(role="agent", instance="agent-0", state="running", statistics=pool)
        history.put_gauges(connection, [(1.0, beat)])
    connection.close()
    return run


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = run_of(tmp_path_factory.mktemp("runs"))
    assert report.write(run) == run.report
    return run.report.read_text()


def test_the_page_needs_nothing_else(page: str) -> None:
    assert "<script src" not in page
    assert "<link" not in page
    assert "plotly.js v" in page[:20000]


def test_the_page_says_what_made_the_run(page: str) -> None:
    for part in ("spade run toy", "commit c0ffee", f"msgspec {version('msgspec')}", "cores"):
        assert part in page


def test_each_curve_is_there(page: str) -> None:
    titles = (
        "Held-out win rate", "Designer difficulty", "environments in the band", "plays with a gradient",
        "Return of the agent", "Regret", "designs that are valid", "Staleness", "Sampled tokens per second",
        "Rejected designs by rung", "Failed episodes by kind", "Win rate by skill",
        "by family (mid)", "Win rates of environments", "Seconds of a step",
        "Shares of the time of a round", "last tenth of the plays", "servers wait",
        "Designer reward", "Lengths of agent samples", "Loss", "noise of one environment",
    )  # fmt: skip
    assert [title for title in titles if title not in page] == []


def test_best_and_worst_environments_come_with_code_hint_and_transcript(page: str) -> None:
    best, _, worst = page.partition("with the surest regret")[2].partition("with the lowest reward")
    worst = worst.partition("All environments")[0]
    places = [best.index(f"Counting d{index}") for index in (7, 6, 5)]
    assert places == sorted(places)
    assert "Counting d0" in worst
    assert "Counting d7" not in worst
    for part in ("CountEnv", "hinted episode, return 1.00", "plain episode, return 1.00"):
        assert part in best


def test_what_a_model_wrote_is_text_not_markup(page: str) -> None:
    assert "<b>count</b>" not in page
    assert "Count &lt;i&gt;up&lt;/i&gt;." in page
    assert "&lt;count&gt;" in page


def test_a_run_without_events_has_a_report_too(tmp_path: Path) -> None:
    run = run_of(tmp_path, empty=True)
    report.write(run)
    assert "There are no measurements yet" in run.report.read_text()


def test_a_run_that_never_began_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpadeError, match="report of run none cannot be written"):
        report.write(RunDirectory(tmp_path / "none"))


def test_the_held_out_curve_is_that_of_the_surviving_weights(tmp_path: Path) -> None:
    connection = history.create(tmp_path / "run.db")
    first_life = [policy(0), evaluation(0), evaluation(10), evaluation(20)]
    history.apply(connection, events([*first_life, policy(13, 1), evaluation(25, 1)]))
    drawn, families = report.figures(connection)
    connection.close()
    assert [line["name"] for line in families["data"]] == ["seq"]
    assert "Held-out win rate" in drawn["layout"]["title"]["text"]
    (line,) = drawn["data"]
    assert (line["x"], line["y"]) == ([0, 10, 25], [0.5, 0.6, 0.75])


def test_rounds_and_steps_have_their_hours_plays_and_tokens(tmp_path: Path) -> None:
    connection = history.create(tmp_path / "run.db")
    plays = [finished("a"), finished("b"), finished("c", round_=1)]
    history.apply(connection, events([*plays, batch(0, 1), batch(1, 2)], at=3600.0))
    axes = report.axes(connection)
    connection.close()
    last = {"hours": pytest.approx(2 / 3600), "plays": 3, "tokens": 9}
    assert axes["round"] == {0: {"hours": pytest.approx(1 / 3600), "plays": 2, "tokens": 6}, 1: last}
    assert axes["step"] == {1: axes["round"][0], 2: last}


def test_two_runs_are_laid_over_each_other(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    (tmp_path / "other").mkdir()
    other = run_of(tmp_path / "other")
    report.write(run, other)
    page = run.report.read_text()
    assert "Dashed lines are the run" in page
    connection = history.open_for_reading(run.database)
    ours = report.figures(connection)
    connection.close()
    for alone, laid in zip(ours, report.overlaid(ours, ours, "a", "b"), strict=True):
        assert len(laid["data"]) == 2 * len(alone["data"])
        names = [trace["name"].split()[0] for trace in laid["data"]]
        assert names == ["a"] * len(alone["data"]) + ["b"] * len(alone["data"])


def test_few_environments_are_not_shown_twice(tmp_path: Path) -> None:
    connection = history.create(tmp_path / "run.db")
    history.apply(connection, events([ready("d1"), scored("d1"), ready("d2"), scored("d2", reward=0.1)]))
    best, worst = report.extremes(connection)
    connection.close()
    assert [row["design"] for row in best] == ["d1", "d2"]
    assert worst == []
