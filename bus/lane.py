"""The fast lane of a nats-py client: many messages without a task, a queue or a future for each.

It knows nats-py from inside (the version is pinned): its parser is replaced by one that calls handlers
directly, and lines are put where its flusher finds them, all lines of one turn of the event loop in one
write. ``tests/bus/test_bus_lane.py`` fails when a new version no longer works like this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import ParseResult

import msgspec
from nats.aio.client import Client
from nats.aio.transport import TcpTransport
from nats.errors import BadSubjectError, ProtocolError
from nats.protocol.parser import Parser

log = logging.getLogger("spade.bus")
_LINE_END = b"\r\n"
_VERSION_LINE = b"NATS/1.0"
_MESSAGES = frozenset(b"MH")
_JOIN_BYTES = 16 << 10
_READ_BYTES = 512 << 10
# A line of the server is longer than those of its clients: it may name all members of a cluster.
_LONGEST_LINE = 1 << 20


class Arrival(msgspec.Struct, gc=False, eq=False):
    """A message that has arrived. ``head`` is its block of headers, empty when it has none; ``headers``
    is that block as a dictionary, or None.
    """

    subject: str
    reply: str
    data: bytes
    head: bytes

    @property
    def headers(self) -> dict[str, str] | None:
        """Return the headers; a control message has ``Status`` and perhaps ``Description`` among them."""
        return read_headers(self.head) if self.head else None


def read_headers(head: bytes) -> dict[str, str]:
    """Return the headers of a message, from ``NATS/1.0`` to the empty line."""
    first, _, rest = head.partition(_LINE_END)
    found: dict[str, str] = {}
    status, _, description = first.removeprefix(_VERSION_LINE).strip().partition(b" ")
    if status:
        found["Status"] = status.decode("utf-8", "replace")
        if description:
            found["Description"] = description.decode("utf-8", "replace")
    for line in rest.split(_LINE_END):
        name, colon, value = line.partition(b":")
        if colon:
            found[name.strip().decode("utf-8", "replace")] = value.strip().decode("utf-8", "replace")
    return found


def headers_block(headers: dict[str, str]) -> bytes:
    """Return headers as they go over the wire; a line break in a value becomes a space."""
    block = "NATS/1.0\r\n"
    for name, value in headers.items():
        block += f"{name}: {value if value.isprintable() else ' '.join(value.split())}\r\n"
    return f"{block}\r\n".encode()


class Lane:
    """Writes to one client and hears from it. ``handlers`` maps subscription numbers to functions."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.handlers: dict[str, Callable[[Any], None]] = {}
        self._kick: asyncio.Future[None] | None = None
        client._ps = _Parser(client, self.handlers)
        client._transport = _Transport(client)

    def write(self, subject: str, payload: bytes, reply: str, head: bytes = b"") -> None:
        """Put one message in line; it goes out before the event loop waits. Never waits itself.

        ``head`` is a block of headers (:func:`headers_block`). Raises nats-py's BadSubjectError.
        """
        if not subject.isprintable() or " " in subject or not subject:
            raise BadSubjectError
        client = self._client
        size = len(payload)
        if head:
            start = f"HPUB {subject} {reply} {len(head)} {len(head) + size}\r\n".encode() + head
        else:
            start = f"PUB {subject} {reply} {size}\r\n".encode()
        if size < _JOIN_BYTES:
            client._pending.append(b"%b%b\r\n" % (start, payload))
        else:
            client._pending += (start, payload, _LINE_END)
        client._pending_data_size += len(start) + size + 2
        stats = client.stats
        stats["out_msgs"] += 1
        stats["out_bytes"] += size
        if client._flush_queue.empty():
            client._flush_queue.put_nowait(self._done())

    def _done(self) -> asyncio.Future[None]:
        """Return what wakes the flusher; nobody waits for it."""
        if self._kick is None:
            self._kick = asyncio.get_running_loop().create_future()
            self._kick.set_result(None)
        return self._kick


