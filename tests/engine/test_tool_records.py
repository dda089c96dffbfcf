"""Tool use in the records of a run: curves in the report, and the judge in the status."""

from __future__ import annotations

from pathlib import Path

import msgspec
from scenes.small_run import events, finished, ready, rejected

from bus.messages import ToolUse
from engine.records import history, status
from engine.views import overview, report


def test_the_report_draws_calls_malformed_turns_and_instructions(tmp_path: Path) -> None:
    connection = history.create(tmp_path / "run.db")
    used = []
    for number in range(4):
        play, uses = finished(f"e{number}", round_=number // 2), ToolUse(3 + number, number % 2, 1, 2)
        used.append(msgspec.structs.replace(play, turns=4, tool_use=uses))
    history.apply(connection, events(used))
    connection.close()
    drawn = {
        one["layout"]["title"]["text"]: one["data"]
        for one in report.figures(history.open_for_reading(tmp_path / "run.db"))
    }
    calls, shares = drawn["Tool calls per play"], drawn["Tool use: shares"]
    assert [trace["y"] for trace in calls] == [[3.5, 5.5]]
    assert [trace["y"] for trace in shares] == [[0.125, 0.125], [0.5, 0.5]]


def test_a_run_of_games_draws_none_of_it(tmp_path: Path) -> None:
    connection = history.create(tmp_path / "run.db")
    history.apply(connection, events([finished("e1")]))
    assert not any("ool" in one["layout"]["title"]["text"] for one in report.figures(connection))
    connection.execute("DROP TABLE tool_use")
    report.figures(connection)


def test_the_status_tells_how_often_the_judge_refused_what_can_be_won(tmp_path: Path) -> None:
    connection = history.create(tmp_path / "run.db")
    told = [*(ready(f"d{number}") for number in range(3)), rejected("d8"), rejected("d9", rung="judge")]
    history.apply(connection, events(told))
    state = status.read(connection)
    assert state.judge_refusals == 1
    assert overview._judge(state) == [("judge", "refused 1 programs whose plan wins (25% of them)")]
