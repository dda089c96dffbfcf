"""Schedules, pacing, closing, restarts: what the curriculum does in named situations."""

from __future__ import annotations

from collections import Counter

import pytest
from scenes.scorer_world import (
    active,
    config,
    design_all,
    failed,
    finished,
    lost,
    play_all,
    published,
    ready,
    serving,
    start,
    step,
    trained,
)

from bus.messages import RunOrdered, ServerLost
from engine.lineage import Version
from roles.scorer import cohort_plan
from roles.scorer.curriculum import Curriculum
from roles.scorer.state import MarkFlushed, Publish


def test_epoch_renews_all_environments_together() -> None:
    world, machine = start(config(steps=4, curriculum={"schedule": "epoch"}))
    while not machine.finished:
        step(world, machine)
    assert active(world, 0) == active(world, 1)
    assert active(world, 2) == active(world, 3)
    assert not active(world, 0) & active(world, 2)
    assert [c.designer_samples for c in world.closed] == [0, 0, 4, 0, 4]


def test_rolling_renews_a_part_every_round() -> None:
    recipe = config(steps=6, curriculum={"environments": 6, "rounds_per_window": 3, "delay": 3})
    world, machine = start(recipe)
    while not machine.finished:
        step(world, machine)
    for round_ in range(6):
        assert len(active(world, round_)) == 6
    for round_ in range(5):
        assert len(active(world, round_) & active(world, round_ + 1)) == 4
    lives = Counter(name for round_ in range(6) for name in active(world, round_))
    assert sorted(Counter(lives.values()).items()) == [(1, 4), (2, 4), (3, 8)]
    assert [c.designer_samples for c in world.closed] == [0, 2, 2, 2, 2, 2, 6]


def test_a_longer_delay_postpones_the_designers_batch() -> None:
    recipe = config(steps=7, curriculum={"schedule": "epoch", "delay": 3})
    world, machine = start(recipe)
    while not machine.finished:
        step(world, machine)
    assert [c.designer_samples for c in world.closed] == [0, 0, 0, 4, 0, 4, 0, 8]
    assert [s.round for s in world.scored.values()] == [1] * 4 + [3] * 4 + [5] * 4 + [6] * 4


@pytest.mark.parametrize(
    ("schedule", "window", "designs"),
    [
        ("epoch", 1, [4, 4, 4, 4, 0]),
        ("epoch", 2, [0, 4, 0, 4, 0]),
        ("epoch", 3, [0, 0, 4, 0, 4]),
        ("rolling", 1, [4, 4, 4, 4, 0]),
        ("rolling", 2, [2, 2, 2, 2, 2]),
    ],
)
def test_without_a_delay_designs_are_trained_with_the_last_round_of_their_window(
    schedule: str, window: int, designs: list[int]
) -> None:
    """K = 0: the whole window is scored, and its designs are in the very batch that its last plays are in."""
    recipe = config(
        steps=4,
        curriculum={"schedule": schedule, "rounds_per_window": window, "delay": 0, "lead": 0},
        learner={"designer": {"max_staleness": window}},
    )
    world, machine = start(recipe)
    while not machine.finished:
        step(world, machine)
    assert [c.designer_samples for c in world.closed] == designs
    for at, held in world.designs.values():
        assert world.scored[held.design].round == min(at, 3)
    assert {s.plays for s in world.scored.values() if s.round < 3} <= {2 * n for n in range(1, window + 1)}


def test_the_last_batch_flushes_open_windows() -> None:
    recipe = config(steps=2, curriculum={"schedule": "epoch", "rounds_per_window": 4, "delay": 4})
    world, machine = start(recipe)
    while not machine.finished:
        step(world, machine)
    last = world.closed[-1]
    assert (last.round, last.final, last.plays, last.designs, last.designer_samples) == (2, True, 0, 4, 4)
    assert isinstance(world.said["flushed:1"], MarkFlushed)
    assert {s.plays for s in world.scored.values()} == {4}
    assert world.summaries[1].reward is not None, "the last round's summary has the rewards of the flush"


def test_lead_zero_waits_for_every_server() -> None:
    world, machine = start(config(curriculum={"lead": 0}), servers=2)
    design_all(world, machine)
    play_all(world, machine)
    assert [c.round for c in world.closed] == [0]
    world.tell(machine, published(Version(1, 1)))
    world.tell(machine, trained(0, Version(1, 1)))
    assert not world.requests
    world.tell(machine, serving("s0", Version(1, 1)))
    assert not world.requests
    world.tell(machine, serving("s1", Version(1, 1)))
    assert {request.round for request in world.requests.values()} == {1}


