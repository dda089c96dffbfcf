"""A TCP proxy in front of a server: it cuts connections after a number of bytes, slows them down, freezes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import anyio


class Proxy:
    """Passes everything between ``url`` and the server, with the faults that are set.

    ``cuts`` are numbers of bytes, both ways together: after each of them the connection is lost, in the
    middle of whatever was on its way. ``piece`` bytes at most pass at once, ``pause`` seconds apart.
    """

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self.url = ""
        self.connections = self.cut = 0
        self.cuts: deque[int] = deque()
        self.piece, self.pause = 1 << 16, 0.0
        self.flowing = asyncio.Event()
        self.flowing.set()

    def cut_after(self, amounts: Iterable[int]) -> None:
        """Plan the next cuts."""
        self.cuts.extend(amounts)

    def _allowed(self, amount: int) -> int:
        """Return how many of so many bytes pass; fewer mean a cut."""
        if not self.cuts:
            return amount
        if amount < self.cuts[0]:
            self.cuts[0] -= amount
            return amount
        return self.cuts.popleft()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection until an end of it is gone."""
        self.connections += 1
        there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
        try:
            with contextlib.suppress(OSError, ExceptionGroup):
                async with anyio.create_task_group() as group:
                    group.start_soon(self._pump, reader, back, group.cancel_scope)
                    group.start_soon(self._pump, there, writer, group.cancel_scope)
        finally:
            for end in (writer, back):
                end.transport.abort()

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, scope: anyio.CancelScope
    ) -> None:
        while data := await source.read(self.piece):
            await self.flowing.wait()
            if self.pause:
                await asyncio.sleep(self.pause)
            allowed = self._allowed(len(data))
            sink.write(data[:allowed])
            await sink.drain()
            if allowed < len(data):
                self.cut += 1
                break
        scope.cancel()


@asynccontextmanager
async def proxied(target: str) -> AsyncIterator[Proxy]:
    """Run a proxy in front of ``target``."""
    proxy = Proxy(target)
    handlers: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(proxy.handle(reader, writer))
        handlers.add(task)
        task.add_done_callback(handlers.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy.url = f"nats://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in list(handlers):
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
        await server.wait_closed()
