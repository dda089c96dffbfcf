"""The credit of random runs, computed once more from their facts by the formulas of docs/credit.md.

Nothing of the scorer is used for it: facts and the recipe go in, the advantage of every sample comes out.
"""

from __future__ import annotations

import random
from collections import defaultdict
from statistics import fmean, pstdev
from typing import Any

import pytest
from msgspec.structs import replace
from scenes.loop_cast import CALM
from scenes.loop_world import Loop
from scenes.scorer_world import config

from bus.messages import DesignRejected, EnvironmentReady, EpisodeFinished
from engine.config import Config, RoleTraining

LUCK = replace(
    CALM,
    env=0.1,
    quarantined=0.05,
    rejected=0.25,
    no_hint=0.15,
    degenerate=0.1,
    flagged=0.1,
    truncated=0.1,
    partly=0.2,
)


def drawn(chance: random.Random) -> Config:
    """A recipe whose rewards depend on nothing but the facts of one window."""
    window = chance.randint(1, 3)
    return config(
        steps=chance.randint(1, 4),
        curriculum={
            "schedule": chance.choice(["rolling", "epoch"]),
            "environments": chance.randint(1, 4),
            "rounds_per_window": window,
            "delay": chance.choice([0, window, window + 1]),
            "plays_per_round": chance.randint(2, 4),
            "hinted_plays": chance.randint(0, 4),
            "hinted_rounds": chance.randint(1, window),
            "lead": chance.randint(0, 2),
        },
        reward={"variant": chance.choice(["blend", "regret", "solve_rate", "frontier"])},
        learner={
            role: {
                "max_staleness": 64,
                "scope": scope,
                "normalise": chance.choice(["zscore", "centre"]),
                "advantage_scale": chance.choice([1.0, 10.0]),
            }
            for role, scope in (("agent", "group"), ("designer", chance.choice(["skill", "global"])))
        },
        designer={
            "skills": ["Logic", "Optimization"],
            "attempts": chance.randint(1, 3),
            "invalid": chance.choice(["penalise", "drop"]),
        },
    )


def advantages(rewards: dict[str, float], groups: dict[str, Any], settings: RoleTraining) -> dict[str, float]:
    """(r - mean) of the group, over its deviation + 1e-8 for zscore, times the scale."""
    members = defaultdict(list)
    for name, group in groups.items():
        members[group].append(rewards[name])
    found = {}
    for name, group in groups.items():
        values = members[group]
        spread = pstdev(values) + 1e-8 if settings.normalise == "zscore" else 1.0
        flat = max(values) - min(values) < 1e-12
        found[name] = 0.0 if flat else (rewards[name] - fmean(values)) / spread * settings.advantage_scale
    return found


def of_plays(recipe: Config, plays: list[EpisodeFinished]) -> dict[str, float]:
    """The plain plays of a design in a round are a group."""
    plain = {one.sample: one for one in plays if one.arm == "plain"}
    returns = {name: one.returned for name, one in plain.items()}
    groups = {name: (one.design, one.round) for name, one in plain.items()}
    return advantages(returns, groups, recipe.learner.agent)


def reward(recipe: Config, ready: EnvironmentReady, plays: list[EpisodeFinished]) -> float | None:
    """The reward of a design by the plays of its window; None where it has none."""
    table = recipe.reward
    plain = [one for one in plays if one.arm == "plain"]
    crashed = sum(one.failure == "env" for one in plain)
    if ready.finding.degenerate or ready.finding.flag or crashed > len(plain) / 2:
        return table.degenerate_reward
    if not plain:
        return None
    win = fmean(one.returned for one in plain)
    hinted = {(one.round, one.index): one.returned for one in plays if one.arm == "hinted"}
    pairs = [hinted[one.round, one.index] - one.returned for one in plain if (one.round, one.index) in hinted]
    regret = fmean(pairs) if pairs else 0.0
    outside = max(table.low - win, win - table.high, 0.0)
    plateau = max(0.0, 1.0 - outside / table.ramp)
    value = {
        "blend": 0.6 * plateau + 0.4 * min(1.0, max(0.0, regret / table.regret_scale)),
        "regret": max(0.0, regret),
        "solve_rate": plateau,
        "frontier": max(0.0, 1.0 - (win - 0.5) ** 2 / table.frontier_scale),
    }[table.variant]
    return max(table.degenerate_reward, value)


def of_designs(recipe: Config, facts: list[Any], plays: list[EpisodeFinished]) -> dict[str, float]:
    """Designs of a cohort are centred by skill or all together; invalid attempts earn ``invalid_reward``."""
    mine = defaultdict(list)
    for one in plays:
        mine[one.design].append(one)
    rewards: dict[str, float] = {}
    groups: dict[str, Any] = {}
    for fact in facts:
        value: float | None = None
        if isinstance(fact, EnvironmentReady):
            value = reward(recipe, fact, mine[fact.design])
        elif isinstance(fact, DesignRejected) and recipe.designer.invalid == "penalise":
            value = recipe.reward.invalid_reward
        if value is not None:
            rewards[fact.sample] = value
            apart = recipe.learner.designer.scope == "skill"
            groups[fact.sample] = (fact.cohort, fact.skill if apart else "")
    return advantages(rewards, groups, recipe.learner.designer)


def compare(number: int) -> int:
    """Play a run and compare the credit of every sample; return how many there are."""
    chance = random.Random(number)
    recipe = drawn(chance)
    loop = Loop(recipe, chance, LUCK)
    loop.run()
    plays = [fact for fact in loop.events if isinstance(fact, EpisodeFinished)]
    credits = [credit for batch in loop.history for credit in batch.message.credits]
    expected = of_plays(recipe, plays) | of_designs(recipe, loop.events, plays)
    assert len({credit.sample for credit in credits}) == len(credits)
    assert {credit.sample for credit in credits} == expected.keys(), "with KL everything has a gradient"
    for credit in credits:
        assert credit.advantage == pytest.approx(expected[credit.sample], abs=1e-9), (number, credit)
    return len(credits)


def test_credit_follows_the_documented_formulas() -> None:
    assert sum(map(compare, range(40))) > 500


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
def test_credit_of_five_hundred_runs_follows_the_documented_formulas() -> None:
    assert sum(map(compare, range(1000, 1500))) > 8000
