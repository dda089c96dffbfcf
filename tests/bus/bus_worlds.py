"""The same bus three times: over a nats-server, the same on a thread of its own, and in memory. Tests use
all through one face.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
from brokers import TOKEN as TOKEN
from brokers import plain_server as plain_server
from scenes.memory_bus import MemoryBus

from bus import Bus, NatsBus, connect, provision
from bus.blobstore import Store
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

    def store(self, tail: str) -> Store:
        """Return the store of a piece or a note."""
        head = tail.split(".", 1)[0]
        return next(store for store in self.aside.claims.stores.values() if store.head == head)

    async def write_blob(self, tail: str, value: bytes | None) -> None:
        """Replace a piece or a note by another one, or remove it."""
        store = self.store(tail)
        if value is None:
            await store.drop(tail)
        else:
            await store.note(tail, value)

    async def blobs(self, pattern: str = "") -> list[str]:
        """Return all tails in ``pattern``, or those of all pieces and notes."""
        if pattern:
            return await self.store(pattern).tails(pattern)
        stores = self.aside.claims.stores.values()
        return [tail for store in stores for tail in await store.tails(f"{store.head}.>")]


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
    url: str, *consumers: Consumer, own_thread: bool = False, store_gb: float = 0.25, **options: Any
) -> AsyncIterator[World]:
    """A run of its own on the session's server."""
    run = f"run-{secrets.token_hex(6)}"
    used = consumers or tuple(CONSUMERS.values())
    await provision(url, run=run, token=TOKEN, store_gb=store_gb, consumers=used)

    def peer(role: str, instance: str) -> AbstractAsyncContextManager[Bus]:
        joining = {"run": run, "role": role, "instance": instance, "token": TOKEN, **options}
        return connect(url, own_thread=own_thread, **joining)

    async with peer("tester", "one") as bus, _aside(bus, url, run) as aside:
        yield World(bus, peer, aside)
        for kind in STREAMS:
            await aside.connection.api(f"STREAM.DELETE.{aside.names.stream(kind)}")
        for bucket in BUCKETS:
            await aside.connection.api(f"STREAM.DELETE.{aside.names.bucket(bucket)}")


@asynccontextmanager
async def _aside(bus: Bus, url: str, run: str) -> AsyncIterator[NatsBus]:
    if isinstance(bus, NatsBus):
        yield bus
        return
    async with connect(url, run=run, role="tester", instance="aside", token=TOKEN) as aside:
        yield aside


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
