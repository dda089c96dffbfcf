"""The designer's reward under the corrected rules, window statistics, advantages."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import RewardConfig, RoleTraining
from roles.scorer.advantages import normalise
from roles.scorer.parity import ReferenceRules, reference_rewards
from roles.scorer.rewards import (
    BUILT_IN,
    Evidence,
    Reward,
    Tracker,
    micro_lp,
    plateau,
    raw_rewards,
    regret_credit,
)

BAND = {0: [1.0, 0.0], 1: [1.0, 0.0]}


def reward(settings: RewardConfig | None = None, **fields: Any) -> float | None:
    evidence = Evidence(**({"skill": "Logic", "rounds": BAND, "regret": 0.3, "hinted": 0.8} | fields))
    return paid([evidence], settings or RewardConfig(), Tracker())[0]


def paid(evidence: list[Evidence], settings: RewardConfig, tracker: Tracker) -> list[float | None]:
    formula = Reward(settings.variant, BUILT_IN[settings.variant], settings)
    return raw_rewards(evidence, settings, tracker, formula)


def test_blend_is_plateau_and_regret() -> None:
    assert reward() == pytest.approx(1.0)
    assert reward(regret=0.075) == pytest.approx(0.8)
    assert reward(regret=-0.5) == pytest.approx(0.6)
    assert reward(rounds={0: [0.0, 0.0]}, regret=0.3) == pytest.approx(0.4)
    assert reward(rounds={0: [1.0, 1.0]}, regret=0.0) == 0.0


def test_a_missing_hint_earns_no_regret_credit() -> None:
    assert reward(regret=None, hinted=None) == pytest.approx(0.6)
    assert reward(RewardConfig(variant="regret"), regret=None, hinted=None) == 0.0


def test_a_design_that_was_never_played_has_no_reward() -> None:
    assert reward(rounds={}, regret=None) is None
    assert reward(rounds={0: []}, regret=None) is None
    never = Evidence(skill="Logic", rounds={}, hinted=0.9)
    found = reference_rewards([never], RewardConfig(), Tracker())
    assert found == [pytest.approx(0.4)], "the reference pays a design that was never played"


def test_a_broken_design_earns_the_floor_and_no_valid_one_less() -> None:
    assert reward(broken=True) == 0.0
    assert reward(RewardConfig(degenerate_reward=0.1), broken=True, rounds={}) == 0.1
    crooked = RewardConfig(frontier_weight=5.0, regret_weight=0.0)
    assert reward(crooked, rounds={0: [1.0, 1.0]}) == 0.0
    falling = RewardConfig(micro_lp_weight=1.0, regret_weight=0.0)
    assert reward(falling, rounds={0: [1.0, 1.0], 1: [0.0, 0.0]}) == 0.0


def test_the_reference_masks_a_negative_blend() -> None:
    crooked = RewardConfig(frontier_weight=5.0, regret_weight=0.0)
    evidence = [Evidence(skill="Logic", rounds={0: [1.0, 1.0]})]
    assert reference_rewards(evidence, crooked, Tracker()) == [None]


@pytest.mark.parametrize(
    ("variant", "rounds"),
    [("regret", BAND), ("micro_lp", {0: [1.0], 1: [0.0]}), ("frontier", {0: [1.0, 1.0]})],
)
def test_no_variant_falls_below_zero_on_its_own(variant: Any, rounds: dict[int, list[float]]) -> None:
    settings = RewardConfig(variant=variant, degenerate_reward=-0.5)
    assert reward(settings, rounds=rounds, regret=-0.3) == 0.0


def test_progress_is_clipped_within_a_blend() -> None:
    only = RewardConfig(plateau_weight=0.0, regret_weight=0.0, micro_lp_weight=1.0, degenerate_reward=-2.0)
    assert reward(only, rounds={0: [0.0], 1: [1.0]}) == 1.0
    assert reward(only, rounds={0: [1.0], 1: [0.0]}) == -1.0
    assert reward(only, rounds={0: [0.5], 1: [0.55]}) == pytest.approx(0.5)


def test_learning_potential_is_the_distance_to_a_mean_that_remembers() -> None:
    settings, tracker = RewardConfig(variant="learning_potential"), Tracker()
    first = Evidence(skill="Logic", rounds={0: [0.2]})
    paid([first], settings, tracker)
    second = Evidence(skill="Logic", rounds={0: [1.0]})
    assert paid([second], settings, tracker) == [pytest.approx(0.8)]
    assert tracker.slow["Logic"] == pytest.approx(0.85 * 0.2 + 0.15 * 1.0)
    assert tracker.fast["Logic"] == pytest.approx(0.02 * 0.2 + 0.98 * 1.0)


def test_micro_lp_weighs_rounds_by_their_plays() -> None:
    assert micro_lp({0: [0.0], 1: [0.5], 2: [1.0]}) == pytest.approx(1.0)
    assert micro_lp({0: [0.0], 3: [1.0]}) == pytest.approx(1.0)
    assert micro_lp({0: [0.0]}) == 0.0


def test_the_reference_compares_halves() -> None:
    settings, rules = RewardConfig(variant="micro_lp"), ReferenceRules()
    for middle, expected in ((1.0, 1.0), (0.0, 0.5)):
        item = Evidence(skill="Logic", rounds={0: [0.0], 1: [middle], 2: [1.0]})
        assert reference_rewards([item], settings, Tracker(), rules) == [expected]


@given(win=st.floats(-1, 1), low=st.floats(0, 0.5), width=st.floats(0, 0.5), ramp=st.floats(0.01, 1))
def test_plateau_is_one_inside_and_falls_on_both_sides(
    win: float, low: float, width: float, ramp: float
) -> None:
    high = low + width
    value = plateau(win, low, high, ramp)
    assert 0.0 <= value <= 1.0
    assert (value == 1.0) == (low <= win <= high) or math.isclose(value, 1.0)
    assert plateau(low - ramp, low, high, ramp) == pytest.approx(0.0, abs=1e-9)
    assert plateau(high + ramp / 2, low, high, ramp) == pytest.approx(0.5)


def test_a_plateau_without_ramps_is_a_step() -> None:
    assert [plateau(win, 0.4, 0.6, 0.0) for win in (0.39, 0.4, 0.6, 0.61)] == [0.0, 1.0, 1.0, 0.0]


def test_regret_credit_is_clipped() -> None:
    assert [regret_credit(x, 0.15) for x in (None, -1.0, 0.0, 0.075, 0.15, 2.0)] == [0, 0, 0, 0.5, 1, 1]


@given(
    rewards=st.lists(st.floats(-1, 1), min_size=1, max_size=20),
    kind=st.sampled_from(["zscore", "centre"]),
    scale=st.floats(0.1, 32),
)
def test_advantages_of_a_label_sum_to_zero(rewards: list[float], kind: Any, scale: float) -> None:
    labels = [str(i % 3) for i in range(len(rewards))]
    got = normalise(rewards, labels, RoleTraining(normalise=kind, advantage_scale=scale))
    for label in set(labels):
        part = [value for value, name in zip(got, labels, strict=True) if name == label]
        assert sum(part) == pytest.approx(0.0, abs=1e-5 * scale)
