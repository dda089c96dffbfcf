"""A queue between a callback that must not wait and readers that do."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

import anyio
from anyio.lowlevel import checkpoint

T = TypeVar("T")
_TURN = 64


class Mailbox(Generic[T]):
    """Items in order, then perhaps an end. The writer keeps the bound (it asks only for what fits); with
    ``limit`` the oldest items are dropped and counted instead.
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
        self._call()

    def put_back(self, item: T) -> None:
        """Let an item that was taken be the next one again."""
        self._items.appendleft(item)
        self._call()

    def end(self, reason: BaseException | None = None) -> None:
        """Let the reader end after the items there are: by ``reason``, or by StopAsyncIteration."""
        if self._end is None:
            self._end = reason or StopAsyncIteration()
            self._call()

    def _call(self) -> None:
        if self._wake is not None:
            self._wake.set()
            self._wake = None

    def take(self) -> T | None:
        """Remove and return the next item if the reader need not wait; None when it must, or when it has had
        so many that others should have their turn.
        """
        if not self._items or (self._taken + 1) % _TURN == 0:
            return None
        self._taken += 1
        return self._items.popleft()

    def take_all(self) -> list[T]:
        """Remove and return what has not been read."""
        items = list(self._items)
        self._items.clear()
        return items

    def __aiter__(self) -> Mailbox[T]:
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
