"""The base class of tool environments, beside no sandbox: these designs are trusted."""

from __future__ import annotations

import contextlib
import json
import math
import random
import time
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import schema, tool_calls
from sandbox.actions import tool_actions
from sandbox.contract import CALLABLE, ContractError
from sandbox.criteria import read_tools
from sandbox.errors import EnvProtocolError
from sandbox.tools import OWNED, REPLY, ToolEnv, ToolError, keep, same_answer


class DeskEnv(ToolEnv):
    """Two instructions, the second known only after the first."""

    max_turns = 4
    intro = "A desk."

    def setup(self, rng: random.Random) -> dict[str, Any]:
        return {"drawer": rng.randint(1, 3), "open": 0, "lamp": False, "log": []}

    def tool_open(self, drawer: int, gently: bool = False) -> str:
        """Open a drawer."""
        if drawer > 3:
            raise ToolError("there are three drawers")
        self.state["open"] = drawer
        self.state["log"].append("open")
        return "opened"

    def tool_lamp(self, on: Literal["on", "off"]) -> dict[str, str]:
        """Switch the lamp."""
        self.state["lamp"] = on == "on"
        self.state["log"].append("lamp")
        return {"lamp": on}

    def tool_break(self) -> None:
        """A fault of the design."""
        raise AttributeError("no such thing")

    def instructions(self) -> list[Any]:
        drawer = self.state["drawer"]
        return [
            (f"Open drawer {drawer}.", lambda s: s["open"] == drawer),
            ("Switch the lamp on.", lambda s: s["lamp"]),
        ]

    def plan(self) -> list[Any]:
        return [("open", {"drawer": self.state["drawer"]}), [("lamp", {"on": "on"})]]


class ShareEnv(DeskEnv):
    scoring = "share"

    def answer(self) -> int:
        return 7


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def fresh(cls: type[ToolEnv] = DeskEnv, **kwargs: Any) -> tuple[ToolEnv, str]:
    env = cls(**kwargs)
    return env, env.reset(0)[0]


def test_the_first_observation_holds_the_first_instruction_only() -> None:
    env, first = fresh()
    assert "A desk." in first
    assert f"Open drawer {env.state['drawer']}" in first
    assert "lamp on" not in first
    assert '- lamp(on: one of "on", "off"): Switch the lamp.' in first
    assert "- open(drawer: integer, gently: boolean (optional)): Open a drawer." in first
    assert "4 turns" in first


def test_instructions_come_one_after_the_other_and_pay_at_the_end() -> None:
    env, _ = fresh()
    opened = env.step(call("open", drawer=env.state["drawer"]))
    assert opened[1:4] == (0.0, False, False)
    assert "Instruction 1 is done." in opened[0]
    assert "Instruction 2 of 2: Switch the lamp on." in opened[0]
    lit = env.step(call("lamp", on="on"))
    assert lit[1:4] == (1.0, True, False)
    assert lit[4] == {"turn": 2, "done": 2, "of": 2}
    assert env.step(call("lamp", on="on"))[1:4] == (0.0, False, True)


def test_several_calls_in_one_turn_are_carried_out_in_order() -> None:
    env, _ = fresh()
    wanted = env.state["drawer"]
    both = [json.loads(call("open", drawer=wanted)), json.loads(call("lamp", on="on"))]
    assert env.step(json.dumps(both))[1:4] == (1.0, True, False)
    assert env.state["log"] == ["open", "lamp"]
    env, _ = fresh()
    blocks = "".join(f"<tool_call>\n{json.dumps(one)}\n</tool_call>" for one in both)
    assert env.step(f"I shall do both.\n{blocks}")[1:4] == (1.0, True, False)


def test_work_done_ahead_counts() -> None:
    env, _ = fresh()
    env.step(call("lamp", on="on"))
    last = env.step(call("open", drawer=env.state["drawer"]))
    assert last[1:4] == (1.0, True, False)


