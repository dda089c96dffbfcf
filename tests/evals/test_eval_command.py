"""``spade eval`` against an endpoint, with suites of the project and of another package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from eval_scene import endpoint_thread
from scenes import plugins
from scenes.cli import Spade, spade
from scenes.endpoint_fake import FakeEndpoint, Raw, Say

from engine import registry
from engine.commands.eval import PARTIAL

__all__ = ["spade"]
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "sums"


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example of the documentation, installed."""
    monkeypatch.syspath_prepend(str(plugins.install_example(tmp_path / "site", EXAMPLE)))
    yield
    registry.registered.cache_clear()


def add(text: str) -> Say:
    """Add small numbers, and large ones wrongly."""
    first, second = map(int, re.findall(r"\d+", f"{text} 0 0")[:2])
    return Say(f"\\boxed{{{first + second if first < 10 > second else 0}}}")


@pytest.fixture
def endpoint() -> Iterator[FakeEndpoint]:
    with endpoint_thread(add) as fake:
        yield fake


@pytest.mark.usefixtures("sums")
def test_a_suite_of_another_package_is_listed_and_evaluated(spade: Spade, endpoint: FakeEndpoint) -> None:
    (listed,) = spade("eval", "list", "--json").records
    (row,) = [one for one in listed["suites"] if one["name"] == "sums"]
    assert row == {
        "name": "sums",
        "from": "spade_sums",
        "presets": ["smoke"],
        "missing": "",
        "version": "sums 1",
    }
    words = ["eval", "sums", "--endpoint", endpoint.url, "--name", "m", "--preset", "smoke", "--limit", "8"]
    result = spade(*words, "--samples", "2", "--out", "first", "--json")
    assert result.returncode == 0, result.stderr
    (summary,) = result.records
    suite = summary["suites"]["sums"]
    assert suite["model"]["mean"]["value"] == 0.5
    assert suite["model"]["mean"]["low"] < 0.5 < suite["model"]["mean"]["high"]
    assert (suite["model"]["items"], suite["model"]["samples"]) == (8, 16)
    assert suite["model"]["pass_at"] == {"1": 0.5, "2": 0.5}
    assert {group: one["mean"]["value"] for group, one in suite["groups"].items()} == {
        "small": 1.0,
        "large": 0.0,
    }
    assert suite["baselines"]["null"]["value"] == 0.0
    assert suite["baselines"]["random"]["value"] < 0.5
    assert len(endpoint.bodies) == 16
    assert endpoint.bodies[0]["temperature"] == 0.6
    conditions = json.loads(Path("first/evaluation.json").read_text())
    assert conditions["suites"]["sums"]["version"] == "sums 1"
    samples = [json.loads(line) for line in Path("first/samples.jsonl").read_text().splitlines()]
    assert len(samples) == 16 + 8 + 8
    assert all(one["asked"] for one in samples)

    assert spade(*words, "--samples", "2", "--out", "first").returncode == 0
    assert len(endpoint.bodies) == 16, "an evaluation that is finished is not played again"
    refused = spade(*words, "--samples", "3", "--out", "first")
    assert refused.returncode == 2
    assert "other conditions: suites" in refused.stderr


@pytest.mark.usefixtures("sums")
def test_two_evaluations_are_compared_on_common_items(spade: Spade, endpoint: FakeEndpoint) -> None:
    words = ["eval", "sums", "--endpoint", endpoint.url, "--preset", "smoke"]
    spade(*words, "--name", "a", "--limit", "8", "--out", "a")
    with endpoint_thread(lambda text: Say("\\boxed{0}")) as worse:
        spade(
            "eval",
            "sums",
            "--endpoint",
            worse.url,
            "--preset",
            "smoke",
            "--name",
            "b",
            "--limit",
            "6",
            "--out",
            "b",
        )
    (found,) = spade("eval", "compare", "b", "a", "--json").records
    (row,) = found["suites"]
    assert (row["items"], row["left_out"], row["difference"]) == (6, 2, 0.5)
    assert row["low"] <= 0.5 <= row["high"]
    assert "6 common items, 2 others" in spade("eval", "compare", "b", "a").stdout


@pytest.mark.usefixtures("sums")
def test_what_is_reported_cannot_choose_a_checkpoint(spade: Spade, endpoint: FakeEndpoint) -> None:
    for name in ("a", "b"):
        spade("eval", "sums", "--endpoint", endpoint.url, "--preset", "smoke", "--name", name, "--out", name)
    refused = spade("eval", "table", "a", "b", "--select", "sums")
    assert refused.returncode == 2
    assert "is a test split" in refused.stderr
    shown = spade("eval", "table", "a", "b", "--html", "table.html")
    assert re.search(r"sums\n.*a +0\.500 +\[.*\n.*b +0\.500 +\[", shown.stdout)
    assert "<td>a</td><td>0.500 [" in Path("table.html").read_text()


