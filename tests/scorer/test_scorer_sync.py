"""``mode = "sync"``: design, then play, then train, and nothing at once; the baseline of what async gains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scenes.memory_bus import MemoryBus
from scenes.scorer_world import config, design_all, play_all, ready, start, step
from test_scorer_role import check, complete, memory_peer

from bus.messages import BatchTrained, EpisodeFinished
from engine import recipe as recipes
from engine.config import Config
from engine.errors import ConfigError

IN_STEP = {"mode": "sync", "lead": 0, "design_ahead": 0}


def in_step(steps: int = 4, **curriculum: Any) -> Config:
    return config(steps=steps, curriculum=IN_STEP | curriculum)


def test_nothing_is_played_before_all_is_designed() -> None:
    world, machine = start(in_step())
    *some, last = world.tickets.values()
    for ticket in some:
        world.tell(machine, ready(world.tickets.pop(ticket.design)))
    assert not world.requests
    world.tell(machine, ready(world.tickets.pop(last.design)))
    assert len({request.design for request in world.requests.values()}) == 4
    assert {request.round for request in world.requests.values()} == {0}


def test_nothing_is_designed_or_played_while_a_batch_trains() -> None:
    world, machine = start(in_step(schedule="epoch", rounds_per_window=1, delay=1))
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
    world, machine = start(in_step(schedule="epoch"))
    step(world, machine)
    assert not world.tickets
    assert {request.round for request in world.requests.values()} == {1}


async def test_a_whole_run_in_step_over_a_bus(tmp_path: Path) -> None:
    """It starts, ends and survives a scorer that dies, with rounds that nobody overlaps."""
    bus = MemoryBus(run="test", role="test", instance="0")
    cast = await complete(in_step(5, delay=0), bus, tmp_path, [20, 60], await memory_peer(bus))
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
    switches = [f"curriculum.{name}={value}" for name, value in IN_STEP.items()]
    table = recipes.load(path, [*switches, "curriculum.delay=0", "learner.designer.max_staleness=0"])
    assert (table.config.curriculum.mode, table.config.curriculum.held_rounds) == ("sync", 0)
    with pytest.raises(ConfigError, match="must be 0"):
        recipes.load(path, ["curriculum.mode=sync"])
