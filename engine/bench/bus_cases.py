"""What the bus benchmark compares: transports, what they promise, and how a case of each is set up."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import Process

from bus import ServerHandle, connect, provision
from bus.subjects import BUCKETS, STREAMS
from engine.bench.bus_peers import installed
from engine.errors import SpadeError

SMALL, LARGE = 1024, 36 * 1024
HUGE = {"acked_1m_mb_per_s": 1 << 20, "acked_2m_mb_per_s": 2 << 20}
AGE_RATE = 500.0
STORE_GB = 8.0
_START_SECONDS = 10.0

Where = dict[str, Any]
Setup = Callable[[], AbstractAsyncContextManager[Where]]


@dataclass(frozen=True)
class Transport:
    """One way from the producer to the consumer. ``needs`` are Python modules, ``program`` an executable;
    ``accepts`` is whether its producer learns that a message is stored, ``huge`` whether messages of 1 and
    2 MB are measured, too.
    """

    name: str
    kind: str
    durability: str
    what: str
    ours: bool = False
    accepts: bool = True
    huge: bool = False
    needs: tuple[str, ...] = ()
    program: str = ""

    def absent(self) -> str:
        """Return why it cannot be measured here, or nothing."""
        module = installed(self.needs)
        if module:
            return f"not installed: Python module {module}"
        if self.program and shutil.which(self.program) is None:
            return f"not installed: {self.program}"
        return ""


OURS = (
    Transport(
        "sample",
        "sample",
        "<= 0.1 s at a power cut",
        "sample stream: publish_all, follow, purge",
        ours=True,
        huge=True,
    ),
    Transport(
        "work",
        "work",
        "<= 0.1 s at a power cut",
        "work queue: publish_all, consume, ack each",
        ours=True,
    ),
    Transport(
        "sample_always",
        "sample",
        "full",
        "sample stream, every message forced to disk (sync always)",
        ours=True,
    ),
)
PEERS = (
    Transport("zmq", "zmq", "none", "ZeroMQ PUSH and PULL over TCP", accepts=False, needs=("zmq",)),
    Transport("memory", "memory", "none", "our in-memory bus, one process", accepts=False),
    Transport("files_rename", "files", "process crash", "a file a message, renamed into place", huge=True),
    Transport(
        "redis_everysec",
        "redis",
        "<= 1 s at a power cut",
        "Redis stream, appendfsync everysec",
        huge=True,
        needs=("redis",),
        program="redis-server",
    ),
    Transport(
        "redis_everysec_once",
        "redis",
        "<= 1 s at a power cut",
        "the same, what is sent again is stored once (as ours)",
        needs=("redis",),
        program="redis-server",
    ),
    Transport(
        "redis_always",
        "redis",
        "full",
        "Redis stream, appendfsync always",
        needs=("redis",),
        program="redis-server",
    ),
    Transport("files_fsync", "files", "full", "a file a message, forced to disk, renamed"),
)


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Setups:
    """Makes the surroundings of single cases. ``servers`` maps a sync policy to a running server."""

    def __init__(self, servers: Mapping[str, ServerHandle], scratch: Path) -> None:
        self._servers, self._scratch = servers, scratch
        self._numbers = count(1)

    def fresh(self) -> Path:
        """Return a directory that does not exist yet."""
        return self._scratch / f"fresh-{next(self._numbers)}"

    def of(self, transport: Transport) -> AbstractAsyncContextManager[Where]:
        """Return the surroundings of one case of ``transport``."""
        match transport.kind:
            case "sample" | "work":
                return self._run("always" if transport.name.endswith("always") else "100ms")
            case "redis":
                _, policy, *more = transport.name.split("_")
                return self._redis(policy, once=bool(more))
            case "files":
                return self._files(sync=transport.name == "files_fsync")
            case "zmq":
                return self._address()
        return self._nothing()

    @asynccontextmanager
    async def _run(self, sync: str) -> AsyncIterator[Where]:
        """A fresh run on our server; its streams are deleted afterwards."""
        server, run = self._servers[sync], f"bench-{next(self._numbers)}"
        await provision(server.url, run=run, token=server.token, store_gb=STORE_GB)
        where = {"url": server.url, "token": server.token, "run": run}
        try:
            yield where
        finally:
            with anyio.CancelScope(shield=True):
                async with connect(
                    server.url, run=run, token=server.token, role="bench", instance="cleaner"
                ) as bus:
                    for stream in map(bus.names.stream, STREAMS):
                        await bus.connection.api(f"STREAM.DELETE.{stream}")
                    for bucket in map(bus.names.bucket, BUCKETS):
                        await bus.connection.api(f"STREAM.DELETE.{bucket}")

    @asynccontextmanager
    async def raw(self) -> AsyncIterator[Where]:
        """The server itself, and a file in which the subscriber notes its progress."""
        server = self._servers["100ms"]
        path = self._scratch / f"progress-{next(self._numbers)}"
        path.write_bytes(bytes(8))
        yield {"url": server.url, "token": server.token, "progress": str(path)}

    @asynccontextmanager
    async def file(self) -> AsyncIterator[Where]:
        """A file to append to."""
        yield {"file": str(self._scratch / f"append-{next(self._numbers)}")}

    @asynccontextmanager
    async def port(self) -> AsyncIterator[Where]:
        """A port to listen at."""
        yield {"port": free_port()}

    @asynccontextmanager
    async def _address(self) -> AsyncIterator[Where]:
        yield {"url": f"tcp://127.0.0.1:{free_port()}"}

    @asynccontextmanager
    async def _nothing(self) -> AsyncIterator[Where]:
        yield {}

    @asynccontextmanager
    async def _files(self, *, sync: bool) -> AsyncIterator[Where]:
        with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
            yield {"directory": directory, "sync": sync}

    @asynccontextmanager
    async def _redis(self, policy: str, *, once: bool) -> AsyncIterator[Where]:
        """A Redis server of its own, empty, with an append-only file."""
        port = free_port()
        with tempfile.TemporaryDirectory(dir=self._scratch) as directory:
            command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
            command += ["--appendonly", "yes", "--appendfsync", policy, "--dir", directory]
            process = await anyio.open_process(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                await _listening(port, process)
                yield {"port": port, "once": once}
            finally:
                with anyio.CancelScope(shield=True):
                    if process.returncode is None:
                        process.terminate()
                    await process.wait()


async def _listening(port: int, process: Process) -> None:
    with anyio.move_on_after(_START_SECONDS):
        while process.returncode is None:
            try:
                async with await anyio.connect_tcp("127.0.0.1", port):
                    return
            except OSError:
                await anyio.sleep(0.01)
    raise SpadeError("redis-server did not start", remedy="Start it by hand to see why.")
