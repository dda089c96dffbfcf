"""Work of a round that goes on while the next one is trained."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import TaskGroup


class Tail:
    """One piece of work after the other, in ``tasks``: what it raises ends them, and those who wait."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._done = anyio.Event()
        self._done.set()

    async def wait(self) -> None:
        """Wait until nothing is under way."""
        await self._done.wait()

    def begin(self, work: Callable[[], Awaitable[object]]) -> None:
        """Do ``work`` after what was begun before."""
        before, self._done = self._done, anyio.Event()
        self._tasks.start_soon(self._do, before, work, self._done)

    async def _do(
        self, before: anyio.Event, work: Callable[[], Awaitable[object]], done: anyio.Event
    ) -> None:
        await before.wait()
        await work()
        done.set()