def test_turns_run_out_unpaid() -> None:
    env, _ = fresh(ShareEnv, max_turns=2)
    env.step(call("open", drawer=env.state["drawer"]))
    assert env.step("{}")[1:4] == (0.0, False, True)
    assert fresh(DeskEnv, max_turns=99)[0].max_turns == 4


@pytest.mark.parametrize(
    ("answer", "reward"), [("7", 2 / 3), ("7.0", 2 / 3), ("8", 1 / 3), ("nan", 1 / 3), ("", 1 / 3)]
)
def test_shares_and_final_answer(answer: str, reward: float) -> None:
    env, _ = fresh(ShareEnv)
    env.step(call("open", drawer=env.state["drawer"]))
    _, paid, terminated, truncated, _ = env.step(json.dumps({"answer": answer}))
    assert (paid, terminated, truncated) == (pytest.approx(reward), True, False)


def test_an_early_answer_is_the_end_without_pay() -> None:
    env, _ = fresh()
    assert env.step("<answer>done</answer>")[1:4] == (0.0, True, False)


def test_all_criteria_and_the_answer_in_one_turn() -> None:
    env, _ = fresh(ShareEnv)
    turn = [json.loads(one) for one in (call("open", drawer=env.state["drawer"]), call("lamp", on="on"))]
    assert env.step(json.dumps([*turn, {"answer": 7}]))[1:4] == (1.0, True, False)


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("banana", "neither a tool call nor a final answer"),
        ("", "neither"),
        ("{", "not valid JSON"),
        ("[]", "empty"),
        ("[1]", '"name" and "arguments"'),
        ('{"name": "open"} {"name": "lamp"}', "not valid JSON"),
        ('{"name": "open", "arguments": [1]}', "must be an object"),
        ('{"name": "open", "arguments": {"drawer": NaN}}', "NaN"),
        ('{"name": "open", "args": {}}', "not 'args'"),
        ('{"name": "open", "arguments": {"drawer": 1, "drawer": 2}}', "twice"),
        ("<tool_call>{}", "not closed"),
        ("[" * 100000, "nested too deeply"),
        ('{"answer": {}}', "text or a number"),
        (json.dumps([{"name": "open", "arguments": {"drawer": 1}}] * 17), "at most 16"),
        (call("opne", drawer=1), "there is no tool 'opne'; the tools are break, lamp, open"),
        (call("open"), "argument 'drawer' is missing (integer)"),
        (call("open", drawer="1"), "argument 'drawer' must be an integer, not \"1\""),
        (call("open", drawer=True), "must be an integer, not true"),
        (call("open", drawer=1.0), "must be an integer, not 1.0"),
        (call("open", drawer=1, hard=True), "argument 'hard' is not known (known: drawer, gently)"),
        (call("lamp", on="up"), 'must be one of "on", "off", not "up"'),
        (call("open", drawer=9), "Error in open: there are three drawers"),
    ],
)
def test_errors_teach_and_cost_a_turn(action: str, words: str) -> None:
    env, _ = fresh()
    observation, reward, terminated, truncated, info = env.step(action)
    assert words in observation
    assert (reward, terminated, truncated, info["turn"]) == (0.0, False, False, 1)
    assert env.state["log"] == []


def test_nothing_of_an_unreadable_action_is_carried_out() -> None:
    env, _ = fresh()
    env.step(f"<tool_call>{call('lamp', on='on')}</tool_call><tool_call>{{</tool_call>")
    assert env.state["log"] == []


def test_faults_of_the_design_are_not_hidden() -> None:
    env, _ = fresh()
    with pytest.raises(AttributeError):
        env.step(call("break"))