def test_a_lost_server_is_not_waited_for_and_none_means_wait() -> None:
    world, machine = start(config(curriculum={"lead": 0}), servers=2)
    design_all(world, machine)
    play_all(world, machine)
    world.tell(machine, trained(0, Version(1, 1)))
    world.tell(machine, serving("s0", Version(1, 1)))
    world.tell(machine, ServerLost(server="s1", epoch="older", reason="old news"))
    assert not world.requests
    world.tell(machine, ServerLost(server="s0", epoch="e0", reason="gone"))
    world.tell(machine, ServerLost(server="s1", epoch="e0", reason="gone"))
    assert not world.requests
    world.tell(machine, serving("s2", Version(1, 1)))
    assert {request.round for request in world.requests.values()} == {1}


@pytest.mark.parametrize("lead", [1, 2])
def test_lead_lets_rounds_be_played_before_training(lead: int) -> None:
    world, machine = start(config(curriculum={"lead": lead, "design_ahead": 0}))
    for _ in range(3):
        design_all(world, machine)
        play_all(world, machine)
    assert [c.round for c in world.closed] == list(range(lead + 1))


def test_cohorts_are_designed_ahead() -> None:
    world, _ = start(config(curriculum={"lead": 0, "design_ahead": 1}))
    assert {ticket.round for ticket in world.tickets.values()} == {0, 1}
    world, _ = start(config(curriculum={"lead": 0, "design_ahead": 0}))
    assert {ticket.round for ticket in world.tickets.values()} == {0}


def test_nothing_is_asked_before_a_server_answers() -> None:
    machine = Curriculum(config())
    assert machine.start() == []
    assert machine.apply(1, published(Version(1, 0))) == []
    assert machine.apply(2, serving("s0", Version(1, 0)))


def test_a_learner_that_went_back_abandons_its_branch() -> None:
    world, machine = start(config(curriculum={"lead": 0}))
    step_to = Version(1, 1)
    design_all(world, machine)
    play_all(world, machine)
    world.tell(machine, trained(0, step_to))
    world.tell(machine, published(Version(2, 0)))
    world.tell(machine, serving("s0", step_to))
    world.tell(machine, serving("s0", Version(2, 0)))
    assert not world.requests, "round 0 is not trained any more"
    world.tell(machine, serving("s0", step_to))
    assert not world.requests, "the weights of round 0 are gone"
    world.tell(machine, published(Version(2, 1)))
    world.tell(machine, trained(0, Version(2, 1)))
    assert not world.requests, "the server answers with abandoned weights"
    world.tell(machine, trained(1, Version(1, 2)))
    assert not machine.state.progress.is_trained(1), "late news of the abandoned branch"
    world.tell(machine, serving("s0", Version(2, 1)))
    assert {request.round for request in world.requests.values()} == {1}


def test_an_event_is_taken_in_once() -> None:
    world, machine = start(config())
    assert machine.apply(len(world.log), world.log[-1][1]) == []
    state = machine.snapshot()
    lost_server = ServerLost(server="s0", epoch="e0", reason="gone")
    assert machine.apply(len(world.log), lost_server) == []
    assert machine.snapshot() == state


def test_an_extended_run_starts_its_schedule_anew() -> None:
    curriculum = {"environments": 4, "rounds_per_window": 2, "delay": 2}
    world, machine = start(config(steps=3, curriculum=curriculum))
    while not machine.finished:
        step(world, machine)
    machine = Curriculum.restore(config(steps=6, curriculum=curriculum), machine.snapshot())
    world.execute(machine.start())
    while not machine.finished:
        step(world, machine)
    assert [c.final for c in world.closed] == [False] * 3 + [True] + [False] * 3 + [True]
    assert [len(active(world, round_)) for round_ in range(8)] == [4, 4, 4, 0, 4, 4, 4, 0]
    assert not active(world, 2) & active(world, 4)
    cohorts = {s.cohort for s in world.scored.values()}
    assert cohorts == set(range(len(cohorts)))


def test_a_finished_run_has_nothing_left_to_do() -> None:
    world, machine = start(config(steps=2))
    while not machine.finished:
        step(world, machine)
    for steps in (1, 2):
        again = Curriculum.restore(config(steps=steps), machine.snapshot(), flushed=world.flushed)
        assert again.finished
        assert again.settled
        assert again.start() == []


def test_a_closed_round_names_the_cohorts_that_are_settled() -> None:
    """Samples of those cohorts that have no credit by then never get one: the learner lets them go."""
    table = {"rounds_per_window": 2, "delay": 2, "lead": 0, "design_ahead": 0}
    for schedule, settled in (("epoch", [0, 0, 1, 1, 2]), ("rolling", [0, 1, 2, 3, 5])):
        world, machine = start(config(steps=4, curriculum=table | {"schedule": schedule}))
        while not machine.finished:
            step(world, machine)
        assert [closed.settled for closed in world.closed] == settled


