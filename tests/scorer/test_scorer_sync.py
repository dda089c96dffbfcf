"""``mode = "sync"``: design, then play, then train, and nothing at once; the baseline of what async gains."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes.memory_bus import MemoryBus
from scenes.scorer_script import design_all, play_all, start, step
from scenes.scorer_world import Chances, World, config, ready
from test_scorer_role import check, complete, memory_peer

from bus.messages import BatchTrained, EpisodeFinished
from engine import recipe as recipes
from engine.config import Config
from engine.errors import ConfigError
from roles.scorer.curriculum import Curriculum

IN_STEP = {"mode": "sync", "lead": 0, "design_ahead": 0}


def recipe(steps: int = 4, **curriculum: Any) -> Config:
    return config(steps=steps, curriculum=IN_STEP | curriculum)


def test_nothing_is_played_before_all_is_designed() -> None:
    world, machine = start(recipe())
    *some, last = world.tickets.values()
    for ticket in some:
        world.tell(machine, ready(world.tickets.pop(ticket.design)))
    assert not world.requests
    world.tell(machine, ready(world.tickets.pop(last.design)))
    assert len({request.design for request in world.requests.values()}) == 4
    assert {request.round for request in world.requests.values()} == {0}


def test_nothing_is_designed_or_played_while_a_batch_trains() -> None:
    world, machine = start(recipe(schedule="epoch", rounds_per_window=1, delay=1))
    for round_ in range(4):
        design_all(world, machine)
        play_all(world, machine)
        assert len(world.closed) == round_ + 1 + (round_ == 3)
        assert not world.tickets
        assert not world.requests
        while world.trained < len(world.closed):
            world.train(machine)
            assert not world.tickets, "the new weights are not served yet"
            assert not world.requests
            world.serve(machine, "s0")
    assert machine.finished


def test_an_idle_window_is_played_on_without_new_tickets() -> None:
    """The second round of an epoch has no tickets: it is played as soon as the first is trained."""
    world, machine = start(recipe(schedule="epoch"))
    step(world, machine)
    assert not world.tickets
    assert {request.round for request in world.requests.values()} == {1}


async def test_a_whole_run_in_step_over_a_bus(tmp_path: Path) -> None:
    """It starts, ends and survives a scorer that dies, with rounds that nobody overlaps."""
    bus = MemoryBus(run="test", role="test", instance="0")
    cast = await complete(recipe(5, delay=0), bus, tmp_path, [20, 60], await memory_peer(bus))
    await check(cast, bus)
    trained, played = -1, set[int]()
    async for record in bus.replay("EVENT"):
        match record.message:
            case EpisodeFinished(round=round_):
                assert round_ == trained + 1
                played.add(round_)
            case BatchTrained(round=round_):
                trained = round_
    assert played == set(range(5))


def test_nano_can_be_run_in_step() -> None:
    path = Path(__file__).parents[2] / "configs/nano.toml"
    in_step = [f"curriculum.{name}={value}" for name, value in IN_STEP.items()]
    table = recipes.load(path, [*in_step, "curriculum.delay=0", "learner.designer.max_staleness=0"])
    assert (table.config.curriculum.mode, table.config.curriculum.held_rounds) == ("sync", 0)
    with pytest.raises(ConfigError, match="must be 0"):
        recipes.load(path, ["curriculum.mode=sync"])


CURRICULA = st.fixed_dictionaries(
    {
        "schedule": st.sampled_from(["rolling", "epoch"]),
        "environments": st.integers(1, 5),
        "rounds_per_window": st.integers(1, 3),
        "plays_per_round": st.integers(1, 2),
        "hinted_plays": st.integers(0, 2),
    }
)


@settings(max_examples=40)
@given(
    curriculum=CURRICULA,
    extra=st.integers(-1, 2),
    steps=st.integers(1, 5),
    seed=st.integers(0, 2**32),
    drain=st.booleans(),
)
def test_it_ends_and_never_overlaps(
    curriculum: dict[str, Any], extra: int, steps: int, seed: int, drain: bool
) -> None:
    """Failures, servers that come and go, learners that go back: work is open only when all is trained."""
    delay = 0 if extra < 0 else curriculum["rounds_per_window"] + extra
    table = recipe(steps, delay=delay, **curriculum)
    world = World(table, random.Random(seed), Chances(refork=0.0), servers=2)
    machine = Curriculum(table)
    world.begin(machine)
    told = 0
    while actions := world.actions():
        world.random.choice(actions)(machine)
        told += 1
        if drain and told == 10:
            machine.drain()
            world.run(machine)
            assert machine.settled
            machine = Curriculum.restore(table, machine.snapshot(), flushed=world.flushed)
            world.execute(machine.start())
        if world.tickets or world.requests:
            assert world.trained == len(world.closed), "work is out while a batch waits or trains"
        assert not (world.tickets and world.requests), "designs and plays do not overlap"
    assert machine.finished
    assert [closed.final for closed in world.closed] == [False] * steps + [True]