def test_methods_of_the_contract() -> None:
    env, _ = fresh()
    assert set(OWNED) <= set(CALLABLE) | {"solution"}
    assert all(callable(getattr(env, name)) for name in OWNED)
    tools = {tool["function"]["name"]: tool["function"] for tool in env.get_tools()}
    assert tools["open"]["parameters"]["required"] == ["drawer"]
    assert tools["open"]["parameters"]["additionalProperties"] is False
    json.dumps(env.get_tools(), allow_nan=False)
    assert env.criteria_met() == [False, False]
    assert env.execute_tool("open", {"drawer": env.state["drawer"]}) == "open: opened"
    assert env.criteria_met() == [True, False]
    assert [json.loads(action) for action in fresh()[0].solution()] == [
        {"name": "open", "arguments": {"drawer": env.state["drawer"]}},
        {"name": "lamp", "arguments": {"on": "on"}},
    ]
    assert json.loads(fresh(ShareEnv)[0].solution()[-1]) == {"answer": 7}


def test_a_plan_wins_at_every_seed() -> None:
    for cls in (DeskEnv, ShareEnv):
        for seed in range(20):
            env = cls()
            env.reset(seed)
            for action in env.solution():
                last = env.step(action)
            assert last[1:4] == (1.0, True, False)


def variant(**members: Any) -> type[ToolEnv]:
    return type("VariantEnv", (DeskEnv,), members)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"instructions": lambda self: []}, "0 instructions"),
        ({"instructions": lambda self: ["do it"]}, "pair of a text and a predicate"),
        ({"instructions": lambda self: [("do it", True)]}, "pair of a text and a predicate"),
        ({"instructions": lambda self: [("", lambda s: False)]}, "pair of a text and a predicate"),
        ({"answer": lambda self: [7]}, "answer() must return"),
        ({"scoring": "most"}, "scoring"),
        ({"setup": lambda self, rng: None}, "setup(rng) must return the state"),
        ({"schemas": {"shut": {}}}, "no method tool_shut"),
        ({"schemas": {"open": {"oneOf": []}}}, "oneOf"),
        ({"tool_open": lambda self, drawer: ""}, "no type hint"),
    ],
)
def test_designs_that_do_not_hold_together(members: dict[str, Any], words: str) -> None:
    with pytest.raises(ContractError) as caught:
        variant(**members)().reset(0)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", OWNED)
def test_what_the_base_class_owns_cannot_be_replaced(name: str) -> None:
    with pytest.raises(ContractError, match="owns"):
        variant(**{name: lambda self, *a: None})


def test_nor_by_way_of_another_base_class() -> None:
    class Generous:
        def step(self, action: str) -> Any:
            return "you win", 1.0, True, False, {}

    with pytest.raises(ContractError, match="defines step"):
        type("GenerousEnv", (Generous, DeskEnv), {})


def test_a_design_may_use_any_attribute_of_its_own() -> None:
    class BusyEnv(DeskEnv):
        def setup(self, rng: random.Random) -> dict[str, Any]:
            self._turn = self._done = self._steps = self._tools = self._over = self._expected = "mine"
            return super().setup(rng)

    env, _ = fresh(BusyEnv)
    for action in env.solution():
        last = env.step(action)
    assert last[1:4] == (1.0, True, False)


@pytest.mark.parametrize("value", [None, 1, [], "yes"])
def test_criteria_are_exact_booleans(value: object) -> None:
    env = variant(instructions=lambda self: [("do it", lambda s: value)])()
    env.reset(0)
    with pytest.raises(ContractError, match=r"criterion 1: .* True or False"):
        env.criteria_met()


@pytest.mark.parametrize(
    ("expected", "given", "same"),
    [
        ("Rome", " rome ", True),
        ("New  York", "new york", True),
        (7, "7.0000000001", True),
        (7, "7.1", False),
        ("7", "seven", False),
        (0.1 + 0.2, "0.3", True),
        ("nan", "nan", True),
        ("inf", "1e999", False),
        ("", "", True),
    ],
)
def test_equal_answers(expected: Any, given: str, same: bool) -> None:
    assert same_answer(expected, given) is same


def typed(
    a: int,
    b: Annotated[list[str], "names"],
    c: float | None = None,
    d: Any = 0,
    e: dict[str, int] | None = None,
) -> None: ...


