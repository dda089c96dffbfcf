"""What a beginner gets wrong, and whether the reason says what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from scenes.sandboxes import held_pool

from sandbox import SandboxPool, SandboxSettings, Validator

GAME = """class MazeEnv:
    def reset(self, seed): return f"game {seed}"
    def step(self, action): return "no", 0.0, True, False, {}
"""
PAY = """class PayEnv(ToolEnv):
    def setup(self, rng): return {"due": rng.randint(1, 9), "paid": 0}
    def tool_pay(self, sum: int):
        self.state["paid"] = sum
    def instructions(self): return [("pay", lambda s: s["due"] == s["paid"])]
    def plan(self): return [("pay", {"sum": self.state["due"]})]
"""
MISTAKES = {
    "cut off": ("```python\n" + GAME, "parse", ("line 1", "```python", "cut off")),
    "prose": (f"Here:\n```python\n{GAME}```\n```", "parse", ("Here:", "cut off")),
    "prose around": (f"Here:\n```js\n{GAME}```", "parse", ("Here:", "only the program belongs here")),
    "unfinished line": (GAME.replace("{}\n", "{\n"), "parse", ("line 3", "never closed")),
    "constructor": (
        GAME.replace("reset", "__init__(self, size): pass\n    def reset", 1),
        "load",
        ("missing 1 required", "'size'", "max_turns only"),
    ),
    "another name": (GAME.replace("MazeEnv", "Maze"), "load", ("ends in Env", "only Maze")),
    "four values": (
        GAME.replace(", {}", ""),
        "step",
        ("5 values, not 4", "observation, reward, terminated, truncated, info"),
    ),
    "no tuple": (GAME.replace('"no", 0.0, True, False, {}', '"no"'), "step", ("not str", "truncated, info")),
    "too many turns": (
        "METADATA = {'max_turns': 99}\n" + GAME,
        "metadata",
        ("99", "25", "no more than those"),
    ),
    "no turns": (PAY.replace("(ToolEnv):", "(ToolEnv):\n    max_turns = 0"), "load", ("at least 1, not 0",)),
    "turns as text": (
        PAY.replace("(ToolEnv):", "(ToolEnv):\n    max_turns = '9'"),
        "load",
        ("whole number", "'9'"),
    ),
    "no hint of a type": (PAY.replace(": int", ""), "load", ("tool_pay", "sum has no type hint")),
    "another tool's name": (
        PAY.replace('[("pay", {', '[("give", {'),
        "criteria",
        ("no tool 'give'", "are pay"),
    ),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with held_pool(SandboxSettings(zygotes=1, strikes=0, nice=0)) as pool:
        yield pool


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", MISTAKES)
async def test_reasons(pool: SandboxPool, name: str) -> None:
    source, rung, words = MISTAKES[name]
    found = await Validator(pool).validate(source)
    assert found.rung == rung, found
    assert not [word for word in words if word not in found.reason], found.reason


@pytest.mark.asyncio(loop_scope="module")
async def test_without_the_mistakes_they_are_good(pool: SandboxPool) -> None:
    for source in (GAME, PAY):
        assert (await Validator(pool).validate(source)).ok


@pytest.mark.asyncio(loop_scope="module")
async def test_arguments_that_are_no_object(pool: SandboxPool) -> None:
    async with await pool.spawn(PAY) as instance:
        assert "the arguments must be an object, not [1]" in await instance.call("execute_tool", "pay", [1])
