"""Presence of role instances: an entry per instance, renewed every 5 s and gone after 15 s.

An entry is a key with a time to live; its age is measured by the broker's clock, and an entry that is too
old is left out even where the broker has not removed the key yet. Keys are not watched: a watcher hears
nothing when a key expires.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime

import anyio
import msgspec

from bus import codec
from bus.concurrency import flat_task_group
from bus.connection import Connection
from bus.errors import BusError, BusUnavailable, Undecodable
from bus.interface import Announcement, Bus, Present
from bus.messages import RoleBye, RoleHello, token
from bus.reads import ask_batch
from bus.state import KeyValueStore
from bus.subjects import Names

log = logging.getLogger("spade.bus")
BUCKET = "presence"
BEAT_SECONDS = 5.0
EXPIRY_SECONDS = 15.0
_LAST_SECONDS = 2.0
_TRIES = 5
_MOST = 1000


async def present(connection: Connection, names: Names) -> list[Present]:
    """Return the instances that renewed their entry within ``EXPIRY_SECONDS`` and did not leave."""
    stream = names.bucket(BUCKET)
    request: dict[str, object] = {"multi_last": [names.keys(BUCKET) + ">"], "batch": _MOST}
    for _ in range(_TRIES):
        messages, pending = await ask_batch(connection, stream, request, "the presence bucket")
        if pending is not None:
            break
    else:
        raise BusUnavailable("answer of the presence bucket", 15.0)
    now = datetime.fromisoformat((await connection.api(f"STREAM.INFO.{stream}"))["ts"]).timestamp()
    found: list[Present] = []
    for message in messages:
        seen = datetime.fromisoformat((message.headers or {})["Nats-Time-Stamp"]).timestamp()
        try:
            hello = codec.decode(message.data)[1]
        except Undecodable as error:
            log.warning("an entry of the presence bucket is left out: %s", error)
            continue
        age = max(0.0, now - seen)
        if isinstance(hello, RoleHello) and hello.state != "stopped" and age <= EXPIRY_SECONDS:
            found.append(Present(hello, seen, age))
    return sorted(found, key=lambda one: (one.hello.role, one.hello.instance))


class _Renewal(Announcement):
    """Writes one entry again and again."""

    def __init__(self, bus: Bus, state: KeyValueStore, hello: RoleHello) -> None:
        self._bus, self._state, self.hello = bus, state, hello
        self._key = f"{token(hello.role)}.{token(hello.instance)}"

    def update(self, hello: RoleHello) -> None:
        self.hello = hello

    async def write(self, hello: RoleHello, seconds: float, ttl: float) -> None:
        """Write the entry once if the broker is there."""
        frame = codec.encode(hello, run=self._bus.run, role=self._bus.role, instance=self._bus.instance)
        with anyio.move_on_after(seconds):
            try:
                await self._state.put(BUCKET, self._key, frame, ttl=ttl)
            except BusError as error:
                log.warning("%s is not announced: %s", self._key, error)

    async def run(self) -> None:
        """Write without end."""
        while True:
            await anyio.sleep(BEAT_SECONDS)
            await self.write(self.hello, BEAT_SECONDS, EXPIRY_SECONDS)

    async def leave(self) -> None:
        """Say good-bye within two seconds; the entry is overwritten, for deleting needs a right on all."""
        hello = msgspec.structs.replace(self.hello, state="stopped")
        with anyio.CancelScope(shield=True):
            await self.write(hello, _LAST_SECONDS, 1.0)
            with anyio.move_on_after(_LAST_SECONDS):
                bye = RoleBye(role=hello.role, instance=hello.instance, since=hello.since)
                await self._bus.publish(bye)


@asynccontextmanager
async def announced(bus: Bus, state: KeyValueStore, hello: RoleHello) -> AsyncIterator[Announcement]:
    """Keep an entry while the context is open. See :meth:`bus.interface.Bus.announce`."""
    renewal = _Renewal(bus, state, hello)
    await renewal.write(hello, BEAT_SECONDS, EXPIRY_SECONDS)
    await bus.publish(hello)
    try:
        async with flat_task_group() as group:
            group.start_soon(renewal.run)
            try:
                yield renewal
            finally:
                group.cancel_scope.cancel()
    finally:
        await renewal.leave()
