"""Facts recorded beside a score: outcomes of wanted plays, versions of the arms, leaks, the paid regret."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from scenes.scorer_world import World, config, design_all, finished, lost, play_all, start, step

from bus.messages import EpisodeRequest, Turn
from engine.lineage import Version
from roles.scorer.curriculum import Curriculum
from roles.scorer.scheduling import episode
from roles.scorer.state import Play, PlayStatus
from roles.scorer.window import hint_leaks
from roles.text_normalise import hint_names_action

ONE = {"environments": 1, "rounds_per_window": 1, "delay": 1, "plays_per_round": 4, "hinted_plays": 4}


def hinted_wins(request: EpisodeRequest) -> float:
    return float(request.arm == "hinted")


def one(steps: int = 1, **tables: Any) -> tuple[World, Curriculum, str]:
    tables = {"curriculum": ONE | tables.pop("curriculum", {}), **tables}
    world, machine = start(config(steps=steps, **tables))
    (ticket,) = design_all(world, machine, hint="the number is 7")
    return world, machine, ticket.design


def test_a_partial_group_closes_with_what_it_has_and_says_so() -> None:
    world, machine, name = one(curriculum={"reissues": 0})
    first, second = [r for r in world.requests.values() if r.arm == "plain"][:2]
    del world.requests[first.episode], world.requests[second.episode]
    world.tell(machine, lost(first, "infra"))
    world.tell(machine, lost(second, "quarantined"))
    play_all(world, machine, lambda r: float(r.index % 2))
    score, summary = world.scored[name], world.summaries[0]
    assert (score.asked, score.plays, score.hinted_plays, score.pairs) == (4, 2, 4, 2)
    assert (summary.lost, summary.partial) == (2, 1)
    assert summary.failures == {"infra": 1, "quarantined": 1}
    (group,) = world.groups.values()
    assert [play.members for play in group] == [2, 2]


def test_a_group_of_one_and_a_group_of_none_carry_no_gradient() -> None:
    for left in (0, 1):
        world, machine, name = one(curriculum={"reissues": 0, "hinted_plays": 0}, learner={"kl": 0.0})
        for request in list(world.requests.values())[left:]:
            del world.requests[request.episode]
            world.tell(machine, lost(request, "infra"))
        play_all(world, machine, lambda r: 1.0)
        closed = world.closed[0]
        assert (closed.plays, closed.groups, closed.zero_variance_groups) == (left, left, left)
        assert closed.agent_samples == 0
        assert world.scored[name].state == ("mastered" if left else "fresh")
        assert world.summaries[0].partial == 1
        assert world.closed[-1].designs == left, "never played, never trained"
        assert not world.designs


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_return_that_is_no_number_is_no_outcome(value: float) -> None:
    world, machine, name = one()
    request = next(r for r in world.requests.values() if r.arm == "plain")
    del world.requests[request.episode]
    world.tell(machine, finished(request, value))
    play_all(world, machine)
    assert (world.scored[name].plays, world.scored[name].asked) == (3, 4)
    assert world.summaries[0].failures == {"quarantined": 1}
    assert all(play.advantage == play.advantage for group in world.groups.values() for play in group)


def test_versions_of_both_arms_are_recorded_and_pairs_apart_counted() -> None:
    world, machine, name = one()
    steps = {("plain", 0): (3, 3), ("plain", 1): (3, 3), ("plain", 2): (4, 5), ("plain", 3): (6, 6)}
    for request in list(world.requests.values()):
        del world.requests[request.episode]
        oldest, newest = steps.get((request.arm, request.index), (5, 5))
        versions = Version(1, oldest).pack(), Version(1, newest).pack()
        world.tell(machine, finished(request, hinted_wins(request), versions=versions))
    score = world.scored[name]
    assert score.plain_versions == (Version(1, 3).pack(), Version(1, 6).pack())
    assert score.hinted_versions == (Version(1, 5).pack(), Version(1, 5).pack())
    assert (score.pairs, score.pairs_apart) == (4, 3)


def test_hints_are_played_in_as_many_rounds_as_asked_for() -> None:
    table = {"schedule": "epoch", "rounds_per_window": 3, "delay": 3, "hinted_rounds": 2, "hinted_plays": 2}
    world, machine, name = one(3, curriculum=table)
    while not machine.finished:
        step(world, machine, hinted_wins)
    rounds = {request.round for request in world.requested if request.arm == "hinted"}
    assert rounds == {0, 1}
    score = world.scored[name]
    assert (score.plays, score.hinted_plays, score.pairs, score.regret) == (12, 4, 4, 1.0)


@pytest.mark.parametrize(("estimate", "less"), [("mean", False), ("shrunk", True), ("lower", True)])
def test_the_estimate_is_what_is_paid(estimate: str, less: bool) -> None:
    table = {"regret_estimate": estimate, "variant": "regret"}
    world, machine, name = one(reward=table)
    play_all(world, machine, lambda r: float(r.index < 2 or r.arm == "hinted"))
    score = world.scored[name]
    assert score.regret == 0.5
    assert score.regret_paid is not None
    assert score.reward == max(0.0, score.regret_paid)
    assert (score.regret_paid < 0.5) == less
    assert score.noise_floor is not None
    assert score.regret_low is not None
    assert score.regret_low < 0.5 < score.regret_high
    assert score.regret_paid > score.regret_low, "its bound has one side, the interval two"


def test_shrinking_looks_at_the_whole_cohort() -> None:
    """Among designs whose hints help, an equal regret is believed more than among those whose do not."""

    def paid(others: float) -> float:
        recipe = config(steps=1, curriculum=ONE | {"environments": 6}, reward={"regret_estimate": "shrunk"})
        world, machine = start(recipe)
        name, *_ = (ticket.design for ticket in design_all(world, machine))

        def win(request: EpisodeRequest) -> float:
            if request.design == name:
                return float(request.index < 2 or request.arm == "hinted")
            return others if request.arm == "hinted" else 0.0

        play_all(world, machine, win)
        value = world.scored[name].regret_paid
        assert value is not None
        return value

    assert paid(0.0) < paid(1.0) < 0.5


@pytest.mark.parametrize(
    ("hint", "action", "observation", "expected"),
    [
        ("The number is 7.", "7", "Guess a number between 1 and 10.", True),
        ("The number is 7.", "3", "Guess a number between 1 and 10.", False),
        ("go LEFT, then up", "left", "Left or right?", False),
        ("say open sesame", "Open  Sesame!", "A door.", True),
        ("say open a sesame", "open sesame", "A door.", False),
        ("17 is odd", "7", "?", False),
        ("take -7", "-7", "?", True),
        ("say seven", "7", "?", True),
        ("say seven", "7", "Seven doors or eight?", False),
        ("s-e-v-e-n", "seven", "?", True),
        ("nothing", "", "?", False),
        (None, "7", "?", False),
    ],
)
def test_an_action_that_stands_in_the_hint_is_told(
    hint: str | None, action: str, observation: str, expected: bool
) -> None:
    turn = Turn(observation, "", action, 1.0)
    assert hint_names_action(hint, [turn]) == expected
    assert not hint_names_action(hint, [turn, turn]), "a play of two turns is more than an answer"
    assert not hint_names_action(hint, [])


@pytest.mark.parametrize(
    ("won_by_telling", "won", "lost_by_telling", "leak"),
    [(2, 0, 0, True), (1, 0, 0, False), (9, 1, 0, True), (9, 0, 1, True), (8, 2, 0, False), (8, 0, 2, False)],
)
def test_nearly_all_of_at_least_two_plays(
    won_by_telling: int, won: int, lost_by_telling: int, leak: bool
) -> None:
    plays = [Play(status=PlayStatus.DONE, returned=1.0, leaked=True)] * won_by_telling
    plays += [Play(status=PlayStatus.DONE, returned=1.0)] * won
    plays += [Play(status=PlayStatus.DONE)] * lost_by_telling
    plays += [Play(status=PlayStatus.LOST), Play()]
    assert hint_leaks(plays) == leak


def test_a_return_beyond_the_range_is_cut() -> None:
    world, machine, name = one(curriculum={"hinted_plays": 0})
    play_all(world, machine, lambda r: (-7.0, 9.0, 9.0, -0.5)[r.index])
    assert world.scored[name].win == pytest.approx((-1.0 + 1.0 + 1.0 - 0.5) / 4)


def test_a_play_that_was_never_asked_for_is_no_outcome() -> None:
    world, machine, _ = one()
    request = next(r for r in world.requests.values() if r.index == 3)
    for index in (-1, 4):
        name = episode(world.config, request.design, request.round, request.arm, index, 0)
        stray = msgspec.structs.replace(finished(request, 1.0), episode=name, index=index)
        world.tell(machine, stray)
    assert machine.state.late == 2
    assert request.episode in {work.episode for work in machine.outstanding()}


@pytest.mark.parametrize("mode", ["flag", "floor"])
@pytest.mark.parametrize(("leaked", "misses", "leak"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_a_hint_that_plays_the_game_is_flagged(mode: str, leaked: bool, misses: int, leak: bool) -> None:
    table = {"hint_leak": mode, "degenerate_reward": -0.1}
    world, machine, name = one(
        2, curriculum={"rounds_per_window": 2, "delay": 2, "schedule": "epoch"}, reward=table
    )
    for request in list(world.requests.values()):
        del world.requests[request.episode]
        value = float(request.arm == "hinted" and request.index >= misses)
        world.tell(machine, msgspec.structs.replace(finished(request, value), leaked=leaked and value > 0))
    (standing,) = world.summaries[0].standings
    assert standing.leak == leak
    while not machine.finished:
        step(world, machine, lambda r: 0.0)
    score = world.scored[name]
    assert score.leak == leak
    floored = leak and mode == "floor"
    assert (score.state == "degenerate") == floored
    assert (score.reward == -0.1) == floored
