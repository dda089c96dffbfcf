"""The judge's rung: it refuses without a verdict, and a fault of its server is none."""

from __future__ import annotations

from typing import Any

import pytest

from engine.inference.completion import InferenceUnavailable
from engine.inference.endpoint import EndpointMisused
from roles.designer.authors import DesignReply
from roles.designer.judge import ModelJudge
from sandbox import InfraFailure, Rejected, SandboxPool, SandboxSettings, Validator, Verdict

TOOLS = Verdict(ok=True, rung="accepted", tools=True)
SOURCE = """
class BellEnv(ToolEnv):
    max_turns = 4

    def setup(self, rng):
        return {"n": rng.randint(2, 9), "rung": 0}

    def tool_ring(self, times: int) -> str:
        \"\"\"Ring the bell.\"\"\"
        self.state["rung"] = times
        return "ding"

    def instructions(self):
        return [(f"Ring {self.state['n']} times.", lambda s: s["rung"] == s["n"])]

    def plan(self):
        return [("ring", {"times": self.state["n"]})]
"""


class Author:
    """Answers with ``text``, or raises it."""

    trained = False

    def __init__(self, text: Any, finish: str = "stop") -> None:
        self.text, self.finish = text, finish
        self.asked: list[str] = []

    async def write(self, prompt: Any, *, seed: int, key: str) -> DesignReply:
        self.asked.append("".join(map(chr, prompt)))
        if isinstance(self.text, Exception):
            raise self.text
        return DesignReply(self.text, self.finish)

    def statistics(self) -> dict[str, float]:
        return {}


class Chat:
    def first(self, content: str, *_: Any) -> list[int]:
        return list(map(ord, content))


def judge(text: Any, finish: str = "stop") -> tuple[ModelJudge, Author]:
    author = Author(text, finish)
    return ModelJudge(author, Chat()), author  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reply", "finish", "why"),
    [
        ("The bell can be rung. \\boxed{accept}", "stop", ""),
        ("\\boxed{reject: no tool rings}", "stop", "no tool rings"),
        ("first \\boxed{accept}, no: \\boxed{Reject: it lies}", "stop", "it lies"),
        ("<think>\\boxed{accept}</think> hm", "stop", "it gave no verdict"),
        ("\\boxed{perhaps}", "stop", "it gave no verdict"),
        ("", "stop", "it gave no verdict"),
        ("\\boxed{accept} and then", "length", "it gave no verdict"),
    ],
)
async def test_only_a_clear_yes_accepts(reply: str, finish: str, why: str) -> None:
    one, author = judge(reply, finish)
    if why:
        with pytest.raises(Rejected, match=why):
            await one.check(SOURCE, None, TOOLS)
    else:
        assert await one.check(SOURCE, None, TOOLS) is TOOLS
    assert "class BellEnv" in author.asked[0]
    found = one.statistics()
    assert found["judge_asked"] == 1
    assert found["judge_refused"] == bool(why)
    assert found["judge_silent"] == (why == "it gave no verdict")


@pytest.mark.parametrize("error", [InferenceUnavailable("gone"), EndpointMisused("no such model")])
async def test_a_fault_of_its_server_is_no_verdict(error: Exception) -> None:
    one, _ = judge(error)
    with pytest.raises(InfraFailure, match="cannot be asked"):
        await one.check(SOURCE, None, TOOLS)
    assert one.statistics()["judge_asked"] == 0


async def test_games_are_not_judged() -> None:
    one, author = judge("")
    game = Verdict(ok=True, rung="accepted")
    assert await one.check(SOURCE, None, game) is game
    assert author.asked == []


async def test_its_refusal_is_the_last_rung_and_names_the_reason() -> None:
    one, _ = judge("\\boxed{reject: too loud}")
    async with SandboxPool(SandboxSettings(preload=())) as pool:
        found = await Validator(pool, checks=[one.check]).validate(SOURCE)
    assert (found.ok, found.rung, found.reason) == (False, "judge", "too loud")
    assert found.solvable  # its plan wins: this is a false refusal, and counted as one
