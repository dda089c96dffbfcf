"""Samples without a gradient are counted and get no credit; KL and entropy give all samples a gradient."""

from __future__ import annotations

from typing import Any

import pytest
from scenes.scorer_world import World, config, design_all, failed, play_all, ready, rejected, start, step

from bus.messages import EpisodeRequest
from engine.config import Config

ONE_ROUND = {"rounds_per_window": 1, "delay": 1}
LOGIC = {"skills": ["Logic"]}
TERMS = [({"kl": 0.0}, False), ({"kl": 0.01}, True), ({"kl": 0.0, "entropy": 0.001}, True)]


def recipe(learner: dict[str, Any], **tables: Any) -> Config:
    tables["curriculum"] = {"lead": 0, "design_ahead": 0} | tables.get("curriculum", {})
    return config(steps=1, learner=learner, **tables)


@pytest.mark.parametrize(("terms", "sent"), TERMS)
def test_groups_of_plays_without_variance(terms: dict[str, Any], sent: bool) -> None:
    world, machine = start(recipe(terms))
    winners = {ticket.design for ticket in list(world.tickets.values())[:2]}
    design_all(world, machine)
    play_all(world, machine, lambda r: 1.0 if r.design in winners else float(r.index))
    closed = world.closed[0]
    assert (closed.plays, closed.groups, closed.zero_variance_groups) == (8, 4, 2)
    assert closed.agent_samples == (8 if sent else 4)
    advantages = sorted(play.advantage for group in world.groups.values() for play in group)
    assert advantages == pytest.approx([-1.0] * 2 + [0.0] * (closed.agent_samples - 4) + [1.0] * 2)
    assert world.summaries[0].gradient_share == 0.5


@pytest.mark.parametrize("terms", [terms for terms, _ in TERMS])
def test_a_group_without_an_outcome_has_no_samples(terms: dict[str, Any]) -> None:
    world, machine = start(recipe(terms, curriculum={"hinted_plays": 0}))
    for ticket in list(world.tickets.values()):
        world.tell(machine, failed(ticket, 1))
    assert not world.groups
    assert (world.closed[0].plays, world.closed[0].groups, world.closed[0].agent_samples) == (0, 0, 0)


def test_hinted_plays_of_no_weight_are_not_sent() -> None:
    learner = {"kl": 0.0, "train_hinted": True, "hinted_weight": 0.0}
    world, machine = start(recipe(learner, curriculum={"environments": 1}))
    design_all(world, machine)
    play_all(world, machine)
    (group,) = world.groups.values()
    assert [play.advantage for play in group] == pytest.approx([-1.0, 1.0])
    assert (world.closed[0].plays, world.closed[0].agent_samples) == (4, 2)


def by_level(levels: dict[str, int]) -> Any:
    """A design is won as often as its level says, 0 to 2 of 2 plays."""

    def returned(request: EpisodeRequest) -> float:
        return float(request.index < levels[request.design])

    return returned


def designed(learner: dict[str, Any], levels: tuple[int, ...], **designer: Any) -> World:
    """One round of designs in a row that are won so often; the batch is that of the end."""
    table = ONE_ROUND | {"environments": len(levels), "hinted_plays": 0}
    world, machine = start(recipe(learner, curriculum=table, designer=LOGIC | designer))
    names = [part.design for ticket in world.tickets.values() for part in ticket.parts()]
    design_all(world, machine)
    play_all(world, machine, by_level(dict(zip(names, levels, strict=True))))
    while not machine.finished:
        step(world, machine)
    return world


@pytest.mark.parametrize(("terms", "sent"), TERMS)
def test_designs_whose_rewards_do_not_differ(terms: dict[str, Any], sent: bool) -> None:
    world = designed(terms, (1, 1, 1))
    assert (world.closed[1].designs, world.closed[1].designer_samples) == (3, 3 if sent else 0)
    assert {held.advantage for _, held in world.designs.values()} == ({0.0} if sent else set())
    assert {score.reward for score in world.scored.values()} == {0.6}, "their rewards are told all the same"


@pytest.mark.parametrize(("terms", "sent"), TERMS)
def test_a_design_alone_in_its_skill(terms: dict[str, Any], sent: bool) -> None:
    world = designed(terms, (1, 0), skills=["Logic", "Optimization"])
    assert (world.closed[1].designs, world.closed[1].designer_samples) == (2, 2 if sent else 0)


@pytest.mark.parametrize(
    ("scope", "sent"), [("group", [0, 1]), ("skill", [0, 1, 2, 3]), ("global", [0, 1, 2, 3])]
)
def test_what_differs_is_sent_whole(scope: str, sent: list[int]) -> None:
    """The second ticket's designs are equal: idle among themselves, not among those of the skill."""
    table = {"scope": scope, "max_staleness": 64}
    world = designed({"kl": 0.0, "designer": table}, (1, 0, 2, 2), designs_per_ticket=2)
    order = list(world.scored)
    assert sorted(order.index(held.design) for _, held in world.designs.values()) == sent
    assert (world.closed[1].designs, world.closed[1].designer_samples) == (4, len(sent))


def test_a_middle_one_goes_with_those_it_was_compared_with() -> None:
    table = {"scope": "skill", "advantage_scale": 1.0, "max_staleness": 64}
    reward = {"variant": "solve_rate", "low": 1.0, "high": 1.0, "ramp": 1.0}
    curriculum = ONE_ROUND | {"environments": 3, "hinted_plays": 0}
    world, machine = start(
        recipe({"kl": 0.0, "designer": table}, curriculum=curriculum, designer=LOGIC, reward=reward)
    )
    names = list(world.tickets)
    design_all(world, machine)
    play_all(world, machine, by_level(dict(zip(names, (0, 1, 2), strict=True))))
    while not machine.finished:
        step(world, machine)
    assert sorted(held.advantage for _, held in world.designs.values()) == [-0.5, 0.0, 0.5]


@pytest.mark.parametrize(("source", "sent"), [("accepted", [True]), ("warmstart", [])])
def test_the_supervised_mix_gets_the_accepted_ones(source: str, sent: list[bool]) -> None:
    """A refused attempt alone in its skill has nothing to teach; an accepted one has its text."""
    learner = {"kl": 0.0, "supervised_mix": 0.5, "supervised_source": source}
    curriculum = ONE_ROUND | {"environments": 2, "plays_per_round": 2, "hinted_plays": 2}
    designer = {"skills": ["Logic", "Optimization"]}
    world, machine = start(recipe(learner, curriculum=curriculum, designer=designer))
    good, bad = world.tickets.values()
    world.tickets.clear()
    world.tell(machine, ready(good))
    world.tell(machine, rejected(bad, 0))
    world.tell(machine, failed(bad, 1))
    play_all(world, machine)
    assert [held.valid for _, held in world.designs.values()] == sent
    (closed,) = (closed for closed in world.closed if closed.designs)
    assert (closed.designs, closed.designer_samples) == (2, len(sent))
    assert machine.finished
    assert not machine.state.held
