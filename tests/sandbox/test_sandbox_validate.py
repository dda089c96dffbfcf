"""The validator's rungs, each by a program that falls from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from scenes.programs import ECHO, LEVERS, PEAK
from scenes.sandboxes import held_pool

from sandbox import (
    RUNGS,
    SandboxPool,
    SandboxSettings,
    SandboxUnavailable,
    SpawnRefused,
    Validator,
    ValidatorSettings,
    Verdict,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair() -> AsyncIterator[SandboxPool]:
    settings = SandboxSettings(zygotes=2, cpu_call_seconds=0.2, cpu_load_seconds=0.5, strikes=0, nice=0)
    async with held_pool(settings) as pool:
        yield pool


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
    assert found.varies
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


NEVER = 'return f"{self.seed} {a}", 0.0, False, False, {}'
FALLS = {
    "nothing": ("extract", " \n", "no program"),
    "prose": ("parse", "Here is the program:", "SyntaxError"),
    "nesting": ("parse", "x = " + "(" * 5000 + ")" * 5000, "parenthes"),
    "import": ("lint", "import requests\n" + PEAK, "line 1: import of requests"),
    "eval": ("lint", PEAK.replace("int(a)", "eval(a)"), "eval"),
    "no class": ("load", "x = 1", "no class whose name ends in Env"),
    "name": ("load", "boom\n" + PEAK, "NameError"),
    "loop": ("load", "while True: pass\n" + PEAK, "CPU time"),
    "constructor": ("load", game(head="def __init__(self): 1 / 0", step=NEVER), "ZeroDivisionError"),
    "reset raises": ("reset", game(reset="1 / 0", step=NEVER), "ZeroDivisionError"),
    "reset raises later": (
        "reset",
        game(reset='self.n = getattr(self, "n", 0) + 1; return "one" if self.n < 2 else [][0]', step=NEVER),
        "reset(",
    ),
    "no text": ("reset", game(reset="return 5", step=NEVER), "must return text, not int"),
    "empty text": ("reset", game(reset='return " "', step=NEVER), "empty"),
    "long text": ("reset", game(reset='return "x" * 9000', step=NEVER), "9000"),
    "four values": ("step", game(step='return "", 0.0, False, {}'), "5 values, not 4"),
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
    rung, source, word = FALLS[name]
    found = await verdict(pair, source)
    assert (found.ok, found.rung) == (False, rung), found
    assert word in found.reason, found
    assert found.rung in RUNGS
    assert pair.statistics()["live"] == 0


async def test_turns_rung(pair: SandboxPool) -> None:
    found = await verdict(pair, game(step=NEVER), require_end=True)
    assert found.rung == "turns"
    assert (await verdict(pair, game(step=NEVER))).ends is False


async def test_solution_that_wins(pair: SandboxPool) -> None:
    for answer in ("self.s", '"so it is \\\\boxed{%d}" % self.s', "[self.s]"):
        found = await verdict(pair, PEAK + f" def solution(self): return {answer}\n")
        assert found.ok, found
        assert found.solvable
    assert (await verdict(pair, PEAK + " def solution(self): return 77\n", solution="ignore")).ok


async def test_garbage_strictly(pair: SandboxPool) -> None:
    found = await verdict(pair, PEAK, garbage="strict")
    assert found.rung == "step"
    assert "banana" in found.reason
    careful = PEAK.replace("d=abs(int(a)-self.s)", "d=abs(int(a)-self.s) if a.isdigit() else 99")
    assert (await verdict(pair, careful, garbage="strict")).ok


async def test_variation_flagged_only(pair: SandboxPool) -> None:
    found = await verdict(pair, PEAK.replace("r.randint(0,2)", "1"), variation="flag")
    assert found.ok
    assert not found.varies


@pytest.mark.parametrize(
    ("step", "policy"),
    [
        ('return f"{a}", 1.0, True, False, {}', "empty"),
        ('return f"{a}", float(a == "7"), True, False, {}', "constant"),
        ('self.seen.add(a); return "", float(len(self.seen) > 1), self.t > 4, False, {}', "random"),
    ],
)
async def test_programs_won_blindly_are_degenerate(pair: SandboxPool, step: str, policy: str) -> None:
    found = await verdict(pair, game(reset='self.seen = set(); return f"pick 0..7, game {seed}"', step=step))
    assert found.ok
    assert found.degenerate
    assert found.policies[policy] == 1.0
    assert found.trivial_win_rate == 1.0


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


METADATA = "METADATA = {'goal': 'find it', 'skill': 'Search', 'difficulty': 'easy', 'max_turns': 2}\n"


async def test_metadata_required(pair: SandboxPool) -> None:
    found = await verdict(pair, PEAK, metadata="require")
    assert (found.rung, found.reason) == (
        "metadata",
        "METADATA must declare skill, difficulty, max_turns, goal",
    )
    found = await verdict(pair, METADATA + PEAK, metadata="require")
    assert found.ok, found
    assert found.metadata is not None
    assert (found.metadata.goal, found.metadata.max_turns) == ("find it", 2)
    assert (await verdict(pair, "METADATA = 5\n" + PEAK, metadata="ignore")).ok


async def test_degenerate_rejected_when_wanted(pair: SandboxPool) -> None:
    paying = game(step='return f"{a}", 1.0, True, False, {}')
    found = await verdict(pair, paying, degenerate="reject")
    assert (found.ok, found.rung, found.degenerate) == (False, "trivial", True)
    assert "12 of 12" in found.reason
    assert found.trivial_interval[0] > 0.75


async def judged(pair: SandboxPool, judge: Any, **settings: Any) -> Verdict:
    return await Validator(pair, ValidatorSettings(**settings), judge=judge).validate(PEAK, max_turns=10)


async def test_the_callers_check(pair: SandboxPool) -> None:
    seen: list[tuple[str, Verdict]] = []

    async def accept(source: str, found: Verdict) -> str:
        seen.append((source, found))
        return ""

    async def refuse(source: str, found: Verdict) -> str:
        return "the rules contradict each other"

    assert (await judged(pair, accept)).ok
    assert seen[0][0] == PEAK
    assert seen[0][1].ok
    found = await judged(pair, refuse)
    assert (found.ok, found.rung, found.reason) == (False, "judge", "the rules contradict each other")


async def test_the_callers_check_fails_closed(pair: SandboxPool) -> None:
    async def raises(source: str, found: Verdict) -> str:
        raise ValueError("no model")

    async def silent(source: str, found: Verdict) -> Any:
        return None

    async def late(source: str, found: Verdict) -> str:
        await asyncio.Event().wait()
        return ""

    async def ours(source: str, found: Verdict) -> str:
        raise SpawnRefused("busy")

    for judge, words in ((raises, "ValueError: no model"), (silent, "NoneType"), (late, "TimeoutError")):
        found = await judged(pair, judge, judge_seconds=0.05)
        assert (found.ok, found.rung) == (False, "judge"), found
        assert words in found.reason
    with pytest.raises(SpawnRefused):
        await judged(pair, ours)
    assert pair.statistics()["live"] == 0


async def test_the_callers_check_comes_last(pair: SandboxPool) -> None:
    async def never(source: str, found: Verdict) -> str:
        raise AssertionError("a program that fell was shown to the check")

    found = await Validator(pair, judge=never).validate("x = 1")
    assert found.rung == "load"


@pytest.mark.parametrize("high", [50, 1000, 10**6, 10**9])
async def test_hidden_numbers_of_wide_ranges_vary(pair: SandboxPool, high: int) -> None:
    source = game(
        reset=f'self.x = random.Random(seed).randint(1, {high}); return "higher or lower?"',
        step='n = int(a); return ("=" if n == self.x else "<" if n < self.x else ">"), '
        "float(n == self.x), n == self.x, self.t > 9, {}",
    )
    found = await verdict(pair, source)
    assert found.ok, found
    assert found.varies
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
