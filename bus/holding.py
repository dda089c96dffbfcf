"""Which messages are still stored, asked with few questions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bus.blobstore import Store
from bus.errors import Denied
from bus.face import StreamInfo


class Holding:
    """What one client knows of the streams whose messages claim blobs.

    A message is asked for by itself only where the state of its stream leaves doubt: it has holes, and it has
    lost messages since the message was last seen. What is denied once is not asked again.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._states: dict[str, StreamInfo] = {}
        self._before: dict[str, StreamInfo] = {}
        self._seen: set[tuple[str, int]] = set()
        self._held: set[tuple[str, int]] = set()
        self._stateless: set[str] = set()
        self._denied: dict[str, Denied] = {}

    @asynccontextmanager
    async def round(self) -> AsyncIterator[Holding]:
        """Look at each stream anew, once."""
        self._before, self._held = self._states, self._seen
        self._states, self._seen = {}, set()
        yield self

    async def holds(self, stream: str, sequence: int) -> bool:
        """Whether a message is (still) stored. Raises Denied."""
        if stream in self._denied:
            raise self._denied[stream]
        state = await self._state(stream)
        held = None if state is None else self._told(stream, sequence, state)
        if held is None:
            try:
                held = await self._store.holds(stream, sequence)
            except Denied as error:
                self._denied[stream] = error
                raise
        if held:
            self._seen.add((stream, sequence))
        return held

    def _told(self, stream: str, sequence: int, state: StreamInfo) -> bool | None:
        """What the state of the stream tells of a message, None when it does not."""
        if sequence < state.first:
            return False
        if sequence > state.last:
            return None  # stored since, or lost by a broker that lost power
        if not _holes(state):
            return True
        before = self._before.get(stream)
        unchanged = before is not None and (before.first, _holes(before)) == (state.first, _holes(state))
        return True if unchanged and (stream, sequence) in self._held else None

    async def _state(self, stream: str) -> StreamInfo | None:
        """Return the state of a stream, None where we may only look at single messages of it."""
        if stream not in self._states and stream not in self._stateless:
            try:
                self._states[stream] = await self._store.state(stream)
            except Denied:
                self._stateless.add(stream)
        return self._states.get(stream)


def _holes(state: StreamInfo) -> int:
    return state.last - state.first + 1 - state.messages
