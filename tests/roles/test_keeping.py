"""Checkpoints that the learner keeps because of evaluations on the bus."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from scenes.memory_bus import MemoryBus
from scenes.small_run import config as make_config
from scenes.small_run import evaluation

from engine.config import EvaluatorConfig, LearnerConfig, SuiteConfig
from engine.lineage import Lineage
from engine.training.retention import Best, read_best
from roles.learner.checkpoint_manager import CheckpointManager

SUITES = EvaluatorConfig(every=10, suites=(SuiteConfig(name="mid", source="seeds:mid"),))


def name(step: int, fence: int = 0) -> str:
    return f"{fence:06d}-{step:010d}-{step:012d}"


class World:
    """A run's directory with (empty) checkpoints, its bus, and one life of a learner after another."""

    def __init__(self, directory: Path) -> None:
        self.bus = MemoryBus(run="toy", role="learner", instance="learner-0")
        self.run = directory
        self.checkpoints = directory / "learner" / "checkpoints"
        self.keeper = self.next_life()

    def next_life(self, *checkpoints: tuple[int, int]) -> CheckpointManager:
        for fence, step in checkpoints:
            (self.checkpoints / name(step, fence)).mkdir(parents=True)
        config = make_config(self.run, evaluator=SUITES, learner=LearnerConfig(best_by="mid"))
        self.keeper = CheckpointManager(config, self.bus, self.run)
        return self.keeper

    async def evaluated(self, step: int, fence: int, win: float) -> None:
        await self.bus.publish(msgspec.structs.replace(evaluation(step, fence), win=win))

    @property
    def spared(self) -> frozenset[str]:
        return self.keeper._retention.spared()

    @property
    def best(self) -> Best | None:
        return read_best(self.checkpoints)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_a_checkpoint_of_the_first_life_gets_its_score_in_the_second(world: World) -> None:
    world.next_life((0, 10), (0, 12))
    assert world.spared == {name(10)}, "its score was still to come when the learner died"
    await world.evaluated(10, 1, 0.4)
    await world.keeper.update_best(Lineage().fork(1, 12))
    assert world.best is not None
    assert (world.best.checkpoint, world.best.score) == (name(10), 0.4)
    assert world.spared == {name(10)}


async def test_what_was_evaluated_beyond_the_fork_is_of_no_checkpoint(world: World) -> None:
    """Step 20 had the highest win rate, and its weights are gone: the nearest checkpoint is another one."""
    world.next_life((0, 16))
    await world.evaluated(20, 0, 0.9)
    await world.keeper.update_best(Lineage())
    assert world.best is not None
    assert (world.best.checkpoint, world.best.score) == (name(16), 0.9)

    world.next_life((1, 20))
    forked = Lineage().fork(1, 16)
    await world.keeper.update_best(forked)
    assert world.best is None, "no score of surviving weights is known"
    await world.evaluated(20, 1, 0.3)
    await world.keeper.update_best(forked)
    assert world.best == Best(name(20, 1), 0.3, "mid", version=(1 << 32) + 20)

    world.next_life()
    await world.keeper.update_best(forked)
    assert world.best is not None, "what is known is told again, and nothing else comes of it"
    assert world.best.checkpoint == name(20, 1)
