"""A note of the serving versions, as of a position in the EVENT stream: a shortcut for late readers.

A role that follows server events would have to read one for each update of each server since the run began.
Every few thousand events the recorder stores their outcome in the state bucket, and a reader continues from
there. Without a note a reader starts from the beginning.
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


class ServedVersions(msgspec.Struct, frozen=True):
    """The last event of each server that is not lost, after EVENT ``position``."""

    position: int = 0
    facts: tuple[ServerServing, ...] = ()


def current(connection: sqlite3.Connection) -> ServedVersions:
    """Return the note from a run's database. Raises sqlite3.Error."""
    rows = connection.execute(
        "SELECT server, epoch, url, version, canary_error FROM servers WHERE lost IS NULL ORDER BY server"
    )
    facts = tuple(
        ServerServing(server=server, epoch=epoch, url=url, version=version, canary_error=error, seconds=0.0)
        for server, epoch, url, version, error in rows
    )
    return ServedVersions(history.position(connection), facts)


async def write(bus: Bus, serving: ServedVersions) -> None:
    """Replace the stored note. Raises BusError."""
    await bus.state_put(KEY, msgspec.msgpack.encode(serving))


async def read(bus: Bus) -> ServedVersions:
    """Return the stored note, an empty one when none fits the stream. Raises BusError."""
    stored = await bus.state_get(KEY)
    if stored is None:
        return ServedVersions()
    try:
        serving = msgspec.msgpack.decode(stored[1], type=ServedVersions)
    except msgspec.DecodeError:
        return ServedVersions()
    last = (await bus.stream_info("EVENT")).last
    return serving if serving.position <= last else ServedVersions()
