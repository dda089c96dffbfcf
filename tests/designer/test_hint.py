"""Hints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roles.designer.hint import LONGEST_HINT, clean_hint


@pytest.mark.parametrize(
    ("text", "finish", "hint"),
    [
        ("lever 4 to 5", "stop", "lever 4 to 5"),
        ("  two\n lines ", "stop", "two lines"),
        ("<think>the answer is 5</think> Try small numbers.", "stop", "Try small numbers."),
        ("Hint: look left", "stop", "look left"),
        ("HINT: HINT", "stop", "HINT"),
        ("", "stop", None),
        ("  \n", "stop", None),
        ("hint:", "stop", None),
        ("<think>endless", "length", None),
        ("cut in the middle", "length", None),
        ("play \\boxed{5}", "stop", None),
        ("<think>\\boxed{5}</think>play low", "stop", "play low"),
        ("x" * LONGEST_HINT, "stop", "x" * LONGEST_HINT),
        ("x" * (LONGEST_HINT + 1), "stop", None),
    ],
)
def test_examples(text: str, finish: str, hint: str | None) -> None:
    assert clean_hint(text, finish) == hint


@given(st.text(max_size=2000))
def test_what_is_accepted_is_one_bounded_line_without_an_action(text: str) -> None:
    hint = clean_hint(text, "stop")
    if hint is not None:
        assert hint
        assert len(hint) <= LONGEST_HINT
        assert len(hint.splitlines()) == 1
        assert "\\boxed" not in hint