class _Transport(TcpTransport):  # type: ignore[misc]
    """Reads what there is, not 32 KiB at a time: a large message is one piece more often. Leaves nothing of
    a connection behind when another one is made in its place.
    """

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client

    def __bool__(self) -> bool:
        return True  # or nats-py would put another one in its place

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        self.abort()
        # A try that fails late leaves its loops, and two of them would read from one socket.
        for task in (
            self._client._reading_task,
            self._client._ping_interval_task,
            self._client._flusher_task,
        ):
            if task is not None and not task.done():
                task.cancel()
        await super().connect(uri, _READ_BYTES, connect_timeout)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        # nats-py makes reader and protocol anew; asyncio complains of one that does not know of TLS.
        self._io_reader._limit = _READ_BYTES
        self._io_writer._protocol._over_ssl = True

    def close(self) -> None:
        """Close in order, but do not wait for a server that is left because it does not answer."""
        if self._client.is_reconnecting:
            self.abort()
        else:
            super().close()

    def abort(self) -> None:
        """Give up the socket now, whatever is unsent; it is closed a turn of the event loop later."""
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                with contextlib.suppress(AttributeError):  # of one that was closed after a last long write
                    writer.transport.abort()

    async def read(self, buffer_size: int) -> bytes:
        data: bytes = await super().read(_READ_BYTES)
        return data


class _Parser(Parser):  # type: ignore[misc]
    """Reads what the server sends. Messages of ``handlers`` are handed over at once; everything else goes
    nats-py's own way, one line at a time.
    """

    def __init__(self, client: Client, handlers: dict[str, Callable[[Any], None]]) -> None:
        self._handlers = handlers
        self._needed = self._resets = 0
        self._other: tuple[Any, ...] = ()
        super().__init__(client)

    def reset(self) -> None:
        """Forget a half message: the connection it came on is gone."""
        super().reset()
        self._needed = 0
        self._resets += 1

    async def parse(self, data: bytes = b"") -> None:
        """Take the next bytes of the connection. Raises nats-py's ProtocolError."""
        if self.buf:
            self.buf += data
            if len(self.buf) < self._needed:
                return
            data = bytes(self.buf)
            self.buf.clear()
        self._needed = 0
        at, end, resets = 0, len(data), self._resets
        while at < end:
            stop = data.find(_LINE_END, at)
            if stop < 0:
                if end - at > _LONGEST_LINE:
                    raise ProtocolError
                break
            if data[at] in _MESSAGES:
                after = self._take(data, at, stop, end)
                if after < 0:
                    break
                if self._other:
                    await self._pass_on()
            else:
                after = stop + 2
                self.buf[:] = data[at:after]
                await super().parse()
            if self._resets != resets:
                return
            at = after
        if at < end:
            self.buf[:] = data[at:]

    def _take(self, data: bytes, at: int, stop: int, end: int) -> int:
        """Hand over the message that begins at ``at``; return where it ends, -1 when it is not all here."""
        # Only a space separates: what else looks like one may be part of a stranger's subject.
        words = data[at:stop].decode("utf-8", "replace").split(" ")
        start = stop + 2
        try:
            size = int(words[-1])
            subject, number = words[1], words[2]
            if words[0] == "HMSG":
                body = start + int(words[-2])
                reply = words[3] if len(words) == 6 else ""
            elif words[0] == "MSG":
                body = start
                reply = words[3] if len(words) == 5 else ""
            else:
                raise ProtocolError
            handler = self._handlers.get(number)
            sid = int(number) if handler is None else 0
        except (ValueError, IndexError):
            raise ProtocolError from None
        last = start + size
        if last + 2 > end:
            self._needed = last + 2 - at
            return -1
        head = data[start:body] if body > start else b""
        payload = data[body:last]
        if handler is None:
            self._other = (sid, subject.encode(), reply.encode(), payload, head or None)
            return last + 2
        stats = self.nc.stats
        stats["in_msgs"] += 1
        stats["in_bytes"] += last - body
        try:
            handler(Arrival(subject, reply, payload, head))
        except Exception:
            log.exception("a message on %s could not be handled", subject)
        return last + 2

    async def _pass_on(self) -> None:
        other, self._other = self._other, ()
        try:
            await self.nc._process_msg(*other)
        except Exception:  # headers that a stranger wrote: they would end nats-py's read loop
            log.exception("a message on %s could not be handled", other[1].decode())
