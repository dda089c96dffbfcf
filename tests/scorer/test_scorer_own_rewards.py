"""Rewards of your own: by module path, by entry point; what does not fit is refused before a run starts."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import msgspec
import pytest
from own_rewards import half_won
from scorer_script import design_all, play_all, start
from scorer_world import config

from engine import recipe as recipes
from engine.config import RewardConfig
from engine.errors import ConfigError, SpadeError
from roles.scorer import custom
from roles.scorer.curriculum import CurriculumState
from roles.scorer.rewards import Evidence
from roles.scorer.role import ScorerRole

PATH = "own_rewards:half_won"
ONE = {"environments": 3, "rounds_per_window": 1, "delay": 1}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if an installed package had registered two rewards."""
    points = EntryPoints(
        [
            EntryPoint("half", PATH, "spade.rewards"),
            EntryPoint("gone", "own_rewards:no_such", "spade.rewards"),
        ]
    )

    def found(**wanted: Any) -> EntryPoints:
        return points.select(**wanted)

    monkeypatch.setattr("roles.scorer.custom.entry_points", found)
    monkeypatch.setattr("engine.checks.settings.entry_points", found)


def test_built_in_rewards_need_no_loading() -> None:
    assert [custom.load(RewardConfig(variant=name)) for name in custom.BUILT_IN] == [None] * 6


@pytest.mark.parametrize("name", [PATH, "half"])
def test_designs_are_paid_by_it(installed: None, name: str) -> None:
    world, machine = start(config(steps=1, curriculum=ONE, reward={"variant": name, "frontier_scale": 0.5}))
    even, lost, broken = (ticket for ticket in world.tickets.values())
    design_all(world, machine)
    machine.state.designs[broken.design].degenerate = True
    play_all(world, machine, lambda r: float(r.index % 2 and r.design == even.design))
    assert world.scored[even.design].reward == 1.0
    assert world.scored[lost.design].reward == pytest.approx(0.75)
    assert world.scored[broken.design].reward == 0.0, "what is broken earns the floor, whoever pays"


def test_none_leaves_a_design_untrained(installed: None) -> None:
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
        ("gone", "registered as own_rewards:no_such"),
        ("own_rewards:none", "cannot be loaded"),
        ("no_such_module:reward", "cannot be loaded: No module named"),
        ("own_rewards:twelve", "is a int, not a function"),
        ("own_rewards:of_one", "does not take"),
        ("own_rewards:nothing_much", "returned nan"),
        ("own_rewards:a_text", "returned 'much'"),
        ("own_rewards:breaks", "raised ZeroDivisionError"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(installed: None, name: str, why: str) -> None:
    recipe = config(reward={"variant": name})
    for refuses in (ScorerRole.check, CurriculumState):
        with pytest.raises(ConfigError, match=why):
            refuses(recipe)


def test_a_value_that_is_none_of_ours_stops_the_run_and_loses_nothing() -> None:
    recipe = config(steps=1, curriculum=ONE, reward={"variant": "own_rewards:easily_upset"})
    world, machine = start(recipe)
    design_all(world, machine)
    with pytest.raises(SpadeError, match="not like this"):
        play_all(world, machine)
    mended = config(steps=1, curriculum=ONE, reward={"variant": PATH})
    again = CurriculumState(mended)
    said = again.start()
    for sequence, message in world.log:
        said += again.apply(sequence, message)
    assert again.state.closed == 1
    assert again.finished


def test_the_recipe_knows_names_and_paths(installed: None, tmp_path: Path) -> None:
    text = '[run]\nname = "mine"\n[model]\npath = "warmstart:"\n[reward]\nvariant = "{}"\n'
    path = tmp_path / "mine.toml"
    for name in ("half", PATH, "blend"):
        path.write_text(text.format(name))
        assert recipes.load(path).config.reward.variant == name
    path.write_text(text.format("blent"))
    with pytest.raises(ConfigError, match=r"spade\.rewards"):
        recipes.load(path)


def test_evidence_is_what_the_documentation_says() -> None:
    given = Evidence(
        skill="s", rounds={0: [0.0, 1.0]}, hinted=1.0, regret=0.4, measured=0.5, pairs=2, turns=1.5
    )
    assert set(msgspec.structs.asdict(given)) == {
        *("skill", "rounds", "hinted", "regret", "broken", "measured", "pairs", "noise_floor", "turns")
    }
    assert half_won(given, RewardConfig()) == 1.0
