"""The same bus twice: over a nats-server, and in memory. Tests use both through one face."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio

from bus import Bus, MemoryBus, NatsBus, connect, provision
from bus.binary import locate
from bus.subjects import BUCKETS, CONSUMERS, STREAMS, Consumer

TOKEN = "a token of the tests"


@contextmanager
def plain_server(directory: Path) -> Iterator[str]:
    """Run one nats-server for a whole test session, without our launcher."""
    config = directory / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:-1"\nports_file_dir: "{directory}"\nmax_payload: 8MB\n'
        f'jetstream {{ store_dir: "{directory}/store", max_file: 8589934592, sync_interval: "100ms" }}\n'
        f'authorization {{ token: "{TOKEN}" }}\n'
    )
    with (directory / "nats.log").open("wb") as log:
        process = subprocess.Popen([str(locate()), "-c", str(config)], stderr=log)
        try:
            yield _ports(directory / f"nats-server_{process.pid}.ports")
        finally:
            process.terminate()
            process.wait(10)


def _ports(path: Path) -> str:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads(path.read_text())["nats"][0])
        time.sleep(0.005)
    raise TimeoutError(f"no ports file {path}")


@dataclass
class World:
    """One run. ``bus`` is a client of it, ``peer`` makes another one."""

    bus: Bus
    peer: Callable[[str, str], AbstractAsyncContextManager[Bus]]

    async def inject(self, stream: str, tail: str, frame: bytes) -> int:
        """Store bytes that are no frame of ours."""
        if isinstance(self.bus, MemoryBus):
            return self.bus.inject(stream, tail, frame, secrets.token_hex(4))
        assert isinstance(self.bus, NatsBus)
        names = self.bus.names
        answer = await self.bus.publisher.send(
            names.stream(stream), names.subject(tail), frame, {}, message_id=secrets.token_hex(4)
        )
        return answer.seq

    async def limit_tasks(self, most: int) -> None:
        """Let the TASK stream hold no more than ``most`` messages."""
        if isinstance(self.bus, MemoryBus):
            self.bus._broker.logs["TASK"].most = most
            return
        assert isinstance(self.bus, NatsBus)
        name = self.bus.names.stream("TASK")
        config: dict[str, Any] = (await self.bus.connection.api(f"STREAM.INFO.{name}"))["config"]
        await self.bus.connection.api(f"STREAM.UPDATE.{name}", {**config, "max_msgs": most})

    async def break_lease(self, name: str) -> None:
        """Let a lease expire as if its holder had been away for too long."""
        if isinstance(self.bus, MemoryBus):
            del self.bus._broker.rights[name]
            return
        assert isinstance(self.bus, NatsBus)
        found = await self.bus._state.get("lease", name)
        assert found is not None
        bucket = self.bus.names.bucket("lease")
        await self.bus.connection.api(f"STREAM.MSG.DELETE.{bucket}", {"seq": found[0], "no_erase": True})


@asynccontextmanager
async def memory_world() -> AsyncIterator[World]:
    """A run in memory."""
    bus = MemoryBus(run="memory", role="tester", instance="one")

    @asynccontextmanager
    async def peer(role: str, instance: str) -> AsyncIterator[Bus]:
        yield bus.peer(role, instance)

    yield World(bus, peer)


@asynccontextmanager
async def nats_world(url: str, *consumers: Consumer) -> AsyncIterator[World]:
    """A run of its own on the session's server."""
    run = f"run-{secrets.token_hex(6)}"
    used = consumers or tuple(CONSUMERS.values())
    await provision(url, run=run, token=TOKEN, store_gb=0.25, consumers=used)

    def peer(role: str, instance: str) -> AbstractAsyncContextManager[Bus]:
        return connect(url, run=run, role=role, instance=instance, token=TOKEN)

    async with peer("tester", "one") as bus:
        yield World(bus, peer)
        assert isinstance(bus, NatsBus)
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
