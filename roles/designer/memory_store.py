"""Feeds the designer's memory from the facts of the run, and stores snapshots of it on disk.

A snapshot holds the memory, the number of uses of each document, and the EVENT sequence of the last fact in
both; later facts are replayed, so a restart gives exactly the memory that a replay from the beginning gives.
A snapshot that is damaged or of another stream is not used: then the whole stream is replayed. A bounded
stream has evicted its oldest facts; those that no snapshot holds are missing from the memory, counted and
logged. Every accepted program is put into the archive, too.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec
import structlog

from bus import NotFound, Undecodable
from bus.messages import DesignRejected, EnvironmentReady, EnvironmentScored, Message, RoundSummary
from engine.errors import SpadeError
from engine.files import replace
from engine.records.archive import ProgramArchive
from roles.designer.memory import Memory, MemoryState

if TYPE_CHECKING:
    from structlog.stdlib import BoundLogger

    from bus import Bus

TAILS = ("event.designer.ready.*", "event.designer.rejected", "event.scorer.scored", "event.scorer.round")
FILE = "designer.memory"
SECONDS = 15.0
_PATIENCE = 20.0
"""The least time between two snapshots, as a multiple of the time that the last one took."""


class MemorySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The memory after EVENT ``position``, the place of the message with ``key``.

    ``used`` counts the uses of each document. All facts up to ``through`` are included, except for some among
    the ``missed`` messages.
    """

    run: str
    position: int
    key: str
    memory: MemoryState
    used: dict[str, int]
    through: int = 0
    missed: int = 0


class MemoryStore:
    """Feeds ``memory`` from the bus and keeps its snapshots in ``directory``.

    ``note_used`` is called for each document that was used before this start; ``seconds`` is the least time
    between two snapshots. Raises SpadeError when they cannot be written.
    """

    def __init__(
        self,
        bus: Bus,
        directory: Path,
        memory: Memory,
        note_used: Callable[[str], None],
        *,
        seconds: float = SECONDS,
        log: BoundLogger | None = None,
    ) -> None:
        self._bus, self._directory, self._memory = bus, directory, memory
        self._note_used, self._seconds = note_used, seconds
        self._archive = ProgramArchive(directory)
        self._used = Counter[str]()
        self._saved_at, self._saved, self._took = time.monotonic(), 0, 0.0
        self.position, self._key = 0, ""
        self.replayed = 0
        self._through = self._missed = 0
        self._log: BoundLogger = log or structlog.get_logger("spade.designer")

    async def read_back(self) -> None:
        """Rebuild memory and uses of documents from the snapshot and the facts since."""
        snapshot = await anyio.to_thread.run_sync(read, self._directory)
        if snapshot and await self._is_ours(snapshot):
            self._memory.thaw(snapshot.memory)
            self.position = self._saved = snapshot.position
            self._key = snapshot.key
            self._used.update(snapshot.used)
            self._through, self._missed = max(snapshot.position, snapshot.through), snapshot.missed
        stream = await self._bus.stream_info("EVENT")
        self._note_gap(stream.first)
        async for record in self._bus.replay("EVENT", start=self.position + 1, tails=TAILS):
            await self._learn(record.sequence, record.message)
            self.replayed += 1
        self._through = max(self._through, stream.last)
        for document in self._used:
            self._note_used(document)
        await self.save()

    async def follow(self) -> None:
        """Learn from every new fact until cancelled."""
        async with self._bus.follow("EVENT", start=self.position + 1, tails=TAILS) as facts:
            async for record in facts:
                await self._learn(record.sequence, record.message)
                wait = self._seconds and max(self._seconds, _PATIENCE * self._took)
                if time.monotonic() - self._saved_at >= wait:
                    await self.save()

    async def save(self) -> None:
        """Write a snapshot unless nothing has changed since the last one."""
        if self.position == self._saved:
            return
        snapshot = MemorySnapshot(
            run=self._bus.run,
            position=self.position,
            key=self._key,
            memory=self._memory.freeze(),
            used=dict(self._used),
            through=self._through,
            missed=self._missed,
        )
        started = time.monotonic()
        await self._on_disk(write, self._directory, snapshot)
        self._saved, self._saved_at = snapshot.position, time.monotonic()
        self._took = self._saved_at - started

    def statistics(self) -> dict[str, float]:
        """Return gauges of the memory: its records by state, and the messages that it could not read."""
        return {
            "memory_records": len(self._memory),
            "memory_missed": self._missed,
            **{f"memory_{state}": count for state, count in self._memory.states().items()},
        }

    async def _learn(self, sequence: int, fact: Message) -> None:
        match fact:
            case EnvironmentReady():
                await self._on_disk(self._archive.put, fact.source)
                self._memory.ready(fact)
                self._used[fact.document] += 1
            case DesignRejected():
                self._used[fact.document] += 1
            case EnvironmentScored():
                self._memory.scored(fact)
            case RoundSummary():
                self._memory.played(fact)
            case _:
                pass
        self.position, self._key = sequence, fact.key
        self._through = max(self._through, sequence)

    def _note_gap(self, first: int) -> None:
        """Count the messages between the last known fact and the first one that the stream still holds."""
        gap = max(0, first - self._through - 1)
        if gap:
            self._missed += gap
            self._log.warning(
                "memory.incomplete",
                missed=gap,
                known=self._through,
                first=first,
                why="the stream has evicted these messages; their environments are missing from the memory",
                remedy="raise bus.store_gb, and keep the snapshot designer.memory beside the run",
            )

    async def _on_disk(self, work: Callable[..., object], *arguments: object) -> None:
        try:
            await anyio.to_thread.run_sync(work, *arguments)
        except OSError as error:
            raise SpadeError(
                f"The designer's memory cannot be written below {self._directory}: {error}.",
                remedy="Make room on that disk and run the same command again: it goes on where it stopped.",
            ) from error

    async def _is_ours(self, snapshot: MemorySnapshot) -> bool:
        """Return whether the stream still holds the snapshot's last fact, as far as it reaches back."""
        stream = await self._bus.stream_info("EVENT")
        if snapshot.run != self._bus.run or snapshot.position > stream.last:
            return False
        if snapshot.position < max(1, stream.first):
            return True
        try:
            return (await self._bus.get("EVENT", snapshot.position)).key == snapshot.key
        except (NotFound, Undecodable):
            return False


def write(directory: Path, snapshot: MemorySnapshot) -> None:
    """Replace the snapshot in ``directory`` atomically. Raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    replace(directory / FILE, zlib.compress(msgspec.msgpack.encode(snapshot), 1), durable=True)


def read(directory: Path) -> MemorySnapshot | None:
    """Return the snapshot in ``directory``, None when there is none or it is damaged."""
    try:
        data = (directory / FILE).read_bytes()
        return msgspec.msgpack.decode(zlib.decompress(data), type=MemorySnapshot)
    except (FileNotFoundError, zlib.error, msgspec.DecodeError):
        return None
