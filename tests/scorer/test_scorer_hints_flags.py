"""Flags of designs, credit of hints, standings of open windows."""

from __future__ import annotations

import msgspec
import pytest
from scenes.scorer_world import World, config, design_all, finished, lost, play_all, ready, start

from bus.messages import Credit, EpisodeRequest, Finding
from engine.config import Config
from roles.scorer.curriculum import Curriculum

ONE_ROUND = {"rounds_per_window": 1, "delay": 1}


def answer(world: World, machine: Curriculum, **fields: object) -> list[str]:
    """Answer all tickets; ``fields`` go to the first one's environment. Return the designs' names."""
    tickets = list(world.tickets.values())
    world.tickets.clear()
    for number, ticket in enumerate(tickets):
        held = number == 0 and bool(fields.get("hint_held"))
        rest = {name: value for name, value in fields.items() if name != "hint_held" and number == 0}
        world.tell(machine, msgspec.structs.replace(ready(ticket, hint_held=held), **rest))
    return [ticket.design for ticket in tickets]


def by_arm(request: EpisodeRequest) -> float:
    """Every second plain play is won, and every hinted one."""
    return float(request.index % 2 == 0 or request.arm == "hinted")


@pytest.mark.parametrize(
    ("parity", "reward", "state"), [(False, -0.1, "degenerate"), (True, None, "frontier")]
)
def test_a_flagged_design_earns_the_floor(parity: bool, reward: float | None, state: str) -> None:
    rewards = {"degenerate_reward": -0.1, "reference_parity": parity}
    world, machine = start(config(steps=1, curriculum=ONE_ROUND, reward=rewards))
    flagged, *others = answer(world, machine, finding=Finding(flag="off_ticket", flag_reason="another skill"))
    play_all(world, machine, by_arm)
    score = world.scored[flagged]
    assert score.state == state
    assert score.reward == (reward if reward is not None else world.scored[others[0]].reward)
    assert {world.scored[name].state for name in others} == {"frontier"}


def recipe() -> Config:
    return config(
        steps=1,
        curriculum=ONE_ROUND | {"environments": 4, "plays_per_round": 4, "hinted_plays": 4},
        designer={"skills": ["Logic"], "hint_train": True},
        reward={"regret_scale": 1.0},
        learner={
            "designer": {"max_staleness": 64, "normalise": "centre", "scope": "skill", "advantage_scale": 2.0}
        },
    )


def test_a_hint_earns_the_regret_among_hints() -> None:
    world, machine = start(recipe())
    tickets = list(world.tickets.values())
    world.tickets.clear()
    for number, ticket in enumerate(tickets):
        world.tell(machine, ready(ticket, hint_held=number < 3, degenerate=number == 2))
    helped, useless, broken, silent = (ticket.design for ticket in tickets)
    play_all(world, machine, lambda r: by_arm(r) if r.design in (helped, broken) else float(r.index % 2 == 0))
    hints = {held.design: held for _, held in world.designs.values() if held.part == "hint"}
    assert {name: held.reward for name, held in hints.items()} == {helped: 0.5, useless: 0.0, broken: 0.0}
    assert silent not in hints
    assert sum(held.advantage for held in hints.values()) == pytest.approx(0.0)
    assert hints[helped].advantage == pytest.approx(2.0 * (0.5 - 0.5 / 3))
    programs = {held.design: held for _, held in world.designs.values() if held.part == ""}
    assert set(programs) == {helped, useless, broken, silent}
    (closed, *_) = (closed for closed in world.closed if closed.designer_samples)
    assert closed.designer_samples == closed.designs == 7
    assert len(world.designs) == 7


def test_open_windows_have_standings() -> None:
    world, machine = start(
        config(steps=3, curriculum={"rounds_per_window": 2, "lead": 0, "schedule": "epoch"})
    )
    names = answer(world, machine)
    play_all(world, machine, by_arm)
    opened = {standing.design: standing for standing in world.summaries[0].standings}
    assert set(opened) == set(names)
    assert all(
        (s.state, s.plays, s.win, s.hinted_plays, s.hinted, s.regret, s.turns)
        == ("frontier", 2, 0.5, 2, 1.0, 0.5, 1.0)
        for s in opened.values()
    )
    assert all(s.win_low < s.win < s.win_high for s in opened.values())