def test_a_cohort_without_environments_does_not_block() -> None:
    world, machine = start(config(steps=3))
    while not machine.finished:
        for ticket in list(world.tickets.values()):
            del world.tickets[ticket.design]
            world.tell(machine, failed(ticket, 5))
        while world.trained < len(world.closed):
            world.train(machine)
            world.serve(machine, "s0")
    assert [c.plays for c in world.closed] == [0, 0, 0, 0]
    assert world.closed[-1].final


def test_a_drain_ends_rounds_in_flight_and_keeps_windows_open() -> None:
    world, machine = start(config(curriculum={"lead": 0}))
    machine.drain()
    design_all(world, machine)
    play_all(world, machine)
    assert machine.settled
    world.train(machine)
    world.serve(machine, "s0")
    assert not world.requests
    assert not world.closed[0].final
    assert not world.designs
    again = Curriculum.restore(world.config, machine.snapshot())
    world.execute(again.start())
    assert {request.round for request in world.requests.values()} == {1}


def test_outstanding_work_is_what_was_asked_for() -> None:
    world, machine = start(config(curriculum={"lead": 1}))
    tickets = list(world.tickets.values())
    world.tell(machine, ready(world.tickets.pop(tickets[0].design)))
    assert machine.outstanding() == machine.restore(world.config, machine.snapshot()).outstanding()
    expected = {m.key: m for m in [*world.tickets.values(), *world.requests.values()]}
    assert {m.key: m for m in machine.outstanding()} == expected
    first = next(iter(world.requests.values()))
    del world.requests[first.episode]
    world.tell(machine, lost(first, "infra"))
    expected = {m.key: m for m in [*world.tickets.values(), *world.requests.values()]}
    assert {m.key: m for m in machine.outstanding()} == expected


def test_lowering_the_steps_ends_the_run_where_it_stands() -> None:
    world, machine = start(config(steps=6, curriculum={"lead": 0}))
    for _ in range(3):
        step(world, machine)
    admitted = machine.state.admitted
    assert admitted > machine.state.closed, "a round is in flight"
    shorter = config(steps=2, curriculum={"lead": 0})
    machine = Curriculum.restore(shorter, machine.snapshot())
    world.config = shorter
    world.execute(machine.start())
    while not machine.finished:
        step(world, machine)
    assert world.closed[-1].final
    assert world.flushed == (len(world.closed) - 1,)
    assert [closed.final for closed in world.closed] == [False] * (admitted + 1) + [True]
    assert world.closed[admitted].plays > 0


def test_skills_rotate() -> None:
    names = ["m", "l", "s", "p", "o", "c"]
    recipe = config(designer={"skills": names, "skills_per_cohort": 3})
    assert cohort_plan.skills(recipe.designer, 0, 6) == ["m", "l", "s", "m", "l", "s"]
    assert cohort_plan.skills(recipe.designer, 1, 4) == ["p", "o", "c", "p"]
    assert cohort_plan.skills(recipe.designer, 2, 3) == ["m", "l", "s"]
    everything = config(designer={"skills": names})
    small = [skill for cohort in range(3) for skill in cohort_plan.skills(everything.designer, cohort, 2)]
    assert sorted(small) == sorted(names), "cohorts smaller than the list starve no skill"


def test_a_round_is_closed_after_all_its_samples() -> None:
    world, machine = start(config(curriculum={"lead": 2}))
    design_all(world, machine)
    late = [r for r in world.requests.values() if r.round == 0][-1]
    del world.requests[late.episode]
    play_all(world, machine)
    assert not world.closed, "round 1 may end first, but closes second"
    world.tell(machine, finished(late, 1.0))
    order = [c.message.key for c in world.said.values() if isinstance(c, Publish)]
    assert [key for key in order if key.startswith("round:")] == ["round:0", "round:1", "round:2"]


def test_a_pause_changes_when_work_is_asked_for_and_not_what() -> None:
    recipe = config(steps=12)
    through, machine = start(recipe)
    while not machine.finished:
        step(through, machine)
    world, machine = start(recipe)
    step(world, machine)
    world.tell(machine, RunOrdered(command="pause", at=1, roles=("scorer",)))
    for _ in range(6):
        step(world, machine)
    assert machine.settled
    assert machine.statistics()["paused"] == 1
    begun = machine.state.admitted
    machine = Curriculum.restore(recipe, machine.snapshot())  # a scorer that starts again
    assert machine.start() == []
    step(world, machine)
    assert machine.state.admitted == begun < 11
    world.tell(machine, RunOrdered(command="resume", at=2, roles=("scorer",)))
    while not machine.finished:
        step(world, machine)
    assert world.said == through.said
