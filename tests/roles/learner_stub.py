"""A learner without a model, for tests of what surrounds its steps: its weights are four numbers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import structlog
import torch

from bus import MemoryBus
from bus.messages import BatchTrained, Message, PolicyPublished
from bus.scopes import flat_task_group
from engine.config import Config, Learner, Model, Run
from engine.context import RoleContext
from engine.training import checkpoint
from engine.training.batch import Batch
from engine.training.capsule import Capsule
from engine.training.feed import Closed, Feed
from roles.learner.role import Learner as LearnerRole


class Killed(Exception):
    """Stands for the end of the process."""


class StubTrainer:
    """Each batch adds 1 and ``noise`` to its weights: backward passes on a device differ from run to run."""

    sharded = False

    def __init__(self, feed: Feed, noise: float) -> None:
        self.feed, self.noise = feed, noise
        self.weight = torch.zeros(4)

    def run(self) -> None:
        try:
            for _ in self.feed:
                self.weight = self.weight + 1 + self.noise
                self.feed.finish({"grad_norm": 1.0})
        except Closed:
            return

    def weights(self) -> dict[str, torch.Tensor]:
        return {"w": self.weight}

    def canary(self, tokens: tuple[int, ...]) -> Any:
        return np.zeros(len(tokens) - 1)

    def load(self, path: str, step: int) -> None:
        self.weight = checkpoint.tensors(Path(path)).model["w"].clone()

    def capture(self) -> Capsule:
        return Capsule({"w": self.weight}, {})


class StubLearner(LearnerRole):
    """The role as it is, with the stub in the trainer's place."""

    noise = 0.0

    def _build(self, model: Path, feed: Feed) -> Any:
        self._trainer: Any = StubTrainer(feed, self.noise)
        return self._trainer

    def _vocabulary(self) -> tuple[tuple[int, ...], int]:
        return (1, 2, 3), 64

    def _batch(self, *_: Any) -> Batch:
        return Batch((), rows=1, tokens=1, padded=1, trained=1)


@pytest.fixture
def without_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("engine.models.resolve", lambda *_: tmp_path)
    monkeypatch.setattr("engine.inference.identity.tokenizer_digest", lambda _: "digest")


class StubWorld:
    """One bus and one run directory, and learners that come and go on them."""

    def __init__(self, directory: Path, bus: Any = None, **learner: Any) -> None:
        self.directory, self.learner = directory, learner
        self.bus = bus or MemoryBus(run="test", role="scorer", instance="0")
        self.scenes = 0

    def config(self, **learner: Any) -> Config:
        settings = Learner(**{"step_seconds": 100.0, **self.learner, **learner})
        return Config(run=Run(name="test"), model=Model(path="none"), learner=settings)

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

    @asynccontextmanager
    async def running(self, role: LearnerRole) -> AsyncIterator[LearnerRole]:
        with anyio.fail_after(100):
            async with flat_task_group() as tasks:
                tasks.start_soon(role.run)
                yield role
                role.context.draining.set()

    async def interrupted(self, role: LearnerRole, until: Callable[[], Awaitable[Any]]) -> None:
        """Run ``role`` and end it without a drain once ``until`` returns."""
        with pytest.raises(Killed):  # noqa: PT012
            async with self.running(role):
                await until()
                raise Killed

    async def send(self, *messages: Message) -> None:
        await self.bus.publish_all(messages)

    async def events(self, kind: type[Any]) -> list[Any]:
        return [
            record.message async for record in self.bus.replay("EVENT") if isinstance(record.message, kind)
        ]

    async def until(self, done: Callable[[Any], bool], kind: type[Any] = BatchTrained) -> Any:
        async with self.bus.follow("EVENT") as records:
            async for record in records:
                if isinstance(record.message, kind) and done(record.message):
                    return record.message
        raise AssertionError

    async def newest(self) -> PolicyPublished:
        policy: PolicyPublished = (await self.events(PolicyPublished))[-1]
        return policy
