"""Learners that come and go on one bus and one run directory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from scenes.memory_bus import MemoryBus

from bus.concurrency import flat_task_group
from bus.messages import BatchTrained, Message, PolicyPublished
from roles.learner.role import LearnerRole


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

    async def newest(self) -> PolicyPublished:
        policy: PolicyPublished = (await self.events(PolicyPublished))[-1]
        return policy
