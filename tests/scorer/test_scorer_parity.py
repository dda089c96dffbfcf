"""All cases of the delayed designer reward, as computed by the public reference implementation."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from engine.cli import app
from engine.errors import ConfigError
from roles.scorer import parity

DATA = Path(__file__).parents[1] / "data/designer_reward_parity.jsonl"
VARIANTS = ("blend", "solve_rate", "regret", "micro_lp", "learning_potential")


def test_all_cases_are_there() -> None:
    cases = parity.read(DATA)
    assert len(cases) == 240
    assert {case.variant for case in cases} == set(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_reference_parity(variant: str) -> None:
    cases = [case for case in parity.read(DATA) if case.variant == variant]
    found = [one for one in parity.check(DATA) if one.variant == variant]
    assert len(found) == sum(len(case.environments) for case in cases)
    assert [one for one in found if not one.equal] == []


def test_the_command_agrees_with_the_reference() -> None:
    result = CliRunner().invoke(app, ["credit", "--parity", str(DATA), "--json"])
    figures = json.loads(result.output)
    assert result.exit_code == 0
    assert (figures["cases"], figures["compared"], figures["different"]) == (240, 1628, 0)
    assert figures["largest_difference"] <= 1e-9


@pytest.mark.parametrize("wrong", [1e-8, "masked"])
def test_a_difference_is_shown_and_fails(tmp_path: Path, wrong: float | str) -> None:
    case = json.loads(DATA.read_text().splitlines()[1])
    name = next(name for name, value in case["expected"].items() if value != "masked")
    value = case["expected"][name]
    case["expected"][name] = value + wrong if isinstance(wrong, float) else wrong
    path = tmp_path / "cases.jsonl"
    path.write_text(json.dumps(case))
    shown = CliRunner().invoke(app, ["credit", "--parity", str(path)])
    assert shown.exit_code == 1
    assert Counter(shown.output.split())["differs"] == 1
    assert f"{len(case['expected'])} advantages compared, 1 differ" in shown.output


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "has no cases"),
        ("\n{}", "line 2 is no case"),
        ('{"id": 1, "variant": "none"}', "line 1 is no case"),
        (DATA.read_text().splitlines()[1].replace('"params": {', '"params": {"gama": 1, '), "gama"),
    ],
)
def test_a_file_that_holds_none_says_where(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=part):
        parity.read(path)


def test_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parity.read(tmp_path / "none.jsonl")


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_return_that_is_no_number_is_refused_by_line(tmp_path: Path, value: str) -> None:
    good = DATA.read_text().splitlines()[0]
    case = json.loads(good)
    case["environments"][0]["plain_returns"] = {"0": [0.5, 0.0]}
    path = tmp_path / "cases.jsonl"
    path.write_text(f"{good}\n{json.dumps(case).replace('0.5, 0.0', f'{value}, 0.0')}")
    with pytest.raises(ConfigError, match="line 2"):
        parity.read(path)
