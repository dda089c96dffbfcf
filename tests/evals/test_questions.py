"""AIME and GPQA on records in their formats, written here."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import anyio.to_process
import pytest
from eval_scene import CONFIG, seat

from engine.errors import ConfigError
from engine.evals import questions

needs_math_verify = pytest.mark.skipif(
    bool(questions.Aime("hub", 25).available()), reason="math-verify is not installed"
)
GPQA = [
    {
        "Question": f"Which particle number {number} is the lightest?",
        "Correct Answer": "the right one",
        "Incorrect Answer 1": "one wrong\n",
        "Incorrect Answer 2": "another, wrong",
        "Incorrect Answer 3": "a third",
        "High-level domain": domain,
    }
    for number, domain in enumerate(["Physics", "Chemistry", "Biology", "Physics"])
]


def aime_file(folder: Path, *records: dict[str, Any]) -> Path:
    file = folder / "aime.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records) + "\n")
    return file


@needs_math_verify
@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("so \\boxed{073}", 1.0),
        ("first \\boxed{4}, then \\boxed{73}", 1.0),
        ("\\boxed{\\frac{146}{2}}", 1.0),
        ("\\boxed{73.0}", 1.0),
        ("\\boxed{37}", 0.0),
        ("\\boxed{}", 0.0),
        ("the answer is 73", 0.0),
        ("<think>\\boxed{73}", 0.0),
        ("\\boxed{" + "(" * 2000 + "}", 0.0),
    ],
)
async def test_aime_answers(tmp_path: Path, reply: str, score: float) -> None:
    suite = questions.aime_25(str(aime_file(tmp_path, {"problem": "What?", "answer": "73"})), CONFIG)
    (item,) = suite.items(0, 0)
    assert (await suite.play(item, seat(reply))).score == score


def test_both_forms_of_records_are_read(tmp_path: Path) -> None:
    file = aime_file(tmp_path, {"problem": "P?", "answer": 12}, {"prompt": "Q?", "label": "034"})
    items = questions.aime_26(str(file), CONFIG).items(0, 0)
    assert [item.data for item in items] == [("P?", "12"), ("Q?", "034")]


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    suite = questions.aime_25(str(aime_file(tmp_path, {"question": "P?"})), CONFIG)
    with pytest.raises(ConfigError, match="cannot be read as this suite's data: KeyError"):
        suite.items(0, 0)


def test_a_suite_says_what_is_missing(tmp_path: Path) -> None:
    assert "name a file" in questions.gpqa("", CONFIG).available()
    assert "there is no file" in questions.gpqa(str(tmp_path / "none.csv"), CONFIG).available()
    assert questions.gpqa(str(tmp_path), CONFIG).available() == ""


@needs_math_verify
async def test_the_judge_of_answers_runs_in_a_process_of_its_own() -> None:
    """math-verify needs the main thread: its time limit is a signal."""
    assert await anyio.to_process.run_sync(questions.same_answer, "2\\sqrt{3}", "\\sqrt{12}")
    assert not await anyio.to_process.run_sync(questions.same_answer, "2\\sqrt{3}", "\\sqrt{13}")


def gpqa_file(folder: Path) -> Path:
    file = folder / "gpqa.csv"
    with file.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, GPQA[0])
        writer.writeheader()
        writer.writerows(GPQA)
    return file


async def test_gpqa(tmp_path: Path) -> None:
    suite = questions.gpqa(str(gpqa_file(tmp_path)), CONFIG)
    items = suite.items(0, 0)
    assert [item.group for item in items] == ["Physics", "Chemistry", "Biology", "Physics"]
    assert len({item.data[2] for item in items}) > 1
    assert items == suite.items(0, 5)
    for item in items:
        _, options, right = item.data
        assert options[questions.LETTERS.index(right)] == "the right one"
        wrong = next(letter for letter in questions.LETTERS if letter != right)
        asked = seat(f"\\boxed{{{right}}}")
        assert (await suite.play(item, asked)).score == 1.0
        assert f"({right}) the right one" in asked.asked[0][0]
        for reply, score in [
            (f"\\boxed{{\\text{{{right}}}}}", 1.0),
            (f"the answer is ({right}).", 1.0),
            (f"\\boxed{{{wrong}}}, although the answer is {right}", 0.0),
            ("\\boxed{the right one}", 0.0),
        ]:
            assert (await suite.play(item, seat(reply))).score == score
