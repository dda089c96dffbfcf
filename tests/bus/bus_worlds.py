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
from scenes.memory_bus import MemoryBus

from bus import Bus, NatsBus, connect, provision
from bus.subjects import BUCKETS, CONSUMERS, STREAMS, Consumer


@dataclass
class World:
    """One run. ``bus`` is a client of it, ``peer`` makes another one; ``aside`` is one to tamper with."""

    bus: Bus
    peer: Callable[[str, str], AbstractAsyncContextManager[Bus]]
    aside: NatsBus | MemoryBus

    async def inject(self, stream: str, tail: str, frame: bytes) -> int:
        """Store bytes that are no frame of ours."""
        if isinstance(self.aside, MemoryBus):
            return self.aside.inject(stream, tail, frame, secrets.token_hex(4))
        names = self.aside.names
        answer = await self.aside.publisher.send(
            names.stream(stream), names.subject(tail), frame, {}, message_id=secrets.token_hex(4)
        )
        return answer.seq

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
        found = await self.aside._state.get("lease", name)
        assert found is not None
        bucket = self.aside.names.bucket("lease")
        await self.aside.connection.api(f"STREAM.MSG.DELETE.{bucket}", {"seq": found[0], "no_erase": True})


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
    url: str, *consumers: Consumer, store_gb: float = 0.25, **options: Any
) -> AsyncIterator[World]:
    """A run of its own on the session's server."""
    run = f"run-{secrets.token_hex(6)}"
    used = consumers or tuple(CONSUMERS.values())
    await provision(url, run=run, token=TOKEN, store_gb=store_gb, consumers=used)

    def peer(role: str, instance: str) -> AbstractAsyncContextManager[Bus]:
        joining = {"run": run, "role": role, "instance": instance, "token": TOKEN, **options}
        return connect(url, **joining)

    async with peer("tester", "one") as bus:
        assert isinstance(bus, NatsBus)
        yield World(bus, peer, bus)
        for kind in STREAMS:
            await bus.connection.api(f"STREAM.DELETE.{bus.names.stream(kind)}")
        for bucket in BUCKETS:
            await bus.connection.api(f"STREAM.DELETE.{bus.names.bucket(bucket)}")


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
