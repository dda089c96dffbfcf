"""Rewards of your own: by module path, by entry point; what does not fit is refused before a run starts."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import msgspec
import pytest
from own_rewards import half_won
from scenes.scorer_world import config, design_all, play_all, start

from engine.config import RewardConfig
from engine.errors import ConfigError, SpadeError
from roles.scorer import rewards
from roles.scorer.curriculum import Curriculum
from roles.scorer.rewards import Evidence
from roles.scorer.role import ScorerRole

PATH = "own_rewards:half_won"
ONE = {"environments": 3, "rounds_per_window": 1, "delay": 1}


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if an installed package had registered three rewards."""
    points = {
        name: EntryPoint(name, f"own_rewards:{target}", "spade.rewards")
        for name, target in (("half", "half_won"), ("gone", "no_such"), ("near", "near_target"))
    }
    monkeypatch.setattr("engine.registry.registered", lambda group: points)


def test_one_table_holds_built_in_and_installed_rewards() -> None:
    assert rewards.names() == [*rewards.BUILT_IN, "half", "gone", "near"]
    for name in rewards.BUILT_IN:
        rewards.load(config(reward={"variant": name}))


@pytest.mark.parametrize("name", [PATH, "half"])
def test_designs_are_paid_by_it(name: str) -> None:
    world, machine = start(config(steps=1, curriculum=ONE, reward={"variant": name, "frontier_scale": 0.5}))
    even, lost, broken = (ticket for ticket in world.tickets.values())
    design_all(world, machine)
    machine.state.designs[broken.design].degenerate = True
    play_all(world, machine, lambda r: float(r.index % 2 and r.design == even.design))
    assert world.scored[even.design].reward == 1.0
    assert world.scored[lost.design].reward == pytest.approx(0.75)
    assert world.scored[broken.design].reward == 0.0, "what is broken earns the floor, whoever pays"


def test_none_leaves_a_design_untrained() -> None:
    recipe = config(steps=1, curriculum=ONE | {"hinted_plays": 0}, reward={"variant": "half"})
    world, machine = start(recipe)
    design_all(world, machine)
    play_all(world, machine)
    assert len(world.scored) == 3
    assert not world.designs


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("blent", "is none of blend, regret"),
        ("gone", "own_rewards:no_such"),
        ("own_rewards:none", "cannot be loaded"),
        ("no_such_module:reward", "cannot be loaded: No module named"),
        ("own_rewards:twelve", "is a int, not a function"),
        ("own_rewards:of_one", "does not take"),
        ("own_rewards:nothing_much", "returned nan"),
        ("own_rewards:a_text", "returned 'much'"),
        ("own_rewards:breaks", "raised ZeroDivisionError"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(name: str, why: str) -> None:
    recipe = config(reward={"variant": name})
    for refuses in (ScorerRole.check, Curriculum):
        with pytest.raises(ConfigError, match=why):
            refuses(recipe)


def test_a_value_that_is_none_of_ours_stops_the_run_and_loses_nothing() -> None:
    recipe = config(steps=1, curriculum=ONE, reward={"variant": "own_rewards:easily_upset"})
    world, machine = start(recipe)
    design_all(world, machine)
    with pytest.raises(SpadeError, match="not like this"):
        play_all(world, machine)
    mended = config(steps=1, curriculum=ONE, reward={"variant": PATH})
    again = Curriculum(mended)
    said = again.start()
    for sequence, message in world.log:
        said += again.apply(sequence, message)
    assert again.state.closed == 1
    assert again.finished


def test_a_reward_has_settings_of_its_own() -> None:
    def paid(**tables: Any) -> float | None:
        recipe = msgspec.structs.replace(config(reward={"variant": "near"}), plugins=tables)
        return rewards.load(recipe)(Evidence(skill="s", rounds={0: [0.0, 1.0, 1.0, 1.0]}))

    assert paid() == pytest.approx(0.75)
    assert paid(near={"target": 0.75}) == 1.0
    with pytest.raises(ConfigError, match=r"plugins\.near\.aim"):
        paid(near={"aim": 0.75})
    with pytest.raises(ConfigError, match=r"plugins\.near\.target"):
        paid(near={"target": "high"})


@pytest.mark.parametrize(
    ("reward", "curriculum", "key"),
    [
        ({"plateau_weight": 0.5}, {}, "reward.plateau_weight"),
        ({}, {"hinted_plays": 0}, "curriculum.hinted_plays"),
        ({"variant": "regret"}, {"hinted_plays": 0}, "curriculum.hinted_plays"),
        ({"variant": "micro_lp"}, ONE, "curriculum.rounds_per_window"),
        ({"variant": "half", "reference_parity": True}, {}, "reward.reference_parity"),
    ],
)
def test_a_recipe_measures_what_it_pays_for(
    reward: dict[str, Any], curriculum: dict[str, Any], key: str
) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        ScorerRole.check(config(reward=reward, curriculum=curriculum))


def test_evidence_is_what_the_documentation_says() -> None:
    given = Evidence(
        skill="s", rounds={0: [0.0, 1.0]}, hinted=1.0, regret=0.4, measured=0.5, pairs=2, turns=1.5
    )
    assert set(msgspec.structs.asdict(given)) == {
        *("skill", "rounds", "hinted", "regret", "broken", "measured", "pairs", "noise_floor", "turns"),
        "baseline",
    }
    assert half_won(given, RewardConfig()) == 1.0
