"""The validator's rungs, each by programs that fall from it; the reasons say what to do."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from sandbox_hacks import tool
from scenes.programs import ECHO, LEVERS, PEAK

from sandbox import (
    RUNGS,
    Rejected,
    SandboxPool,
    SandboxUnavailable,
    Validator,
    ValidatorSettings,
    Verdict,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def verdict(pool: SandboxPool, source: str, **settings: object) -> Verdict:
    return await Validator(pool, ValidatorSettings(**settings)).validate(source, max_turns=10)  # type: ignore[arg-type]


def game(*, reset: str = 'return f"seed {seed}"', step: str, head: str = "") -> str:
    return (
        f"import random\nclass GameEnv:\n {head or 'kind = 1'}\n def reset(self, seed):\n"
        f"  self.t = 0; self.seed = seed\n  {reset}\n def step(self, a):\n  self.t += 1\n  {step}\n"
    )


@pytest.mark.parametrize("source", [PEAK, LEVERS, PEAK.replace("import random\n", "")])
async def test_good_programs_are_accepted(pair: SandboxPool, source: str) -> None:
    found = await verdict(pair, source)
    assert (found.ok, found.rung, found.reason) == (True, "accepted", "")
    assert found.class_name == "Env"
    assert found.max_turns is None
    assert found.first_observations[0] in ("kites peak in 0..8, 2 tries", "wheels has levers 0..8, 4 tries")
    assert found.trivial_win_rate < 0.9
    assert not found.degenerate
    assert found.ends
    assert found.solvable


async def test_turns_argument_is_passed_and_reported(pair: SandboxPool) -> None:
    head = "def __init__(self, max_turns=3): self.max_turns = max_turns"
    step = 'return f"{self.seed % 7 - int(a)}", 0.0, self.t >= self.max_turns, False, {}'
    found = await verdict(pair, game(head=head, step=step))
    assert found.ok, found
    assert found.max_turns == 3
    assert found.class_name == "GameEnv"
    assert not found.solvable
    for own in ("=12", "", "=None"):
        assert (await verdict(pair, game(head=head.replace("=3", own), step=step))).max_turns == 10


GAME = """class MazeEnv:
    def reset(self, seed): return f"game {seed}"
    def step(self, action): return "no", 0.0, True, False, {}