def test_schemas_from_hints() -> None:
    made = schema.of_function(typed)
    assert made["required"] == ["a", "b"]
    assert made["properties"]["b"] == {
        "type": "array",
        "items": {"type": "string"},
        "description": "names",
    }
    schema.require_sound(made)
    assert schema.problems({"a": 1, "b": ["x"], "c": 2, "e": {"k": 1}}, made) == []
    assert schema.problems({"a": 1, "b": ["x", 2], "c": "2", "e": {"k": "1"}}, made, "it") == [
        "it.b[1] must be a string, not 2",
        'it.c must be a number or null, not "2"',
        'it.e must be an object or null, not {"k": "1"}',
    ]


@pytest.mark.parametrize("hint", [bytes, set, complex, dict[int, str], tuple[int, int]])
def test_hints_that_json_does_not_know(hint: Any) -> None:
    with pytest.raises(schema.SchemaError):
        schema.of_hint(hint)


@pytest.mark.parametrize(
    ("value", "keywords", "ok"),
    [
        (3, {"minimum": 3, "maximum": 3}, True),
        (2, {"minimum": 3}, False),
        (True, {"enum": [1]}, False),
        (1, {"type": ["string", "integer"]}, True),
        (math.nan, {"type": "number"}, False),
        ({"x": 1}, {"type": "object", "properties": {}}, True),
        ({"x": 1}, {"properties": {"y": {}}}, False),
        ({"x": 1}, {"properties": {"y": {}}, "additionalProperties": True}, True),
    ],
)
def test_keywords(value: object, keywords: dict[str, Any], ok: bool) -> None:
    schema.require_sound(keywords)
    assert (schema.problems(value, keywords) == []) is ok


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(_json, st.sampled_from([schema.of_function(typed), schema.of_hint(int | list[bool] | None)]))
def test_problems_are_words_whatever_the_value(value: object, made: dict[str, Any]) -> None:
    assert all(isinstance(found, str) and found for found in schema.problems(value, made))


@given(st.text(max_size=80) | _json.map(json.dumps))
def test_any_action_is_read_or_refused(action: str) -> None:
    with contextlib.suppress(tool_calls.Unreadable):
        turn = tool_calls.parse(action)
        assert turn.calls or turn.answer is not None


@given(st.text(max_size=40))
def test_any_text_leaves_a_desk_whole(action: str) -> None:
    env, _ = fresh()
    observation, reward, *_ = env.step(action)
    assert observation
    assert reward == 0.0


@pytest.mark.parametrize(
    "action",
    [
        "<tool_call>" * 6_000,
        "<answer>" * 8_000,
        "<answer>" * 8_000 + "<tool_call>x</tool_call>",
        "```" + " " * 65_000 + "x",
        "```json" + "\n" * 65_000 + "{",
        "{" * 65_000,
        "[" * 65_000 + "]" * 65_000,
    ],
    ids=lambda text: text[:12],
)
def test_no_action_uses_up_the_programs_time(action: str) -> None:
    began = time.thread_time()
    with pytest.raises(tool_calls.Unreadable):
        tool_calls.parse(action)
    assert time.thread_time() - began < 0.3


@pytest.mark.parametrize(
    ("action", "answer"),
    [
        ('```json\n{"answer": 4}\n```', "4"),
        ('``` {"answer": 4} ```', "4"),
        ("<answer>a<answer>b</answer> and <answer>c</answer> and <answer>", "c"),
    ],
)
def test_fences_and_open_ends_are_read_as_before(action: str, answer: str) -> None:
    assert tool_calls.parse(action).answer == answer


@pytest.mark.parametrize("name", OWNED)
def test_what_is_put_over_the_base_class_is_refused_or_without_effect(name: str) -> None:
    with pytest.raises(ContractError, match=name):
        keep(_replaced(name))
    env = DeskEnv()
    own = keep(env)
    setattr(env, name, lambda *a: "mine")
    assert own[name].func is vars(ToolEnv)[name]
    assert own["reset"](3)[0].startswith("A desk.")


