"""Reasoning Gym's hard split: groups, programs, and its right answers in the sandbox."""

from __future__ import annotations

from collections import Counter

import pytest
from eval_scene import CONFIG, seat

from engine.errors import ConfigError
from engine.evals import reasoning
from engine.evals.external_benchmarks import UNANSWERED
from sandbox import SandboxPool, SandboxSettings

pytestmark = pytest.mark.skipif(
    bool(reasoning.hard_split("", CONFIG).available()), reason="reasoning-gym or pycosat is not installed"
)
# arXiv:2505.24760, A.3
SIZES = {"Math": 31, "Algorithmic": 36, "Cognition": 24, "Logic": 9}


def test_the_split_has_100_data_sets_in_four_groups() -> None:
    suite = reasoning.hard_split("", CONFIG)
    items = suite.items(0, 0)
    assert len(items) == 800
    assert Counter(item.group for item in items) == {name: 8 * size for name, size in SIZES.items()}
    assert len({item.name for item in items}) == 800
    assert {item.group for item in suite.items(4, 0)} == set(SIZES)


def test_the_validation_split_has_other_entries() -> None:
    test, validation = (reasoning.hard_split(name, CONFIG) for name in ("test", "validation"))
    assert (test.split, validation.split) == ("test", "validation")
    assert test.program("chain_sum") != validation.program("chain_sum")
    with pytest.raises(ConfigError, match="no split 'dev'"):
        reasoning.hard_split("dev", CONFIG)


@pytest.mark.e2e
@pytest.mark.timeout(900)
async def test_right_answers_win_in_every_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    suite = reasoning.hard_split("", CONFIG)
    items = suite.items(0, 0)[: len(reasoning.table())]
    won = 0
    async with SandboxPool(suite.sandbox(SandboxSettings(zygotes=1))) as pool:
        for item in items:
            name, number = item.data
            async with await pool.spawn(suite.program(name), seed=number) as instance:
                (answer,) = await instance.call("solution")
            if name in UNANSWERED:
                assert answer is None
                continue
            outcome = await suite.play(item, seat(f"\\boxed{{{answer}}}", sandbox=pool))
            won += outcome.score == 1.0
            assert outcome.score == 1.0, (name, outcome.detail)
            wrong = await suite.play(item, seat("\\boxed{nothing of the kind}", sandbox=pool))
            # it takes whatever is not "True" for "False"
            assert wrong.score == 0.0 or name == "game_of_life_halting", name
    with capsys.disabled():
        print(f"\nreasoning-gym-hard: {won} of {len(items)} right answers win")
    assert won == len(items) - len(UNANSWERED & set(reasoning.table()))