def test_a_validation_split_chooses_and_is_not_reported(spade: Spade) -> None:
    for name, chosen_by, reported in (("a", 0.2, 0.9), ("b", 0.7, 0.3)):
        mean = {"items": 4, "samples": 4, "pass_at": {}}
        suites = {
            suite: {"split": split, "model": mean | {"mean": [value, 0.0, 1.0]}}
            for suite, split, value in (("v", "validation", chosen_by), ("t", "test", reported))
        }
        for suite in suites.values():
            low = suite["model"]["mean"]  # type: ignore[index]
            suite["model"]["mean"] = dict(zip(("value", "low", "high"), low, strict=True))  # type: ignore[index]
        Path(name).mkdir()
        Path(name, "summary.json").write_text(json.dumps({"conditions": {"model": name}, "suites": suites}))
    (table,) = spade("eval", "table", "a", "b", "--select", "v", "--json").records
    assert (table["selected"], table["columns"]) == ("b", ["t"])
    assert "chosen by v, which is not reported" in spade("eval", "table", "a", "b", "--select", "v").stdout


@pytest.mark.usefixtures("sums")
def test_a_suite_that_lacks_something_makes_it_partial(spade: Spade, endpoint: FakeEndpoint) -> None:
    words = ["--endpoint", endpoint.url, "--name", "m", "--preset", "smoke", "--limit", "2", "--json"]
    result = spade("eval", "sums", "aime-25", *words)
    assert result.returncode == PARTIAL
    (summary,) = result.records
    assert "name a file" in summary["suites"]["aime-25"]["missing"]
    assert summary["suites"]["sums"]["model"]["items"] == 2


@pytest.mark.usefixtures("sums")
def test_lost_samples_make_it_partial(spade: Spade, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.evals.harness.ATTEMPTS", 1)
    monkeypatch.setattr("engine.inference.endpoint._FIRST_DELAY", 0.001)

    def failing(text: str) -> Say | Raw:
        return Raw(b"no", status=500) if re.match("How much is [357] ", text) else add(text)

    with endpoint_thread(failing) as fake:
        words = ["eval", "sums:small", "--endpoint", fake.url, "--name", "m", "--limit", "20", "--json"]
        result = spade(*words)
    assert result.returncode == PARTIAL
    suite = result.records[0]["suites"]["sums:small"]
    assert suite["lost"] > 0
    assert suite["model"]["items"] == 20 - suite["lost"]


def test_texts_of_the_training_are_looked_for(spade: Spade, endpoint: FakeEndpoint) -> None:
    questions = [
        "Which star of the list in the second table of the appendix was measured first, and by whom?",
        "Of all rocks that the expedition brought home, how many were older than the oldest shell?",
    ]
    options = {"Correct Answer": "a", **{f"Incorrect Answer {number}": "b" for number in (1, 2, 3)}}
    lines = [json.dumps({"Question": question, **options}) for question in questions]
    Path("gpqa.jsonl").write_text("\n".join(lines))
    Path("corpus").mkdir()
    Path("corpus/notes.txt").write_text(f"An exercise. {questions[0].upper()} It is not hard.")
    words = [
        "eval",
        "gpqa-diamond:gpqa.jsonl",
        "--endpoint",
        endpoint.url,
        "--name",
        "m",
        "--preset",
        "smoke",
    ]
    result = spade(*words, "--corpus", "dir:corpus", "--no-baselines", "--out", "x")
    assert result.returncode == 0, result.stderr
    assert "items that share text with the training: 1 of dir:corpus" in result.stdout
    summary = json.loads(Path("x/summary.json").read_text())
    assert summary["suites"]["gpqa-diamond:gpqa.jsonl"]["overlap"] == {"dir:corpus": 1}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["eval", "sums"], "Name one model"),
        (["eval", "seeds:easy", "--endpoint", "http://127.0.0.1:9/v1"], "name of a model"),
        (["eval", "seeds:easy", "--model", "no/such/folder"], "is not a directory"),
        (["eval", "seeds:easy", "--run", "none"], "There is no run none"),
        (["eval", "nothing", "--endpoint", "http://127.0.0.1:9/v1", "--name", "m"], "no known scheme"),
        (["eval", "seeds:easy", "--model", "x", "--preset", "huge"], "There is no preset"),
        (["eval", "compare", "x", "y"], "no finished evaluation"),
    ],
)
def test_wrong_words_are_refused(spade: Spade, words: list[str], complaint: str) -> None:
    result = spade(*words)
    assert result.returncode == 2
    assert complaint in result.stderr
