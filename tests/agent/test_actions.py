"""Actions in replies."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roles.agent.actions import find_action, find_call

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


anything = st.text(st.characters(), max_size=200)  # lone surrogates among them
pieces = st.lists(
    st.sampled_from(
        [
            *("\\boxed{", "{", "}", "[", "]", "```json\n", "```\n", '{"a": 1}', "<tool_call>", "<answer>"),
            *("</tool_call>", "</answer>", "</think>", '"', "\\", " ", "\n", "7", "\ud800", "\x00", "é"),
        ]
    ),
    max_size=40,
).map("".join)
scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
calls = st.dictionaries(st.text(max_size=5), values, max_size=3) | st.lists(values, max_size=3)
quiet = st.text("abc xyz.,:;!?-\n0123456789", max_size=40)  # says nothing that could be an action


@given(anything | pieces)
def test_no_reply_is_an_error(reply: str) -> None:
    for action in (find_action(reply), find_call(reply)):
        assert action is None or action in reply


@given(call=calls, before=quiet, after=quiet, form=st.sampled_from(["box", "fence", "json fence", "line"]))
def test_a_call_is_found_in_any_form_whatever_is_said_around_it(
    call: object, before: str, after: str, form: str
) -> None:
    text = json.dumps(call)
    if any(mark in text for mark in ("</think>", "<answer>", "<tool_call>", "\\boxed")):
        return
    wrapped = {
        "box": f"\\boxed{{{text}}}",
        "fence": f"```\n{text}\n```",
        "json fence": f"```json\n{text}\n```",
        "line": text,
    }[form]
    assert find_call(f"{before}\n{wrapped}\n{after}") == text
    assert find_call(text) == text


@given(noise=quiet)
def test_noise_alone_is_no_action_and_changes_none(noise: str) -> None:
    assert find_action(noise) is None
    assert find_call(noise) is None
    assert find_action(f"{noise}\\boxed{{a {{b}} c}}{noise}") == "a {b} c"


@pytest.mark.parametrize(
    ("reply", "call"),
    [
        ("I am done.", None),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>'),
        ("so <answer>4</answer>", "so <answer>4</answer>"),
        ('<think>\\boxed{{"a": 1}}</think>\n\\boxed{{"b": 2}}', '{"b": 2}'),
        ('<think>{"a": 1}</think>', None),
        ('\\boxed{{"text": "}}}{"}}', '{"text": "}}}{"}'),
        ('\\boxed{[{"name": "f"}, {"name": "g"}]}', '[{"name": "f"}, {"name": "g"}]'),
        ('first \\boxed{{"a": 1}}, no: \\boxed{{"b": 2}}', '{"b": 2}'),
        ('\\boxed{{"a": 1}} and \\boxed{{"b": 2', '{"a": 1}'),
        ("\\boxed{look}", "look"),
        ('{"a": 1}\n{"b": 2}', '{"b": 2}'),
        ('```json\n{"a": 1}\n```\n{"b": 2}', '{"a": 1}'),
        ('```json\n{"a": 1}\n', '{"a": 1}'),
        ('say {"a": 1} inside a line', None),
        ("[1, 2", None),
        ("", None),
    ],
)
def test_calls(reply: str, call: str | None) -> None:
    assert find_call(reply) == call


@pytest.mark.parametrize(
    "piece",
    [
        "```json\n",
        "```\nx\n",
        "{\n",
        "[",
        '{"a":',
        "\\boxed{{",
        "\\boxed{[",
        "`",
        "</think>",
        '["',
        "\\boxed ",
    ],
)
def test_no_repetition_holds_up_other_plays(piece: str) -> None:
    reply = piece * ((64 << 10) // len(piece))
    began = time.thread_time()
    find_action(reply)
    find_call(reply)
    assert time.thread_time() - began < 0.5
