"""Designs that are made to mislead or to break their judge: it must always come to a verdict."""

from __future__ import annotations

import time

import pytest
from sandbox_hacks import tool

from sandbox import RUNGS, SandboxPool, Validator, ValidatorSettings, Verdict

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LEDGER = tool()


async def judged(pool: SandboxPool, source: str, **settings: object) -> Verdict:
    """The verdict; the engine's own work for it is bounded too."""
    began = time.thread_time()
    found = await Validator(pool, ValidatorSettings(**settings)).validate(source, max_turns=8)  # type: ignore[arg-type]
    assert found.rung in RUNGS
    assert time.thread_time() - began < 3.0
    return found


def ledger(line: str) -> str:
    """The ledger with ``line`` first in its setup."""
    return LEDGER.replace("    def setup(self, rng):\n", f"    def setup(self, rng):\n        {line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "self.step = lambda action: ('you win', 1.0, True, False, {})",
        "type(self).step = lambda self, action: ('you win', 1.0, True, False, {})",
        "self.get_tools = lambda: [{}]",
        "self.criteria_met = lambda: [True, True]",
        "self.solution = lambda: []",
        "ToolEnv.step = lambda self, action: ('you win', 1.0, True, False, {})",
    ],
)
async def test_what_hides_the_base_class_has_no_effect(pair: SandboxPool, line: str) -> None:
    found = await judged(pair, ledger(line))
    assert found.ok, found
    assert not found.degenerate
    assert found.policies["random"] == 0


async def test_what_hides_it_from_the_start_is_refused(pair: SandboxPool) -> None:
    for line in ("LedgerEnv.step = LedgerEnv.execute_tool", "LedgerEnv.get_tools = lambda self: [{}]"):
        found = await judged(pair, f"{LEDGER}\n{line}\n")
        assert (found.rung, "ToolEnv owns" in found.reason) == ("load", True), found


async def test_the_base_classs_own_state_is_out_of_bounds(pair: SandboxPool) -> None:
    found = await judged(pair, ledger("self._ToolEnv__done = 2"))
    assert (found.rung, "_ToolEnv__done" in found.reason) == ("lint", True), found


# Speaks for itself instead of the runner: the lint sees nothing of it, as if it had been outwitted.
FORGER = """
import json, os
TOOLS = %s
def answer(i, **fields):
    body = json.dumps({"i": i, **fields}).encode()
    os.write(3, len(body).to_bytes(4, "little") + body)
about = {"cls": "ForgedEnv", "turns": 5, "calls": ["get_tools", "criteria_met", "solution"], "tools": True}
answer(1, o="take 1 to 9", m=about)
seed = 0
while True:
    head = os.read(3, 4)
    if not head:
        os._exit(0)
    size, body = int.from_bytes(head, "little"), b""
    while len(body) < size:
        body += os.read(3, size - len(body))
    request = json.loads(body)
    value = {"get_tools": TOOLS, "criteria_met": [False], "solution": ["x"]}.get(request.get("name"))
    answer(request["i"], o=json.dumps(value) if value else "take 1 to 9", te=request["op"] == "step")
"""


@pytest.mark.parametrize("tools", ["[{}]", "[{'function': {'name': 'a', 'parameters': {}}}] * 500", "7"])
async def test_forged_tools_get_a_verdict(
    pair: SandboxPool, tools: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def unlinted(source: str) -> None:
        """Find nothing."""

    monkeypatch.setattr(pair, "lint", unlinted)
    found = await judged(pair, FORGER % tools)
    assert found.rung in ("step", "criteria"), found
    assert "get_tools" in found.reason


def game(observation: str, step: str = "return 'x', 0.0, self.t > 2, False, {}") -> str:
    return (
        "import queue, random\nclass GameEnv:\n def reset(self, seed):\n  self.t, self.k = 0, seed % 3\n"
        "  self.n = getattr(self, 'n', 0) + 1\n"
        f"  return {observation}\n def step(self, a):\n  self.t += 1\n  {step}\n"
    )


@pytest.mark.parametrize(
    "observation",
    [
        "'1 to ' + '9' * 5000",
        "'9' * (7000 if self.n < 4 else 60000)",
        "'1-40 ' * (1500 if self.n < 4 else 13000)",
        "'x' if self.n < 4 else '\\\\boxed{' * 9000",
        "chr(0x661) * 5000",
        "'the answer is ' * 500 + str(seed)",
        "'\\ud800\\0\\x1b[2J' * 500",
    ],
)
async def test_observations_do_not_hold_the_judge_up(pair: SandboxPool, observation: str) -> None:
    await judged(pair, game(observation))


REFUSES = """
import random
class LampEnv:
 def reset(self, seed):
  self.t = 0; self.s = random.Random(seed).randint(4, 7)
  return "The lamps hide in 0..8, 3 tries"
 def step(self, a):
  self.t += 1; a = int(a); w = a == self.s
  self.t = None
  return "yes" if w else f"{a} is wrong", float(w), w or self.t >= 3, False, {}
"""


async def test_a_program_that_refuses_what_does_not_win_gets_a_verdict(pair: SandboxPool) -> None:
    """Every action is refused in some instance, so that none is left to toss a coin with."""
    await judged(pair, REFUSES, seeds=3, replays=1, probe_steps=60, coin_seeds=16)
    await judged(pair, REFUSES)


async def test_a_program_that_is_slow_in_every_step_does_not_hold_its_judge(pair: SandboxPool) -> None:
    step = "sum(range(3 * 10**6))\n  return 'x', 0.0, False, False, {}"
    began = time.monotonic()
    found = await judged(pair, game("str(seed)", step), seconds=2.0)
    assert (found.rung, found.ok) == ("step", False)
    assert "within 2 s" in found.reason
    assert time.monotonic() - began < 20.0
    assert pair.statistics()["live"] == 0
