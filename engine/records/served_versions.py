"""Which servers serve, as of a position in the EVENT stream: a shortcut for those who start late.

Whoever follows the facts of servers would have to read all of them, one for each update of each server
since the run began. The recorder knows their outcome; every few thousand events it writes that into the
state bucket, and a reader goes on from there. Without such a note a reader starts from the beginning.
"""

from __future__ import annotations

import sqlite3

import msgspec

from bus import Bus
from bus.messages import ServerServing
from engine.records import history

KEY = "serving"
EVERY = 2000
"""Events between two notes."""


class Serving(msgspec.Struct, frozen=True):
    """The last fact of each server that was not lost, after EVENT ``position``."""

    position: int = 0
    facts: tuple[ServerServing, ...] = ()


def told(connection: sqlite3.Connection) -> Serving:
    """Return what a run's database says. Raises sqlite3.Error."""
    rows = connection.execute(
        "SELECT server, epoch, url, version, canary_error FROM servers WHERE lost IS NULL ORDER BY server"
    )
    facts = tuple(
        ServerServing(server=server, epoch=epoch, url=url, version=version, canary_error=error, seconds=0.0)
        for server, epoch, url, version, error in rows
    )
    return Serving(history.position(connection), facts)


async def write(bus: Bus, serving: Serving) -> None:
    """Put the note in the place of the last one. Raises BusError."""
    await bus.state_put(KEY, msgspec.msgpack.encode(serving))


async def read(bus: Bus) -> Serving:
    """Return the last note, an empty one when there is none that fits the stream. Raises BusError."""
    stored = await bus.state_get(KEY)
    if stored is None:
        return Serving()
    try:
        serving = msgspec.msgpack.decode(stored[1], type=Serving)
    except msgspec.DecodeError:
        return Serving()
    last = (await bus.stream_info("EVENT")).last
    return serving if serving.position <= last else Serving()
