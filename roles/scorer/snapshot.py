"""Storage of the curriculum's state between two starts: a file of the run, and the bus for other hosts."""

from __future__ import annotations

import zlib
from functools import partial
from pathlib import Path

import anyio
import msgspec

from bus import Bus, NotFound
from engine.files import replace

FLUSHED_KEY = "scorer.flushed"
SNAPSHOT_KEY = "scorer.snapshot"
_FILE = "scorer.snapshot"
_LARGEST_ON_BUS = 256 << 10


class ScorerSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """The curriculum's state after EVENT ``position``; all commands up to there were carried out.

    ``key`` is that of the fact at the position, "" where it is not known.
    """

    run: str
    position: int
    state: bytes
    key: str = ""


class Snapshots:
    """Saves and finds snapshots of one run."""

    def __init__(self, bus: Bus, directory: Path) -> None:
        self._bus = bus
        self._path = directory / _FILE

    async def save(self, snapshot: ScorerSnapshot) -> None:
        """Replace the file atomically; small snapshots go to the state bucket too."""
        data = zlib.compress(msgspec.msgpack.encode(snapshot), 1)
        await anyio.to_thread.run_sync(partial(replace, self._path, data, durable=True))
        if len(data) <= _LARGEST_ON_BUS:
            await self._bus.state_put(SNAPSHOT_KEY, data)

    async def find(self, last: int) -> list[ScorerSnapshot]:
        """Return the readable snapshots that do not know more than EVENT up to ``last``, newest first."""
        stored = await self._bus.state_get(SNAPSHOT_KEY)
        candidates = [await anyio.to_thread.run_sync(self._read), stored[1] if stored else None]
        found = [self._decode(data) for data in candidates if data]
        usable = [item for item in found if item and item.run == self._bus.run and item.position <= last]
        told = [item for item in usable if await self._tells_of(item)]
        return sorted(told, key=lambda item: item.position, reverse=True)

    async def _tells_of(self, snapshot: ScorerSnapshot) -> bool:
        """Return whether the fact at its position is still that one.

        A broker that lost power may have forgotten it, and have stored another there since.
        """
        if not snapshot.key:
            return True
        try:
            return (await self._bus.get("EVENT", snapshot.position)).key == snapshot.key
        except NotFound:  # old facts are dropped when the stream is full
            return True

    async def flushed(self) -> tuple[int, ...]:
        """Return the totals of rounds with plays after which earlier parts of the run were ended."""
        stored = await self._bus.state_get(FLUSHED_KEY)
        return msgspec.msgpack.decode(stored[1], type=tuple[int, ...]) if stored else ()

    async def mark_flushed(self, steps: tuple[int, ...]) -> None:
        """Record the totals of rounds with plays at the end of each part of the run."""
        await self._bus.state_put(FLUSHED_KEY, msgspec.msgpack.encode(steps))

    def _read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except FileNotFoundError:
            return None

    @staticmethod
    def _decode(data: bytes) -> ScorerSnapshot | None:
        try:
            return msgspec.msgpack.decode(zlib.decompress(data), type=ScorerSnapshot)
        except (zlib.error, msgspec.DecodeError):
            return None