@pytest.mark.parametrize("mode", ["flag", "floor"])
def test_a_hint_that_plays_the_game_teaches_nobody_under_floor(mode: str) -> None:
    """Neither the designer, nor its hint, nor the agent; "flag" reports it and changes nothing."""
    world, machine = start(
        config(
            steps=1,
            curriculum=ONE_ROUND | {"environments": 2, "plays_per_round": 4, "hinted_plays": 4},
            designer={"skills": ["Logic"], "hint_train": True},
            reward={"hint_leak": mode, "degenerate_reward": -0.1},
            learner={"train_hinted": True, "hinted_weight": 1.0, "agent": {"scope": "global"}},
        )
    )
    leaking, honest = answer(world, machine, hint="the number is 7", hint_held=True)
    for request in world.requests.values():
        secret = request.design == leaking and request.arm == "hinted"
        won = float(secret or request.index % 2 == 0)
        world.tell(machine, msgspec.structs.replace(finished(request, won), leaked=secret))
    assert world.scored[leaking].leak
    assert world.scored[leaking].regret == 0.5
    closed = world.closed[0]
    assert len(hinted_plays(world, honest)) == 4
    if mode == "floor":
        assert world.scored[leaking].reward == -0.1
        assert {held.reward for _, held in world.designs.values() if held.design == leaking} == {-0.1}
        assert hinted_plays(world, leaking) == []
        assert (closed.plays, closed.agent_samples) == (12, 12)
        assert sum(play.advantage for play in hinted_plays(world, honest)) == 0.0, (
            "they are compared without it"
        )
    else:
        assert world.scored[leaking].reward == 1.0
        assert {held.reward for _, held in world.designs.values() if held.design == leaking} == {1.0}
        assert [play.advantage > 0 for play in hinted_plays(world, leaking)] == [True] * 4
        assert (closed.plays, closed.agent_samples) == (16, 16)


def hinted_plays(world: World, design: str) -> list[Credit]:
    """The credit of the hinted plays of ``design``."""
    return [
        play
        for group in world.groups.values()
        for play in group
        if (world.plays[play.sample].design, world.plays[play.sample].arm) == (design, "hinted")
    ]


# --- What is told of designs: what was not played is in no mean, hints are compared where programs are


def test_lost_plays_and_fresh_designs_are_in_no_mean() -> None:
    recipe = config(
        steps=1,
        curriculum=ONE_ROUND | {"environments": 2, "hinted_plays": 0, "reissues": 0},
        reward={"low": 0.0, "high": 1.0},
    )
    world, machine = start(recipe)
    played, fresh = (ticket.design for ticket in design_all(world, machine))
    for request in list(world.requests.values()):
        if request.design == fresh or request.index == 0:
            del world.requests[request.episode]
            world.tell(machine, lost(request, "infra"))
    play_all(world, machine)
    one, other = world.scored[played], world.scored[fresh]
    assert (one.plays, one.turns, one.plateau, one.reward) == (1, 1.0, 1.0, pytest.approx(0.6))
    assert (other.state, other.plays, other.turns, other.plateau) == ("fresh", 0, None, 0.0)
    assert world.summaries[0].reward == pytest.approx(0.6)


@pytest.mark.parametrize(("scope", "apart"), [("global", False), ("skill", True), ("group", True)])
def test_hints_are_compared_within_their_skill_or_the_cohort(scope: str, apart: bool) -> None:
    recipe = config(
        steps=1,
        curriculum=ONE_ROUND | {"environments": 2},
        designer={"hint_train": True},
        learner={"designer": {"scope": scope, "advantage_scale": 1.0, "max_staleness": 64}},
    )
    world, machine = start(recipe)
    helped, *_ = (ticket.design for ticket in design_all(world, machine, hint_held=True))
    play_all(world, machine, lambda r: float(r.index or (r.arm == "hinted" and r.design == helped)))
    hints = {held.design: held for _, held in world.designs.values() if held.part}
    assert {held.members for held in hints.values()} == {1 if apart else 2}
    assert hints[helped].advantage == (0.0 if apart else 0.5)
