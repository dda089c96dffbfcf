"""Which messages are still stored, asked with few questions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from bus.blobstore import Store
from bus.errors import Denied
from bus.interface import StreamInfo

_FEW = 8


class Holding:
    """What one client finds out about the streams whose messages claim blobs, in one look at all of them.

    The state of a stream tells of most messages. Where it has holes, a few are asked for by themselves; for
    more the stream is asked where its holes are. ``denied`` are the streams that we may not ask about: they
    are not asked again. ``named`` are the blobs that have a name.
    """

    def __init__(self, store: Store, denied: dict[str, Denied], named: Set[str] = frozenset()) -> None:
        self._store, self._denied, self.named = store, denied, named
        self._states: dict[str, StreamInfo] = {}
        self._holes: dict[str, Set[int]] = {}
        self._asked: Counter[str] = Counter()

    async def holds(self, stream: str, sequence: int) -> bool:
        """Whether a message is (still) stored. Raises Denied."""
        if stream in self._denied:
            raise self._denied[stream]
        state = await self._state(stream)
        if state is not None and sequence < state.first:
            return False
        # What lies behind the state was stored since, or lost by a broker that lost power.
        if state is not None and sequence <= state.last:
            if state.messages == state.last - state.first + 1:
                return True
            if self._asked[stream] >= _FEW:
                return sequence not in await self._holes_of(stream)
        self._asked[stream] += 1
        try:
            return await self._store.holds(stream, sequence)
        except Denied as error:
            self._denied[stream] = error
            raise

    async def _state(self, stream: str) -> StreamInfo | None:
        """Return the state of a stream, None where we may only look at single messages of it."""
        key = f"state of {stream}"
        if stream not in self._states and key not in self._denied:
            try:
                self._states[stream] = await self._store.state(stream)
            except Denied as error:
                self._denied[key] = error
        return self._states.get(stream)

    async def _holes_of(self, stream: str) -> Set[int]:
        if stream not in self._holes:
            self._holes[stream] = await self._store.holes(stream)
        return self._holes[stream]
