"""Who is there: what each role instance says of itself, renewed every 5 s and gone after 15 s.

An entry is a key with a time to live; its age is measured by the broker's clock, and whoever is too old is
left out even where the broker has not removed the key yet. Nothing here watches a key: a watcher would hear
nothing when a key expires (reference nats section 4, rows 22 and 24).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import datetime
from typing import NamedTuple, Protocol

import anyio
import msgspec

from bus import codec
from bus.connection import Connection
from bus.errors import BusError, Undecodable
from bus.fetch import subjects_of, values
from bus.interface import Announcement, Bus, Present
from bus.messages import RoleBye, RoleHello, token
from bus.scopes import flat_task_group
from bus.state import State
from bus.subjects import Names

log = logging.getLogger("spade.bus")
BUCKET = "presence"
BEAT_SECONDS = 5.0
EXPIRY_SECONDS = 15.0
_LAST_SECONDS = 2.0
_AHEAD = 64


class Entry(NamedTuple):
    """What lies under one key: a frame, when it was written (epoch seconds) and how long ago."""

    frame: bytes
    seen: float
    age: float


class Presence(Protocol):
    """Where entries lie."""

    async def put(self, key: str, frame: bytes, *, ttl: float) -> None:
        """Write an entry that the broker forgets after ``ttl`` seconds."""

    async def entries(self) -> list[Entry]:
        """Return all entries."""


class NatsPresence:
    """Entries in the presence bucket of a run."""

    def __init__(self, connection: Connection, state: State, names: Names) -> None:
        self._connection, self._state, self._names = connection, state, names

    async def put(self, key: str, frame: bytes, *, ttl: float) -> None:
        await self._state.put(BUCKET, key, frame, ttl=ttl)

    async def entries(self) -> list[Entry]:
        stream = self._names.bucket(BUCKET)
        subjects = await subjects_of(self._connection, stream, self._names.keys(BUCKET) + ">")
        found: list[Entry] = []
        async with aclosing(values(self._connection, stream, subjects, window=_AHEAD)) as source:
            messages = [message async for message in source if message is not None]
        now = datetime.fromisoformat((await self._connection.api(f"STREAM.INFO.{stream}"))["ts"]).timestamp()
        for message in messages:
            seen = datetime.fromisoformat((message.headers or {})["Nats-Time-Stamp"]).timestamp()
            found.append(Entry(message.data, seen, max(0.0, now - seen)))
        return found


async def who_is_there(presence: Presence) -> list[Present]:
    """Return those who said something within ``EXPIRY_SECONDS`` and did not say good-bye."""
    found: list[Present] = []
    for entry in await presence.entries():
        try:
            hello = codec.decode(entry.frame)[1]
        except Undecodable as error:
            log.warning("an entry among those present is left out: %s", error)
            continue
        if isinstance(hello, RoleHello) and hello.state != "stopped" and entry.age <= EXPIRY_SECONDS:
            found.append(Present(hello, entry.seen, entry.age))
    return sorted(found, key=lambda present: (present.hello.role, present.hello.instance))


class Beating(Announcement):
    """Writes one entry again and again."""

    def __init__(self, bus: Bus, presence: Presence, hello: RoleHello) -> None:
        self._bus, self._presence, self._hello = bus, presence, hello
        self._key = f"{token(hello.role)}.{token(hello.instance)}"

    def update(self, hello: RoleHello) -> None:
        self._hello = hello

    async def write(self, hello: RoleHello, seconds: float, ttl: float) -> None:
        """Write the entry once if the broker is there."""
        frame = codec.encode(hello, run=self._bus.run, role=self._bus.role, instance=self._bus.instance)
        with anyio.move_on_after(seconds):
            try:
                await self._presence.put(self._key, frame, ttl=ttl)
            except BusError as error:
                log.warning("%s is not announced: %s", self._key, error)

    async def run(self) -> None:
        """Write for ever."""
        while True:
            await anyio.sleep(BEAT_SECONDS)
            await self.write(self._hello, BEAT_SECONDS, EXPIRY_SECONDS)

    async def leave(self) -> None:
        """Say good-bye within two seconds; the entry is overwritten, for deleting needs a right on all."""
        hello = msgspec.structs.replace(self._hello, state="stopped")
        with anyio.CancelScope(shield=True):
            await self.write(hello, _LAST_SECONDS, 1.0)
            with anyio.move_on_after(_LAST_SECONDS):
                bye = RoleBye(role=hello.role, instance=hello.instance, since=hello.since)
                await self._bus.publish(bye)


@asynccontextmanager
async def announced(bus: Bus, presence: Presence, hello: RoleHello) -> AsyncIterator[Announcement]:
    """Keep an entry while the context is open. See :meth:`bus.interface.Bus.announce`."""
    beating = Beating(bus, presence, hello)
    await beating.write(hello, BEAT_SECONDS, EXPIRY_SECONDS)
    await bus.publish(hello)
    try:
        async with flat_task_group() as group:
            group.start_soon(beating.run)
            try:
                yield beating
            finally:
                group.cancel_scope.cancel()
    finally:
        await beating.leave()
