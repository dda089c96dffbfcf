"""Actions in replies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roles.agent.actions import find_action

flat = st.text(alphabet=st.characters(blacklist_characters="{}", blacklist_categories=("Cs",)), max_size=20)
balanced = st.recursive(
    flat, lambda inner: st.tuples(flat, inner, flat).map(lambda p: f"{p[0]}{{{p[1]}}}{p[2]}"), max_leaves=6
).filter(lambda text: "\\boxed" not in text and "</think>" not in text)


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("no move", None),
        (r"\boxed{7}", "7"),
        (r"maybe \boxed{3}, no: \boxed{ 4 }", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{a} then \boxed{b", "a"),
        (r"\boxed{a \boxed{b}", "b"),
        (r"\boxed{\boxed{b}}", "b"),
        (r"stray } brace \boxed{c}", "c"),
        (r"{ \boxed{c} ", "c"),
        (r"\boxed{}", ""),
        (r"<think>\boxed{1}</think>go", None),
        (r"<think>\boxed{1}</think>\boxed{2}", "2"),
        (r"\boxed{0}</think>x</think>\boxed{2}", "2"),
        (r"\boxed {5}", "5"),
        ("boxed{5}", None),
        ("", None),
    ],
)
def test_examples(reply: str, action: str | None) -> None:
    assert find_action(reply) == action


@given(before=flat, inner=balanced, after=flat)
def test_a_balanced_group_is_found_whole(before: str, inner: str, after: str) -> None:
    before = before.replace("</think>", "")
    after = after.replace("</think>", "")
    assert find_action(f"{before} \\boxed{{{inner}}} {after}") == inner.strip()


@given(st.lists(balanced, min_size=1, max_size=5))
def test_the_last_of_several_wins(groups: list[str]) -> None:
    assert find_action(" ".join(f"\\boxed{{{group}}}" for group in groups)) == groups[-1].strip()


@given(text=st.text(max_size=200), inner=flat.filter(lambda text: "\\boxed" not in text))
def test_reasoning_never_acts(text: str, inner: str) -> None:
    inner = inner.replace("</think>", "")
    assert find_action(f"{text}\\boxed{{{inner}}}</think> done") is None


@given(st.text(alphabet="\\boxed{} \n1", max_size=300))
def test_any_text_is_taken_and_the_answer_is_balanced(text: str) -> None:
    action = find_action(text)
    if action is not None:
        depth = 0
        for letter in action:
            depth += (letter == "{") - (letter == "}")
            assert depth >= 0
        assert depth == 0
        assert action in text


def test_many_open_groups_cost_linear_time() -> None:
    assert find_action("\\boxed{" * 100_000) is None