"""
BELL = tool()
NEVER = 'return f"{self.seed} {a}", 0.0, False, False, {}'
FALLS = {
    "nothing": ("extract", " \n", "no program"),
    "prose": ("parse", "Here is the program:", "SyntaxError"),
    "cut off": ("parse", "```python\n" + GAME, "line 1", "```python", "cut off"),
    "an open fence": ("parse", f"Here:\n```python\n{GAME}```\n```", "Here:", "cut off"),
    "prose around": ("parse", f"Here:\n```js\n{GAME}```", "Here:", "only the program belongs here"),
    "unfinished line": ("parse", GAME.replace("{}\n", "{\n"), "line 3", "never closed"),
    "indentation": ("parse", GAME.replace("    def step", "   def step"), "unindent"),
    "nesting": ("parse", "x = " + "(" * 5000 + ")" * 5000, "parenthes"),
    "import": ("lint", "import requests\n" + PEAK, "line 1: import of requests"),
    "eval": ("lint", PEAK.replace("int(a)", "eval(a)"), "eval"),
    "no class": ("load", "x = 1", "no class whose name ends in Env"),
    "another name": ("load", GAME.replace("MazeEnv", "Maze"), "ends in Env", "only Maze"),
    "no step": ("load", GAME.replace("step", "act"), "no method step"),
    "name": ("load", "boom\n" + PEAK, "NameError"),
    "loop": ("load", "while True: pass\n" + PEAK, "CPU time"),
    "constructor": ("load", game(head="def __init__(self): 1 / 0", step=NEVER), "ZeroDivisionError"),
    "constructor's arguments": (
        "load",
        GAME.replace("reset", "__init__(self, size): pass\n    def reset", 1),
        *("missing 1 required", "'size'", "max_turns only"),
    ),
    "tool turns": ("load", BELL.replace("max_turns = 6", "max_turns = 0"), "at least 1, not 0"),
    "tool turns as text": ("load", BELL.replace("max_turns = 6", "max_turns = '9'"), "whole number", "'9'"),
    "tool without hints": ("load", BELL.replace("name: str", "name"), "tool_pay", "name has no type hint"),
    "no tools": ("load", BELL.replace("tool_", "do_"), "0 methods tool_"),
    "owned method": ("load", BELL + "    def step(self, a): pass\n", "ToolEnv owns"),
    "unknown schema": (
        "load",
        BELL.replace("max_turns = 6", "schemas = {'pay': {'oneOf': []}}"),
        "oneOf",
    ),
    "too many turns": (
        "metadata",
        "METADATA = {'max_turns': 99}\n" + GAME,
        *("99", "10 are played", "no more than those"),
    ),
    "untrue turns": (
        "metadata",
        "METADATA = {'max_turns': 6}\n" + game(head="max_turns = 9", step=NEVER),
        "declares 6 turns, but its max_turns is 9",
    ),
    "reset raises": ("reset", game(reset="1 / 0", step=NEVER), "ZeroDivisionError"),
    "reset raises later": (
        "reset",
        game(reset='self.n = getattr(self, "n", 0) + 1; return "one" if self.n < 2 else [][0]', step=NEVER),
        "reset(",
    ),
    "no text": ("reset", game(reset="return 5", step=NEVER), "must return text, not int"),
    "empty text": ("reset", game(reset='return " "', step=NEVER), "empty"),
    "long text": ("reset", game(reset='return "x" * 9000', step=NEVER), "9000"),
    "true at reset": ("criteria", tool('s["paid"] is None'), "criterion 1 is true already"),
    "criterion acts": ("criteria", tool('s.update(n=s.get("n", 0) + 1) or s["n"] > 1'), "must only look"),
    "criterion no boolean": ("criteria", tool('s["paid"]'), "must be True or False"),
    "criterion raises": ("criteria", tool('s["sum"] == 1'), "KeyError"),
    "unreachable": ("criteria", tool('s["paid"] == 7'), "no call of the plan makes criterion 1 true"),
    "no plan": ("criteria", BELL.replace("def plan", "def plans"), "needs plan()"),
    "plan against its schema": ("criteria", tool(plan='return [("pay", {"name": 7})]'), "must be a string"),
    "plan of another tool": ("criteria", tool(plan='return [("give", {})]'), "no tool 'give'", "ask, pay"),
    "no tuple": ("step", GAME.replace('"no", 0.0, True, False, {}', '"no"'), "not str", "truncated, info"),
    "four values": (
        "step",
        game(step='return "", 0.0, False, {}'),
        *("5 values, not 4", "observation, reward, terminated, truncated, info"),
    ),
    "flag is a number": ("step", game(step='return "", 0.0, 0, False, {}'), "must be True or False, not int"),
    "reward is text": ("step", game(step='return "", "1", False, False, {}'), "must be a number, not str"),
    "reward": ("step", game(step='return "", float("nan"), False, False, {}'), "not finite"),
    "reward range": ("step", game(step='return "", 100, False, False, {}'), "outside [-10, 10]"),
    "bug": ("step", game(step="return nothing, 0.0, False, False, {}"), "NameError"),
    "always raises": ("step", game(step='raise ValueError("never")'), "every action"),
    "exit": (
        "step",
        game(step="import os; os._exit(1)").replace("os._exit", "(lambda: os)()._exit"),
        "code 1",
    ),
    "hang": ("step", game(step="while True: pass"), "CPU time"),
    "off by one": (
        "turns",
        game(head="max_turns = 5", step="return f'{self.seed} {a}', 0.0, self.t > 5, False, {}"),
        "max_turns is 5",
    ),
    "turns not kept": ("turns", "METADATA = {'max_turns': 6}\n" + game(step=NEVER), "goes on after turn 6"),
    "constant game": ("variation", PEAK.replace("r.randint(0,2)", "1"), "every seed"),
    "addresses": ("replay", game(step="return str(id(object())), 0.0, self.t > 3, False, {}"), "seed"),
    "not started over": (
        "replay",
        game(reset='GameEnv.kind += 1; return f"seed {seed} {self.kind}"', step=NEVER),
        "first",
    ),
    "wrong solution": ("solution", PEAK + ' def solution(self): return "77"\n', "does not win"),
    "solution raises": ("solution", PEAK + " def solution(self): return 1 / 0\n", "ZeroDivisionError"),
    "no solution": ("solution", PEAK + " def solution(self): return None\n", "no action"),
    "leak": (
        "leak",
        PEAK.replace('"kites', 'f"Answer: {self.s} kites') + " def solution(self): return self.s\n",
        "away",
    ),
}


@pytest.mark.parametrize("name", FALLS)
async def test_rungs(pair: SandboxPool, name: str) -> None:
    rung, source, *words = FALLS[name]
    found = await verdict(pair, source)
    assert (found.ok, found.rung) == (False, rung), found
    assert not [word for word in words if word not in found.reason], found.reason
    assert pair.statistics()["live"] == 0


async def test_there_are_programs_for_every_rung() -> None:
    # the others need checks of the caller's, or flags turned into rejections
    others = {"trivial", "off_ticket", "incoherent", "duplicate", "judge", "accepted"}
    assert {fall[0] for fall in FALLS.values()} == set(RUNGS) - others


async def test_without_the_mistakes_they_are_good(pair: SandboxPool) -> None:
    for source in (GAME, BELL):
        assert (await verdict(pair, source)).ok
    assert (await verdict(pair, game(step=NEVER))).ends is False


async def test_arguments_that_are_no_object(pair: SandboxPool) -> None:
    async with await pair.spawn(BELL) as instance:
        assert "the arguments must be an object, not [1]" in await instance.call("execute_tool", "pay", [1])


async def test_garbage_strictly(pair: SandboxPool) -> None:
    found = await verdict(pair, PEAK, garbage="strict")
    assert found.rung == "step"
    assert "banana" in found.reason
    careful = PEAK.replace("d=abs(int(a)-self.s)", "d=abs(int(a)-self.s) if a.isdigit() else 99")
    assert (await verdict(pair, careful, garbage="strict")).ok


async def test_long_episodes_stay_within_the_budget(pair: SandboxPool) -> None:
    validator = Validator(pair, ValidatorSettings(probe_steps=150))
    source = game(step='return f"{self.t} {self.seed} {a}", 0.0, False, False, {}')
    found = await validator.validate(source, max_turns=25)
    assert found.ok
    assert set(found.policies) >= {"sweep", "random"}


async def test_programs_are_validated_side_by_side(pair: SandboxPool) -> None:
    validator = Validator(pair)
    found = await asyncio.gather(*(validator.validate(source) for source in (PEAK, LEVERS, "x", ECHO) * 4))
    assert [one.rung for one in found] == ["accepted", "accepted", "load", "accepted"] * 4


async def test_infrastructure_is_not_the_programs_fault() -> None:
    pool = SandboxPool()
    with pytest.raises(SandboxUnavailable):
        await Validator(pool).validate(PEAK)


async def test_the_callers_checks_come_last(pair: SandboxPool) -> None:
    seen: list[tuple[str, Any]] = []

    async def mark(source: str, ticket: Any, found: Verdict) -> Verdict:
        seen.append((source, ticket))
        return msgspec.structs.replace(found, near="another")

    async def refuse(source: str, ticket: Any, found: Verdict) -> Verdict:
        raise Rejected("duplicate", f"as {found.near}")

    found = await Validator(pair, checks=(mark, refuse)).validate(PEAK, "ticket", max_turns=10)
    assert (found.ok, found.rung, found.reason, found.class_name) == (False, "duplicate", "as another", "Env")
    assert seen == [(PEAK, "ticket")]
    assert (await Validator(pair, checks=(mark,)).validate("x = 1")).rung == "load"
    assert len(seen) == 1, "a program that fell was shown to the check"


async def test_degenerate_rejected_when_wanted(pair: SandboxPool) -> None:
    paying = game(step='return f"{a}", 1.0, True, False, {}')
    found = await verdict(pair, paying, degenerate="reject")
    assert (found.ok, found.rung, found.degenerate) == (False, "trivial", True)
    assert "12 of 12" in found.reason
    assert found.trivial_interval[0] > 0.75


@pytest.mark.parametrize("high", [50, 1000, 10**6, 10**9])
async def test_hidden_numbers_of_wide_ranges_vary(pair: SandboxPool, high: int) -> None:
    source = game(
        reset=f'self.x = random.Random(seed).randint(1, {high}); return "higher or lower?"',
        step='n = int(a); return ("=" if n == self.x else "<" if n < self.x else ">"), '
        "float(n == self.x), n == self.x, self.t > 9, {}",
    )
    found = await verdict(pair, source)
    assert found.ok, found
    fixed = source.replace("random.Random(seed)", "random.Random(4)")
    assert (await verdict(pair, fixed)).rung == "variation"


async def test_only_the_solution_tells_the_instances_apart(pair: SandboxPool) -> None:
    source = game(
        reset='self.x = str(random.Random(seed).getrandbits(64)); return "the word?"',
        step='w = a == self.x; return ("yes" if w else "no"), float(w), w, self.t > 9, {}',
    )
    for one in (source, source + " def solution(self): return self.x\n"):
        found = await verdict(pair, one)
        assert found.ok, found
    fixed = source.replace("random.Random(seed)", "random.Random(4)")
    assert (await verdict(pair, fixed + " def solution(self): return self.x\n")).rung == "variation"


async def test_a_slow_game_that_differs_only_at_its_end_varies(pair: SandboxPool) -> None:
    step = 'return ("even" if self.t > 7 and self.seed % 2 else "on"), 0.0, False, self.t > 8, {}'
    assert (await verdict(pair, game(reset='return "wait"', step=step))).ok


async def test_copies_are_measured(pair: SandboxPool) -> None:
    source = game(
        reset='self.x = random.Random(seed).randint(10, 40); return f"stones {self.x}, heaps {self.x % 7}"',
        step="w = a == str(self.x PLUS); return str(self.t), float(w), w, self.t > 8, {}",
    )
    found = await verdict(pair, source.replace(" PLUS", ""))
    assert found.rung == "leak", found
    assert "stones" in found.reason
    assert (await verdict(pair, source.replace(" PLUS", " + 1"))).ok
