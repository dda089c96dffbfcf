"""Arms, groups, failures, rewards: what plays and designs are worth in named situations."""

from __future__ import annotations

import msgspec
import pytest
from scenes.scorer_world import (
    Win,
    config,
    design_all,
    finished,
    lost,
    play_all,
    ready,
    rejected,
    start,
    step,
)

from bus.messages import EpisodeRequest

ONE = {"environments": 1, "rounds_per_window": 1, "delay": 1}


def test_the_accepted_attempt_was_not_refused() -> None:
    """A ticket that was delivered twice may have refused the attempt that is accepted in the end."""
    world, machine = start(config(steps=1, curriculum=ONE))
    ticket = world.tickets.popitem()[1]
    world.tell(machine, rejected(ticket, 0))
    world.tell(machine, ready(ticket, attempt=0))
    play_all(world, machine)
    assert [(held.attempt, held.valid) for _, held in world.designs.values()] == [(0, True)]


def test_the_arms_of_a_pair_differ_in_the_hint_only() -> None:
    world, machine = start(config(curriculum={"plays_per_round": 3, "hinted_plays": 5, "lead": 1}))
    design_all(world, machine)
    play_all(world, machine)
    arms: dict[tuple[str, int, int], dict[str, EpisodeRequest]] = {}
    for request in world.requested:
        arms.setdefault((request.design, request.round, request.index), {})[request.arm] = request
    seeds = {(key, r.seed) for key, pair in arms.items() for r in pair.values()}
    assert len(seeds) == len({seed for _, seed in seeds}) == len(arms), "one seed an index, all different"
    opening = {design: min(r for d, r, _ in arms if d == design) for design, _, _ in arms}
    for (design, round_, index), pair in arms.items():
        assert set(pair) <= {"plain", "hinted"}
        assert ("plain" in pair) == (index < 3)
        assert ("hinted" in pair) == (round_ == opening[design])
        if len(pair) == 2:
            plain, hinted = pair["plain"], pair["hinted"]
            assert hinted.hint
            assert plain.hint is None
            same = msgspec.structs.replace(hinted, hint=None, arm="plain", episode=plain.episode)
            assert same == plain


def test_without_a_hint_nothing_is_played_hinted() -> None:
    world, machine = start(config())
    design_all(world, machine, hint=None)
    assert {request.arm for request in world.requested} == {"plain"}


def test_infrastructure_faults_are_asked_again_then_leave_the_group() -> None:
    world, machine = start(config(steps=1, curriculum=ONE | {"plays_per_round": 3, "reissues": 2}))
    design_all(world, machine, hint=None)
    tried = set()
    for _ in range(3):
        request = next(r for r in world.requests.values() if r.index == 0)
        tried.add((request.episode, request.seed))
        del world.requests[request.episode]
        world.tell(machine, lost(request, "infra"))
        world.tell(machine, finished(request, 1.0))
    assert len(tried) == 3
    assert len({seed for _, seed in tried}) == 1
    assert {r.index for r in world.requests.values()} == {1, 2}
    play_all(world, machine)
    assert (world.closed[0].plays, world.closed[0].agent_samples) == (2, 2)
    assert world.summaries[0].failures == {"infra": 3}
    assert machine.state.late == 3


def test_a_quarantined_play_is_not_asked_again() -> None:
    world, machine = start(config(steps=1, curriculum=ONE))
    design_all(world, machine, hint=None)
    request = world.requests.pop(next(iter(world.requests)))
    world.tell(machine, lost(request, "quarantined"))
    assert len(world.requests) == 1
    play_all(world, machine)
    assert world.closed[0].plays == 1
    assert world.summaries[0].failures == {"quarantined": 1}


def test_failures_of_the_policy_keep_their_value() -> None:
    world, machine = start(config(steps=1, curriculum=ONE))
    design_all(world, machine, hint=None)
    first, second = world.requests.values()
    world.requests.clear()
    world.tell(machine, finished(first, 0.0, failure="policy", outcome="failed"))
    world.tell(machine, finished(second, 1.0))
    assert (world.closed[0].plays, world.closed[0].agent_samples) == (2, 2)
    assert world.summaries[0].failures == {"policy": 1}


def test_truncated_plays_can_be_masked() -> None:
    for mode, sent in (("zero", 2), ("mask", 1)):
        recipe = config(steps=1, curriculum=ONE, agent={"truncated": mode})
        world, machine = start(recipe)
        design_all(world, machine, hint=None)
        first, second = world.requests.values()
        world.tell(machine, finished(first, 0.0, outcome="truncated", masked=mode == "mask"))
        world.tell(machine, finished(second, 1.0))
        assert world.closed[0].agent_samples == sent
        (group,) = world.groups.values()
        assert [play.members for play in group] == [2] * sent, "it was compared with the one left out"
        assert world.closed[0].play_tokens == (5, 5), "the lengths of all that was sampled"


