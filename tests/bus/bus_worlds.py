"""The same bus twice: over a nats-server, and the in-memory bus of other tests. Tests use both alike."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from scenes.brokers import TOKEN as TOKEN
from scenes.brokers import plain_server as plain_server
from scenes.brokers import shorten_leases as shorten_leases
from scenes.memory_bus import MemoryBus

from bus import Bus, connect, provision
from bus.publisher import Outgoing
from bus.subjects import STREAMS


@dataclass
class World:
    """One run. ``bus`` is a client of it, ``peer`` makes another one; ``aside`` is one to tamper with."""

    bus: Bus
    peer: Callable[[str, str], AbstractAsyncContextManager[Bus]]
    aside: Bus | MemoryBus

    async def inject(self, stream: str, tail: str, frame: bytes) -> int:
        """Store bytes that are no frame of ours."""
        if isinstance(self.aside, MemoryBus):
            return self.aside.inject(stream, tail, frame, secrets.token_hex(4))
        return await store(self.aside, stream, tail, frame)

    async def limit_tasks(self, most: int) -> None:
        """Let the TASK stream hold no more than ``most`` messages."""
        if isinstance(self.aside, MemoryBus):
            self.aside._broker.logs["TASK"].most = most
            return
        name = self.aside.names.stream("TASK")
        config: dict[str, Any] = (await self.aside.connection.api(f"STREAM.INFO.{name}"))["config"]
        await self.aside.connection.api(f"STREAM.UPDATE.{name}", {**config, "max_msgs": most})

    async def break_lease(self, name: str) -> None:
        """Let a lease expire as if its holder had been away for too long."""
        if isinstance(self.aside, MemoryBus):
            del self.aside._broker.rights[name]
            return
        await self.aside.purge("LEASE", tail=f"lease.{name}")


async def store(bus: Bus, stream: str, tail: str, frame: bytes) -> int:
    """Store bytes as they are and return their sequence."""
    names = bus.names
    message = Outgoing(names.stream(stream), names.subject(tail), frame, secrets.token_hex(4))
    return await bus.publisher.send(message)


@asynccontextmanager
async def memory_world(**options: Any) -> AsyncIterator[World]:
    """A run in memory."""
    bus = MemoryBus(run="memory", role="tester", instance="one", **options)

    @asynccontextmanager
    async def peer(role: str, instance: str) -> AsyncIterator[Bus]:
        yield bus.peer(role, instance)

    yield World(bus, peer, bus)


@asynccontextmanager
async def nats_world(
    url: str, *, lease_seconds: float = 0.0, store_gb: float = 0.25, **options: Any
) -> AsyncIterator[World]:
    """A run of its own on the session's server; ``lease_seconds`` are those of work."""
    run = f"run-{secrets.token_hex(6)}"
    await provision(url, run=run, token=TOKEN, store_gb=store_gb)

    def peer(role: str, instance: str) -> AbstractAsyncContextManager[Bus]:
        joining = {"run": run, "role": role, "instance": instance, "token": TOKEN, **options}
        return connect(url, **joining)

    async with peer("tester", "one") as bus:
        if lease_seconds:
            await shorten_leases(bus, lease_seconds)
        yield World(bus, peer, bus)
        for kind in STREAMS:
            await bus.connection.api(f"STREAM.DELETE.{bus.names.stream(kind)}")


T = TypeVar("T")


async def take(source: AsyncIterator[T], count: int, seconds: float = 10.0) -> list[T]:
    """Return the next ``count`` items, or fail."""
    items: list[T] = []
    with anyio.fail_after(seconds):
        while len(items) < count:
            items.append(await anext(source))
    return items


async def nothing_comes(source: AsyncIterator[T], seconds: float = 0.15) -> bool:
    with anyio.move_on_after(seconds):
        await anext(source)
        return False
    return True
