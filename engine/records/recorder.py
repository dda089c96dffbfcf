"""The recorder: follows the EVENT stream into the run's database, exactly once by sequence.

A reader fills a bounded queue; a writer applies the queued events in one transaction in a worker thread. A
restart continues behind the position that the database holds.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from bus import Bus
from bus.messages import Heartbeat, RoundSummary
from engine import malloc
from engine.errors import SpadeError
from engine.records import diversity, history
from engine.records.history import Event
from engine.records.trackers import Trackers

QUEUE = 4096
BATCH = 512
GAUGE_SECONDS = 1.0

T = TypeVar("T")


class Recorder:
    """Records a run's events: run :meth:`run` in a task group and cancel it to stop.

    Each round that is summed up goes to the ``trackers``.

    Raises SpadeError when the database cannot be written.
    """

    def __init__(self, bus: Bus, path: Path, trackers: Trackers | None = None) -> None:
        self._bus = bus
        self._trackers = trackers
        self._path = path
        self._connection = _open(path)
        self._position = history.position(self._connection)
        self._changed = anyio.Event()
        self._heartbeats: dict[tuple[str, str], tuple[float, Heartbeat]] = {}
        self._queued = 0
        self._writing = anyio.Lock()

    @property
    def position(self) -> int:
        """Sequence of the last event that is stored in the database."""
        return self._position

    async def run(self) -> None:
        """Record until cancelled."""
        send, receive = anyio.create_memory_object_stream[Event](QUEUE)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read, send)
            tasks.start_soon(self._write, receive)
            tasks.start_soon(self._listen)
            tasks.start_soon(self._keep_gauges)

    async def changed(self) -> None:
        """Return when the next batch of events has been recorded."""
        await self._changed.wait()

    async def caught_up(self, deadline: float) -> bool:
        """Wait until all present events are recorded; return False if ``deadline`` seconds were too few.

        Nothing is lost then: the next recorder of this run continues at its position.
        """
        await self._put_gauges()
        last = (await self._bus.stream_info("EVENT")).last
        with anyio.move_on_after(deadline):
            while self._position < last:
                await self.changed()
        return self._position >= last

    async def note(self, name: str, value: object) -> None:
        """Store a fact about the run itself. Raises SpadeError when the database cannot be written."""
        await self._in_thread(history.put_note, name, value)

    def close(self) -> None:
        """Close the trackers and the database."""
        if self._trackers is not None:
            self._trackers.close(self._connection)
        self._connection.close()

    def statistics(self) -> dict[str, float]:
        """Return the position in the stream, and the number of events read but not yet written."""
        return {"position": float(self._position), "queued": float(self._queued)}

    async def _read(self, send: MemoryObjectSendStream[Event]) -> None:
        async with send, self._bus.follow("EVENT", start=self._position + 1) as records:
            async for record in records:
                self._queued += 1
                await send.send(Event(record.sequence, record.envelope.ts / 1e9, record.message))

    async def _write(self, receive: MemoryObjectReceiveStream[Event]) -> None:
        async with receive:
            async for first in receive:
                batch = [first]
                while len(batch) < BATCH:
                    try:
                        batch.append(receive.receive_nowait())
                    except (anyio.WouldBlock, anyio.EndOfStream):
                        break
                await self._apply(batch)

    async def _apply(self, batch: list[Event]) -> None:
        await self._in_thread(history.apply, batch)
        if any(isinstance(event.message, RoundSummary) for event in batch):
            await self._in_thread(diversity.record)
            if self._trackers is not None:
                await self._in_thread(self._trackers.record)
            await anyio.to_thread.run_sync(malloc.release)
        self._queued -= len(batch)
        self._position = batch[-1].sequence
        self._changed.set()
        self._changed = anyio.Event()

    async def _in_thread(self, work: Callable[..., T], *arguments: object) -> T:
        """Run one piece of work at a time on the database, in a worker thread."""
        try:
            async with self._writing:
                return await anyio.to_thread.run_sync(work, self._connection, *arguments)
        except sqlite3.Error as error:
            raise unwritable(self._path, error) from error

    async def _listen(self) -> None:
        async with self._bus.listen("hb.>") as messages:
            async for message in messages:
                if isinstance(message, Heartbeat):
                    self._heartbeats[message.role, message.instance] = (time.time(), message)

    async def _keep_gauges(self) -> None:
        while True:
            await anyio.sleep(GAUGE_SECONDS)
            await self._put_gauges()

    async def _put_gauges(self) -> None:
        beats, self._heartbeats = self._heartbeats, {}
        if beats:
            await self._in_thread(history.put_gauges, list(beats.values()))


def unwritable(path: Path, error: sqlite3.Error) -> SpadeError:
    """Explain a database that cannot be written."""
    full = "full" in str(error)
    return SpadeError(
        f"The run's database {path} cannot be written: {error}.",
        remedy="Free some space on that disk and run the same command again to resume."
        if full
        else "Check the disk and the permissions of the run directory, then run the same command again.",
    )


def _open(path: Path) -> sqlite3.Connection:
    try:
        return history.create(path)
    except sqlite3.Error as error:
        raise unwritable(path, error) from error
