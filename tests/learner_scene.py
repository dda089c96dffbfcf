"""Learners that come and go on one bus and one run directory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from scenes.memory_bus import MemoryBus

from bus.concurrency import flat_task_group
from bus.messages import BatchTrained, Message, PolicyPublished
from engine.training.checkpoint import CheckpointTensors, places
from engine.weights import tensor_file
from roles.learner.role import LearnerRole


def written(path: Path, tensors: dict[str, Any]) -> Future[None]:
    """Write a file of tensors, as a trainer does behind its training."""
    tensor_file.write(path, tensors)
    future: Future[None] = Future()
    future.set_result(None)
    return future


def write_tensors(directory: Path, tensors: CheckpointTensors) -> Future[None]:
    """Write the tensors of a checkpoint; the optimiser's all lie in ``extra``."""
    import torch

    torch.save(tensors.extra, directory / "extra.pt")
    written(directory / "optimizer.safetensors", {})
    return written(directory / "model.safetensors", tensors.model)


class Killed(Exception):
    """Stands for the end of the process."""


class Scene:
    """One bus and one run directory. ``scenes`` counts the lives of its learners."""

    def __init__(self, directory: Path, bus: Any = None) -> None:
        self.directory = directory
        self.bus = bus or MemoryBus(run="test", role="scorer", instance="0")
        self.scenes = 0

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

    async def kept(self, step: int) -> None:
        """Wait for the checkpoint of ``step``, which is written beside the training."""
        home = self.directory / "learner" / "checkpoints"
        while not any(int(path.name.split("-")[1]) == step for path in places(home)):  # noqa: ASYNC110 (files have no event)
            await anyio.sleep(0.01)

    async def newest(self) -> PolicyPublished:
        policy: PolicyPublished = (await self.events(PolicyPublished))[-1]
        return policy
