"""The prompts of the full scale, and how they are made to fit."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import pytest

from engine import prompts
from engine.config import Config, Designer, Model, Run, Sampling
from engine.errors import SpadeError
from roles.designer.prompt import Brief, PromptWriter

VIEW: dict[str, Any] = {
    "polarity": "positive",
    "skill": "Logic",
    "win": 0.5,
    "regret": 0.25,
    "state": "frontier",
    "title": "Three doors",
    "family": None,
    "difficulty": None,
    "source": "class DoorsEnv: ...",
    "cut": False,
}
NEGATIVE = {
    **VIEW,
    "polarity": "negative",
    "title": "Two doors",
    "state": "mastered",
    "win": 0.97,
    "source": "",
}


class Letters:
    """One token a character."""

    stop_token_ids = (0,)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(token) for token in ids)

    def first(self, content: str, system: str | None = None) -> list[int]:
        return self.encode(content)


def design(**changes: Any) -> str:
    variables = {"skill": "Logic", "document": "A text on doors.", "target": 0.5, "memory": [VIEW, NEGATIVE]}
    return prompts.render("design_full", max_turns=25, **{**variables, **changes})


def removed(before: str, after: str) -> tuple[list[str], list[str]]:
    lines = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    return [line[2:] for line in lines if line[:2] == "- "], [line[2:] for line in lines if line[:2] == "+ "]


def sections(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("# ")]


def test_the_design_prompt_says_all_it_must() -> None:
    text = design()
    assert sections(text) == [
        "# Skill",
        "# Material",
        "# Difficulty",
        "# Earlier environments",
        "# Interface",
        "# Robustness",
        "# Answer",
    ]
    for needed in (
        "Logic",
        "A text on doors.",
        "50 %",
        "max_turns=25",
        "class DoorsEnv: ...",
        "Two doors",
        "97 %",
    ):
        assert needed in text
    assert "25 points more" in text
    assert "{{" not in text
    assert "{%" not in text


def test_no_corpus_takes_away_the_material_and_nothing_else() -> None:
    gone, new = removed(design(), design(document=""))
    assert new == []
    assert gone[0] == "# Material" or gone[0] == ""
    assert "A text on doors." in gone
    assert all("material" in line.lower() or line in ("", "A text on doors.") for line in gone)


def test_no_memory_takes_away_the_examples_and_nothing_else() -> None:
    gone, new = removed(design(), design(memory=[]))
    assert new == []
    text = "\n".join(gone)
    assert "# Earlier environments" in text
    assert sections(text) == ["# Earlier environments"]
    assert "class DoorsEnv" in text
    assert "Two doors" in text


@pytest.mark.parametrize(
    ("state", "words"),
    [("mastered", "too easy"), ("intractable", "too hard"), ("degenerate", "without looking")],
)
def test_a_negative_says_what_was_wrong(state: str, words: str) -> None:
    assert words in design(memory=[{**NEGATIVE, "state": state}])


def test_an_example_without_a_hint_and_one_that_is_cut() -> None:
    text = design(memory=[{**VIEW, "regret": None, "cut": True}])
    assert "points more" not in text
    assert "Only its beginning is shown" in text


def test_the_skeleton_in_the_prompt_is_a_program() -> None:
    skeleton = design().split("# Interface", 1)[1].split("```")[1]
    bodies = skeleton.replace("(seed=None):", "(seed=None): pass").replace("        ...\n", "")
    compile(
        "\n".join(line for line in bodies.splitlines() if not line.strip().startswith("def ")), "x", "exec"
    )
    for method in ("__init__", "reset", "step", "solution"):
        assert f"def {method}(self" in skeleton


def test_hint_and_play_prompts() -> None:
    assert "class DoorsEnv" in prompts.render("hint_full", source="class DoorsEnv: ...")
    plain = prompts.render("play_full", observation="Three doors.", hint=None)
    hinted = prompts.render("play_full", observation="Three doors.", hint="the left one")
    assert removed(plain, hinted) in (([], ["HINT: the left one", ""]), ([], ["", "HINT: the left one"]))
    assert "\\boxed{move}" in plain
    assert "HINT" not in plain


def writer(room: int, **designer: Any) -> PromptWriter:
    config = Config(
        run=Run(name="test"),
        model=Model(path="", max_model_len=room + 100),
        designer=Designer(
            sampling=Sampling(max_tokens=100), hint_sampling=Sampling(max_tokens=100), **designer
        ),
    )
    return PromptWriter(config, Letters())  # type: ignore[arg-type]


def brief(**changes: Any) -> Brief:
    return Brief(
        **{"skill": "Logic", "document": "word " * 200, "target": 0.5, "memory": [VIEW, NEGATIVE], **changes}
    )


def test_a_prompt_that_fits_is_left_as_it_is() -> None:
    text = Letters().decode(writer(100_000).design(brief()))
    assert text == design(document="word " * 200)


def test_memory_goes_first_then_the_document() -> None:
    bare = len(design(document="", memory=[]))
    without_negative = len(design(document="word " * 200, memory=[VIEW]))
    text = Letters().decode(writer(without_negative).design(brief()))
    assert "Two doors" not in text
    assert "DoorsEnv" in text
    assert "word " * 200 in text
    text = Letters().decode(writer(bare + 600).design(brief()))
    assert "DoorsEnv" not in text
    assert "word word" in text
    assert len(text) <= bare + 600
    assert Letters().decode(writer(bare).design(brief())) == design(document="", memory=[])


def test_a_context_that_is_too_short_is_an_error_with_a_remedy() -> None:
    with pytest.raises(SpadeError, match="longer context"):
        writer(50).design(brief())


def test_a_program_that_leaves_no_room_gets_no_hint() -> None:
    assert writer(100).hint("x" * 200) is None
    assert writer(100_000).hint("x" * 200) is not None