def _replaced(name: str) -> ToolEnv:
    env = DeskEnv()
    setattr(env, name, lambda *a: "mine")
    return env


def test_a_class_changed_after_it_was_made_is_refused() -> None:
    changed = type("ChangedEnv", (DeskEnv,), {})
    changed.step = lambda self, action: ("", 1.0, True, False, {})  # type: ignore[attr-defined]
    with pytest.raises(ContractError, match="step"):
        keep(changed())


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(schema.KEYWORDS)), inner)
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_value_is_a_sound_schema_or_refused(value: Any) -> None:
    try:
        schema.require_sound(value)
    except schema.SchemaError:
        return
    # what is sound can be worked with
    for given_ in (None, True, 1, 1.5, "x", [], {}, [1], {"a": 1}):
        assert isinstance(schema.problems(given_, value, "it"), list)
    tool = {"type": "function", "function": {"name": "t", "parameters": value}}
    assert all(json.loads(action) for action in tool_actions([tool], "take 3 of 'red' things"))


def test_schemas_are_not_nested_without_end() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(5_000):
        deep = {"type": "array", "items": deep}
    with pytest.raises(schema.SchemaError, match="deeply"):
        schema.require_sound(deep)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        [{}],
        ["x"],
        [{"function": {"name": "t"}}],
        [{"function": {"name": "", "parameters": {}}}],
        [{"function": {"name": "t", "parameters": {"type": []}}}],
        [{"function": {"name": "t", "parameters": {"minimum": "a"}}}],
        [{"function": {"name": "t", "parameters": {"pattern": "("}}}],
        [{"function": {"name": "t", "parameters": {}}}] * 25,
    ],
)
def test_forged_tools_are_a_fault_of_the_program(answer: object) -> None:
    with pytest.raises(EnvProtocolError):
        read_tools(answer)


def test_real_tools_are_read() -> None:
    tools = DeskEnv().get_tools()
    assert read_tools(tools) == tools


class AskEnv(DeskEnv):
    """A request that lacks a value, and one that no tool serves."""

    def instructions(self) -> list[Any]:
        return [
            ("Open a drawer.", REPLY),
            ("Number 2.", lambda s: s["open"] == 2),
            ("Sing.", REPLY),
        ]

    def plan(self) -> list[Any]:
        return ["Which one?", ("open", {"drawer": 2}), "I cannot sing."]


def test_the_right_act_may_be_to_say_something() -> None:
    env, _ = fresh(AskEnv)
    assert env.messages() == [("user", "A desk.\n\nOpen a drawer.")]
    assert env.criteria_met() == [False, False, False]
    said, wanted = env.solution()[0], "Instruction 2 of 3: Number 2."
    assert json.loads(said) == {"reply": "Which one?"}
    assert wanted in env.step(said)[0]
    assert env.messages() == [("user", "Number 2.")]
    assert env.step(said)[0].startswith("That is not done yet.")
    assert env.messages() == [("user", "That is not done yet.")]
    assert env.criteria_met() == [True, False, False]


def test_nothing_may_be_changed_before_it_is_said() -> None:
    env, _ = fresh(AskEnv)
    env.step(call("open", drawer=1))
    assert env.messages() == [("tool", "opened")]
    for _ in range(2):
        env.step('{"reply": "Which one?"}')
    assert env.criteria_met() == [False, False, False]


def test_calls_that_somebody_else_could_not_read_are_answered() -> None:
    env, _ = fresh()
    observation = env.step('{"unreadable": "no <tool_call>{} is closed"}')[0]
    assert observation.startswith("Error: no <tool_call>{} is closed")
    assert env.messages() == [("tool", "Error: no <tool_call>{} is closed")]


def test_strings_of_a_call_may_hold_the_marks_of_calls() -> None:
    (made,) = tool_calls.parse('[{"name": "f", "arguments": {"a": "<tool_call>{</tool_call>"}}]').calls
    assert made.arguments == {"a": "<tool_call>{</tool_call>"}
