"""A learner without a model, for tests of what surrounds its steps: its weights are four numbers."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from learner_scene import Scene, write_tensors, written

from engine.config import Config, LearnerConfig, ModelConfig, RunConfig
from engine.context import RoleContext
from engine.training import checkpoint
from engine.training.batch import Batch
from engine.training.checkpoint import CheckpointTensors
from engine.training.command_queue import Closed, CommandQueue
from roles.learner.role import LearnerRole as LearnerRole


class StubTrainer:
    """Each batch adds 1 and ``noise`` to its weights: backward passes on a device differ from run to run."""

    sharded = False

    def __init__(self, feed: CommandQueue, noise: float) -> None:
        self.feed, self.noise = feed, noise
        self.weight = torch.zeros(4)

    def run(self) -> None:
        try:
            for _ in self.feed:
                self.weight = self.weight + 1 + self.noise
                self.feed.finish({"grad_norm": 1.0})
        except Closed:
            return

    def write_weights(self, path: Path, dtype: torch.dtype | None = None) -> Future[None]:
        return written(path, {"w": self.weight})

    def canary(self, tokens: tuple[int, ...]) -> Any:
        return np.zeros(len(tokens) - 1)

    def load(self, path: str, step: int) -> None:
        self.weight = checkpoint.read_tensors(Path(path)).model["w"].clone()

    def write_checkpoint(self, directory: Path) -> Future[None]:
        return write_tensors(directory, CheckpointTensors({"w": self.weight}, {"optimizer": {"state": {}}}))


class StubLearner(LearnerRole):
    """The role as it is, with the stub in the trainer's place."""

    noise = 0.0

    def _build(self, model: Path, feed: CommandQueue) -> Any:
        self._trainer: Any = StubTrainer(feed, self.noise)
        return self._trainer

    def _sizes(self) -> tuple[tuple[int, ...], int, None]:
        return (1, 2, 3), 64, None

    def _batch(self, *_: Any) -> Batch:
        return Batch((), rows=1, tokens=1, padded=1, trained=1)


@pytest.fixture
def without_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("engine.models.resolve", lambda *_: tmp_path)
    monkeypatch.setattr("engine.inference.tokens.tokenizer_digest", lambda _: "digest")


class StubWorld(Scene):
    """One bus and one run directory, and learners that come and go on them."""

    def __init__(self, directory: Path, bus: Any = None, **learner: Any) -> None:
        super().__init__(directory, bus)
        self.learner = learner

    def config(self, **learner: Any) -> Config:
        settings = LearnerConfig(**{"step_seconds": 100.0, **self.learner, **learner})
        return Config(run=RunConfig(name="test"), model=ModelConfig(path="none"), learner=settings)

    def role(self, *, noise: float = 0.0, bus: Any = None, **learner: Any) -> StubLearner:
        self.scenes += 1
        role = StubLearner(
            RoleContext(
                config=self.config(**learner),
                bus=bus or self.bus.peer("learner", str(self.scenes)),
                directory=self.directory,
                instance=str(self.scenes),
                log=structlog.get_logger(),
            )
        )
        role.noise = noise
        return role
