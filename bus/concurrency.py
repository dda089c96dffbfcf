"""Task groups whose single failure arrives as itself, and a queue between callbacks and readers."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

T = TypeVar("T")
_TURN = 64


def only(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the exception a group holds if it is the only one, however deep, else the group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


@asynccontextmanager
async def flat_task_group() -> AsyncIterator[TaskGroup]:
    """Open a task group like ``anyio.create_task_group``, but raise a single exception without its group."""
    try:
        async with anyio.create_task_group() as group:
            yield group
    except BaseExceptionGroup as error:
        inner = only(error)
        if inner is error:
            raise
        raise inner from inner.__cause__


class ArrivalQueue(Generic[T]):
    """Items in order, then perhaps an end. A callback puts them, readers iterate; the writer keeps the bound.

    With ``limit`` the oldest items are dropped and counted instead. Cancelling a read loses nothing.
    """

    def __init__(self, *, limit: int = 0) -> None:
        self._items: deque[T] = deque(maxlen=limit or None)
        self._wake: anyio.Event | None = None
        self._end: BaseException | None = None
        self._taken = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> None:
        """Add an item; never waits."""
        if self._end is not None:
            return
        if self._items.maxlen is not None and len(self._items) == self._items.maxlen:
            self.dropped += 1
        self._items.append(item)
        self._wake_readers()

    def end(self, reason: BaseException | None = None) -> None:
        """End the iteration after the items there are: by ``reason``, or by StopAsyncIteration."""
        if self._end is None:
            self._end = reason or StopAsyncIteration()
            self._wake_readers()

    def _wake_readers(self) -> None:
        if self._wake is not None:
            self._wake.set()
            self._wake = None

    def __aiter__(self) -> ArrivalQueue[T]:
        return self

    async def __anext__(self) -> T:
        self._taken += 1
        if self._taken % _TURN == 0:
            await checkpoint()
        while not self._items:
            if self._end is not None:
                raise self._end
            if self._wake is None:
                self._wake = anyio.Event()
            await self._wake.wait()
        return self._items.popleft()
