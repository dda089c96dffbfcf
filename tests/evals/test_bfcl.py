"""BFCL v4: right and empty plays of every entry, the turn loop, and state that stays apart."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from eval_scene import CONFIG, seat

from engine.evals import bfcl

pytestmark = pytest.mark.skipif(bool(bfcl.MultiTurn().available()), reason="bfcl-eval is not installed")


@pytest.mark.parametrize("category", bfcl.MULTI_TURN)
def test_right_plays_are_valid_and_empty_ones_are_not(category: str) -> None:
    entries = bfcl.entries(category)
    assert len(entries) == 200
    for entry, right in entries:
        # a right play may come after a wrong one of the same entry
        assert bfcl.check_turns(entry, right, [[] for _ in right])
        assert bfcl.check_turns(entry, right, [[turn] if turn else [] for turn in right]) == ""
    assert bfcl.check_turns(*entries[0], [])


def test_calls_leave_no_state() -> None:
    entry, _ = bfcl.entries("multi_turn_base")[0]
    first = bfcl.execute(entry, [["mkdir(dir_name='own')", "ls()"]])
    again = bfcl.execute(entry, [["ls()"]])
    assert "own" in first[1]
    assert "own" not in again[0]
    assert bfcl.execute(entry, [["mkdir(dir_name='own')"], ["ls()"]]) == first[1:]


def test_only_tools_of_the_entry_are_called() -> None:
    names = ["ls", "cd"]
    assert bfcl.spelled({"name": "cd", "arguments": {"folder": "a'); import os #"}}, names) == (
        'cd(folder="a\'); import os #")'
    )
    assert bfcl.spelled({"name": "exec", "arguments": {}}, names) is None
    assert bfcl.spelled({"name": "cd", "arguments": {"x=1, y": 2}}, names) is None


def calls(*made: tuple[str, dict[str, Any]]) -> str:
    return "".join(
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        for name, arguments in made
    )


async def test_a_play_goes_turn_by_turn() -> None:
    suite = bfcl.multi_turn("", CONFIG)
    item = suite.items(1, 0)[0]
    assert item.data[1][0] == [
        "cd(folder='document')",
        "mkdir(dir_name='temp')",
        "mv(source='final_report.pdf', destination='temp')",
    ]
    assert len(item.data[1]) == 4
    done = "Done."
    asked = seat(
        calls(("cd", {"folder": "document"}), ("mkdir", {"dir_name": "temp"})),
        calls(("mv", {"source": "final_report.pdf", "destination": "temp"})),
        done,
        calls(
            ("cd", {"folder": "temp"}),
            ("grep", {"file_name": "final_report.pdf", "pattern": "budget analysis"}),
        ),
        done,
        calls(("sort", {"file_name": "final_report.pdf"})),
        done,
        calls(
            ("cd", {"folder": ".."}),
            ("mv", {"source": "previous_report.pdf", "destination": "temp"}),
            ("cd", {"folder": "temp"}),
            ("diff", {"file_name1": "final_report.pdf", "file_name2": "previous_report.pdf"}),
        ),
        done,
    )
    outcome = await suite.play(item, asked)
    assert (outcome.score, outcome.reason) == (1.0, "")
    assert len(outcome.detail["turns"]) == 4
    assert "current_working_directory" in asked.asked[1][0]
    assert (await suite.play(item, seat(done))).score == 0.0


async def test_endless_calls_fail_the_entry() -> None:
    suite = bfcl.multi_turn("", CONFIG)
    outcome = await suite.play(suite.items(1, 0)[0], seat(calls(("ls", {}))))
    assert (outcome.score, outcome.reason) == (0.0, "more than 20 steps in a turn")


async def test_functions_that_were_held_back_come_with_their_turn() -> None:
    suite = bfcl.multi_turn("", CONFIG)
    item = next(item for item in suite.items(0, 0) if item.group == "multi_turn_miss_func")
    asked = seat("I cannot do that.")
    await suite.play(item, asked)
    assert [turn for turn, _ in asked.asked].count(bfcl.MORE_FUNCTIONS) == 1


def test_single_turn_has_all_categories() -> None:
    items = bfcl.single_turn("", CONFIG).items(0, 0)
    counts = Counter(item.group for item in items)
    assert set(counts) == {*bfcl.NON_LIVE, *bfcl.LIVE, *bfcl.UNANSWERED}
    assert (counts["simple_python"], counts["irrelevance"], counts["live_simple"]) == (400, 240, 258)


def first(values: Any) -> Any:
    """Choose the first accepted value, and of nested objects those of their fields."""
    found = next((value for value in values if value != ""), "")
    if isinstance(found, dict):
        return {key: first(value) for key, value in found.items() if "" not in value}
    return found


@pytest.mark.parametrize(
    ("category", "least"),
    [("simple_python", 0.95), ("multiple", 0.95), ("parallel", 0.9), ("live_simple", 0.9)],
)
async def test_right_calls_are_valid_and_none_is_not(category: str, least: float) -> None:
    valid = 0
    entries = bfcl.entries(category)
    for entry, right in entries:
        made = []
        for call in right:
            ((name, arguments),) = call.items()
            given = {key: first(values) for key, values in arguments.items() if "" not in values}
            made.append({"name": name.replace(".", "_"), "arguments": given})
        valid += bfcl.check_calls(entry, right, made) == ""
        assert bfcl.check_calls(entry, right, []) != ""
    assert valid / len(entries) >= least


async def test_a_single_turn_is_judged_by_its_calls() -> None:
    suite = bfcl.single_turn("", CONFIG)
    items = {item.name: item for item in suite.items(0, 0)}
    item = items["simple_python_0"]
    right = calls(("calculate_triangle_area", {"base": 10, "height": 5}))
    assert (await suite.play(item, seat(right))).score == 1.0
    assert (await suite.play(item, seat(right.replace("10", "11")))).score == 0.0
    assert (await suite.play(item, seat("It is 25."))).score == 0.0
    assert (await suite.play(item, seat("<tool_call>{"))).reason.startswith("This is not valid JSON")
    none = items["irrelevance_0"]
    assert (await suite.play(none, seat("None of these helps."))).score == 1.0
    assert (await suite.play(none, seat(calls(("determine_body_mass_index", {}))))).score == 0.0
