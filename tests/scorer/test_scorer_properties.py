"""Whatever the order of events, the failures and the restarts: same commands, every round ends once."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scenes.scorer_draws import OWN, recipes
from scenes.scorer_world import Chances, World, name_of

from engine.lineage import Version
from roles.scorer import cohort_plan
from roles.scorer.curriculum import Curriculum

PROFILE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


RECIPES = recipes(tight=False)


def check_run(world: World, machine: Curriculum) -> None:
    """What must hold of every run that came to its end."""
    assert machine.finished
    assert machine.settled
    assert [closed.round for closed in world.closed] == list(range(world.config.run.steps + 1))
    assert [closed.final for closed in world.closed] == [False] * world.config.run.steps + [True]
    assert set(world.summaries) == set(range(world.config.run.steps))
    assert not machine.state.held
    assert not machine.state.cohorts
    assert not machine.state.designs
    designer, learner = world.config.designer, world.config.learner
    penalised = designer.kind == "policy" and designer.invalid == "penalise"
    valid = [held.design for _, held in world.designs.values() if held.valid and not held.part]
    assert len(valid) == len(set(valid)), "no design is trained twice"
    everything = learner.kl > 0 or learner.supervised_mix > 0
    if designer.kind != "policy":
        assert not world.designs
    elif world.config.reward.variant == OWN or world.config.reward.reference_parity:
        assert set(valid) <= world.scored.keys()
    else:
        expected = {s.design for s in world.scored.values() if s.plays or s.state == "degenerate"}
        differing = {name for name in expected if everything or world.scored[name].advantage}
        assert differing <= set(valid) <= expected, "every design with a reward is trained"
    for closed in world.closed:
        idle = closed.designs - closed.designer_samples
        assert idle == 0 if learner.kl else idle >= 0
    assert penalised or all(held.valid for _, held in world.designs.values())
    for closed in world.closed:
        assert closed.designer_samples == sum(at == closed.round for at, _ in world.designs.values())
    for at, held in world.designs.values():
        due = cohort_plan.rounds_of(world.config.curriculum, held.cohort).due
        assert at == min(due, world.config.run.steps), "delayed updates fire in their round"
    settled = [closed.settled for closed in world.closed]
    assert settled == sorted(settled)
    assert settled[-1] == machine.state.next_cohort


@PROFILE
@given(recipe=RECIPES, seed=st.integers(0, 2**32), servers=st.integers(1, 2))
def test_any_order_terminates(recipe: Any, seed: int, servers: int) -> None:
    world = World(recipe, random.Random(seed), servers=servers)
    machine = Curriculum(recipe)
    world.begin(machine)
    world.run(machine)
    check_run(world, machine)


@PROFILE
@given(recipe=RECIPES, seed=st.integers(0, 2**32), data=st.data())
def test_restart_from_any_snapshot_repeats(recipe: Any, seed: int, data: st.DataObject) -> None:
    world = World(recipe, random.Random(seed))
    machine = Curriculum(recipe)
    world.begin(machine)
    snapshots = {0: Curriculum(recipe).snapshot()}
    for _ in range(data.draw(st.integers(1, 4))):
        world.run(machine, limit=data.draw(st.integers(1, 40)))
        snapshots[machine.state.position] = machine.snapshot()
        world.run(machine, limit=data.draw(st.integers(1, 40)))
        position = data.draw(st.sampled_from(sorted(snapshots)))
        machine = Curriculum.restore(recipe, snapshots[position], flushed=world.flushed)
        world.execute(machine.start())
        for sequence, message in world.log[position:]:
            commands = machine.apply(sequence, message)
            assert commands == world.given[sequence]
            world.execute(commands)
    world.run(machine)
    check_run(world, machine)


@PROFILE
@given(recipe=RECIPES, seed=st.integers(0, 2**32), limit=st.integers(0, 60))
def test_drain_and_restart_changes_no_content(recipe: Any, seed: int, limit: int) -> None:
    world = World(recipe, random.Random(seed))
    machine = Curriculum(recipe)
    world.begin(machine)
    world.run(machine, limit=limit)
    machine.drain()
    world.run(machine)
    assert machine.settled
    assert not world.requests
    machine = Curriculum.restore(recipe, machine.snapshot(), flushed=world.flushed)
    world.execute(machine.start())
    world.run(machine)
    check_run(world, machine)
    replayed = Curriculum(recipe, flushed=world.flushed)
    again = replayed.start()
    for sequence, message in world.log:
        again += replayed.apply(sequence, message)
    assert {name_of(command): command for command in again} == world.said


@PROFILE
@given(recipe=RECIPES, seed=st.integers(0, 2**32))
def test_pacing_bounds_the_age_of_plays(recipe: Any, seed: int) -> None:
    """I6: a play of round r is asked for when round r - 1 - lead is trained and served."""
    world = World(recipe, random.Random(seed), Chances(refork=0, server_lost=0, duplicate=0), servers=2)
    machine = Curriculum(recipe)
    seen = 0

    def admissible() -> None:
        nonlocal seen
        for request in world.requested[seen:]:
            needed = request.round - 1 - recipe.curriculum.lead
            assert world.trained > needed
            assert all(version >= Version(1, needed + 1) for version in world.serving.values())
        seen = len(world.requested)

    world.begin(machine)
    while actions := world.actions():
        world.random.choice(actions)(machine)
        admissible()
    check_run(world, machine)


@PROFILE
@given(recipe=RECIPES, seed=st.integers(0, 2**32), more=st.integers(1, 3))
def test_a_finished_run_can_be_extended(recipe: Any, seed: int, more: int) -> None:
    world = World(recipe, random.Random(seed))
    machine = Curriculum(recipe)
    world.begin(machine)
    world.run(machine)
    longer = config_with_steps(recipe, recipe.run.steps + more)
    machine = Curriculum.restore(longer, machine.snapshot(), flushed=world.flushed)
    assert not machine.finished
    world.execute(machine.start())
    world.run(machine)
    assert machine.finished
    assert [c.round for c in world.closed if c.final] == [recipe.run.steps, recipe.run.steps + 1 + more]
    assert len(world.closed) == longer.run.steps + 2
    replayed = Curriculum(longer, flushed=world.flushed)
    again = replayed.start()
    for sequence, message in world.log:
        again += replayed.apply(sequence, message)
    assert {name_of(command): command for command in again} == world.said


def config_with_steps(recipe: Any, steps: int) -> Any:
    return msgspec.structs.replace(recipe, run=msgspec.structs.replace(recipe.run, steps=steps))
