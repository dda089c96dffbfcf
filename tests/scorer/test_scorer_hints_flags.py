"""Flags of designs, hints that leak, standings of open windows."""

from __future__ import annotations

import msgspec
import pytest
from scenes.scorer_world import World, config, design_all, finished, lost, play_all, ready, start

from bus.messages import Credit, EpisodeRequest, Finding
from roles.scorer.curriculum import Curriculum

ONE_ROUND = {"rounds_per_window": 1, "delay": 1}


def answer(world: World, machine: Curriculum, **fields: object) -> list[str]:
    """Answer all tickets; ``fields`` go to the first one's environment. Return the designs' names."""
    tickets = list(world.tickets.values())
    world.tickets.clear()
    for number, ticket in enumerate(tickets):
        world.tell(machine, msgspec.structs.replace(ready(ticket), **({} if number else fields)))
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
    """Neither the designer nor the agent; "flag" reports it and changes nothing."""
    world, machine = start(
        config(
            steps=1,
            curriculum=ONE_ROUND | {"environments": 2, "plays_per_round": 4, "hinted_plays": 4},
            designer={"skills": ["Logic"]},
            reward={"hint_leak": mode, "degenerate_reward": -0.1},
            learner={"train_hinted": True, "hinted_weight": 1.0, "agent": {"scope": "global"}},
        )
    )
    leaking, honest = answer(world, machine, hint="the number is 7")
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