def test_hinted_plays_can_be_trained_as_groups_of_their_own() -> None:
    recipe = config(steps=1, curriculum=ONE, learner={"train_hinted": True, "hinted_weight": 0.5})
    world, machine = start(recipe)
    design_all(world, machine)
    play_all(world, machine)
    sizes = sorted(abs(play.advantage) for group in world.groups.values() for play in group)
    assert sizes == pytest.approx([0.5, 0.5, 1.0, 1.0])
    assert (world.closed[0].plays, world.closed[0].groups) == (4, 2)
    assert world.summaries[0].gradient_share == 1.0, "of the plain plays"


@pytest.mark.parametrize("scope", ["skill", "global"])
def test_arms_are_never_compared_with_each_other(scope: str) -> None:
    """Hinted plays always win, plain ones never: within an arm nothing differs."""
    recipe = config(
        steps=1,
        curriculum=ONE | {"environments": 2},
        learner={"train_hinted": True, "agent": {"scope": scope}},
    )
    world, machine = start(recipe)
    design_all(world, machine)
    play_all(world, machine, lambda request: float(request.arm == "hinted"))
    advantages = [play.advantage for group in world.groups.values() for play in group]
    assert advantages == [0.0] * 8
    assert world.closed[0].zero_variance_groups == 4


def test_scores_describe_the_window() -> None:
    recipe = config(
        steps=2, curriculum={"schedule": "epoch", "environments": 3, "plays_per_round": 4, "hinted_plays": 4}
    )
    world, machine = start(recipe)
    easy, hard, middle = (ticket.design for ticket in design_all(world, machine))
    wins: dict[str, Win] = {
        easy: lambda r: 1.0,
        hard: lambda r: 0.0,
        middle: lambda r: 1.0 if r.arm == "hinted" else float(r.index % 2),
    }
    play_all(world, machine, lambda r: wins[r.design](r))
    step(world, machine, lambda r: wins[r.design](r))
    assert {name: world.scored[name].state for name in wins} == {
        easy: "mastered",
        hard: "intractable",
        middle: "frontier",
    }
    score = world.scored[middle]
    assert (score.plays, score.hinted_plays, score.win, score.hinted, score.regret) == (8, 4, 0.5, 1.0, 0.5)
    assert (score.plateau, score.reward) == (1.0, pytest.approx(1.0))
    summary = world.summaries[0]
    assert summary.win_histogram == (1, 0, 0, 0, 0, 1, 0, 0, 0, 1)
    assert summary.in_band == pytest.approx(1 / 3)
    assert (summary.plain, summary.hinted) == (0.5, pytest.approx(2 / 3))
    assert (summary.environments, summary.difficulty, summary.reward) == (3, 2.0, None)
    assert world.summaries[1].reward == pytest.approx(1 / 3)


def test_a_program_that_ends_most_of_its_plays_is_degenerate() -> None:
    world, machine = start(config(steps=1, curriculum=ONE | {"environments": 2}))
    one, two = (ticket.design for ticket in design_all(world, machine))
    for request in world.requests.values():
        crash = request.design == one or request.index == 0
        world.tell(machine, finished(request, float(request.index), failure="env" if crash else None))
    assert world.scored[one].state == "degenerate"
    assert world.scored[one].reward == 0.0
    assert world.scored[two].state == "frontier"


@pytest.mark.parametrize(
    ("won", "state", "in_band"),
    [(0, "intractable", 0.0), (1, "frontier", 1.0), (2, "frontier", 1.0), (3, "mastered", 0.0)],
)
def test_the_edges_of_the_band_are_in_it_and_the_ends_of_the_ramps_are_out(
    won: int, state: str, in_band: float
) -> None:
    recipe = config(
        steps=1,
        curriculum=ONE | {"plays_per_round": 4},
        reward={"variant": "solve_rate", "low": 0.25, "high": 0.5, "ramp": 0.25},
    )
    world, machine = start(recipe)
    (ticket,) = design_all(world, machine)
    play_all(world, machine, lambda request: float(request.index < won))
    score = world.scored[ticket.design]
    assert (score.state, score.reward, score.plateau) == (state, in_band, in_band)
    assert world.summaries[0].in_band == in_band
