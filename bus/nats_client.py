"""The client of nats-py, with the faults repaired that make it deaf, slow or stuck.

The only module that uses private attributes of nats-py; its version is pinned to 2.16. The repairs are listed
in ``docs/bus-pitfalls.md``; ``tests/bus/test_bus_nats_client.py`` fails when a new version works differently.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import ParseResult

import msgspec
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.aio.transport import TcpTransport
from nats.errors import BadSubjectError
from nats.protocol import parser

log = logging.getLogger("spade.bus")
_LINE_END = b"\r\n"
_VERSION_LINE = b"NATS/1.0"
_JOIN_BYTES = 16 << 10
_READ_BYTES = 512 << 10

# Only a space separates the words of a line: other white space may be part of a foreign subject, and the
# patterns of nats-py would end the connection at such a message, again after each reconnect.
parser.MSG_RE = re.compile(rb"\AMSG ([^ \r\n]+) (\d+) (([^ \r\n]+) )?(\d+)\r\n")
parser.HMSG_RE = re.compile(rb"\AHMSG ([^ \r\n]+) (\d+) (([^ \r\n]+) )?(\d+) (\d+)\r\n")


class Arrival(msgspec.Struct, gc=False, eq=False):
    """A received message. ``head`` is its block of headers, b"" without any."""

    subject: str
    reply: str
    data: bytes
    head: bytes

    @property
    def headers(self) -> dict[str, str] | None:
        """Return the headers, None without any. Control messages have ``Status``, perhaps ``Description``."""
        return read_headers(self.head) if self.head else None


def read_headers(head: bytes) -> dict[str, str]:
    """Return the headers of a block that begins with ``NATS/1.0``. Never raises: strangers write headers."""
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
    """Return headers as they travel; a line break in a value becomes a space."""
    block = "NATS/1.0\r\n"
    for name, value in headers.items():
        block += f"{name}: {value if value.isprintable() else ' '.join(value.split())}\r\n"
    return f"{block}\r\n".encode()


class NatsClient(Client):  # type: ignore[misc]
    """A nats-py client that hands messages to plain functions and writes without waiting.

    Do not use its ``flush``, ``drain``, ``fetch``, ``publish_async`` or watchers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._transport = _Transport(self)
        self._handlers: dict[int, Callable[[Arrival], None]] = {}
        self._kick: asyncio.Future[None] | None = None

    async def listen(self, subject: str, handler: Callable[[Arrival], None]) -> Subscription:
        """Subscribe; ``handler`` is called with each message and must neither wait nor raise."""
        # Before the subscription is written: its first message may arrive before we go on here.
        number = self._sid + 1
        self._handlers[number] = handler
        try:
            subscription = await self.subscribe(subject, pending_msgs_limit=0, pending_bytes_limit=0)
            if subscription._id != number:
                raise RuntimeError(
                    f"nats-py numbers subscriptions differently: {subscription._id}, not {number}"
                )
        except BaseException:
            del self._handlers[number]
            raise
        return subscription

    def forget(self, subscription: Subscription) -> None:
        """Call the handler of a subscription no more."""
        self._handlers.pop(subscription._id, None)

    async def end_interest(self, subscription: Subscription) -> None:
        """End a subscription on the server; messages on their way still reach the handler."""
        await self._send_unsubscribe(subscription._id)

    def write(self, subject: str, payload: bytes, reply: str, head: bytes = b"") -> None:
        """Queue one message; it is sent before the event loop waits. ``head`` is a :func:`headers_block`.

        Raises BadSubjectError.
        """
        if not subject.isprintable() or " " in subject or not subject:
            raise BadSubjectError
        size = len(payload)
        if head:
            start = f"HPUB {subject} {reply} {len(head)} {len(head) + size}\r\n".encode() + head
        else:
            start = f"PUB {subject} {reply} {size}\r\n".encode()
        if size < _JOIN_BYTES:
            self._pending.append(b"%b%b\r\n" % (start, payload))
        else:
            self._pending += (start, payload, _LINE_END)
        self._pending_data_size += len(start) + size + 2
        self.stats["out_msgs"] += 1
        self.stats["out_bytes"] += size
        if self._flush_queue.empty():
            if self._kick is None:
                self._kick = asyncio.get_running_loop().create_future()
                self._kick.set_result(None)
            self._flush_queue.put_nowait(self._kick)

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        """Hand a message to its function. An exception here would end the read loop of nats-py."""
        handler = self._handlers.get(sid)
        try:
            if handler is None:
                await super()._process_msg(sid, subject, reply, data, headers)
                return
            self.stats["in_msgs"] += 1
            self.stats["in_bytes"] += len(data)
            handler(
                Arrival(
                    subject.decode("utf-8", "replace"), reply.decode("utf-8", "replace"), data, headers or b""
                )
            )
        except Exception:
            log.exception("a message on %s could not be handled", subject.decode("utf-8", "replace"))

    @property
    def announced(self) -> dict[str, Any]:
        """Return the INFO that the server sent when the connection was made."""
        return dict(self._server_info)

    @property
    def unsent_bytes(self) -> int:
        """Return how many bytes wait here and in the socket."""
        writer = self._transport._io_writer
        return int(self._pending_data_size) + (writer.transport.get_write_buffer_size() if writer else 0)

    def drop_unsent(self) -> None:
        """Drop unwritten bytes: they belong to a connection that is gone."""
        self._pending.clear()
        self._pending_data_size = 0

    def abort(self) -> None:
        """Give up the socket now."""
        self._transport.abort()

    async def revive(self) -> str:
        """Reconnect when a loop or the reconnect task of nats-py has ended; return which one, "" for none."""
        loops = (self._reading_task, self._ping_interval_task, self._flusher_task)
        reconnecting = self._reconnection_task
        if self.is_connected and any(task is not None and task.done() for task in loops):
            await self.force_reconnect()
            return "a loop of the bus connection"
        if self.is_reconnecting and reconnecting is not None and reconnecting.done():
            self._status = Client.CONNECTED
            await self.force_reconnect()
            return "the reconnect task of the bus connection"
        return ""


class _Transport(TcpTransport):  # type: ignore[misc]
    """Reads up to 512 KiB at a time, and leaves nothing of an older connection behind."""

    def __init__(self, client: NatsClient) -> None:
        super().__init__()
        self._client = client

    def __bool__(self) -> bool:
        return True  # or nats-py would replace it

    async def connect(self, uri: ParseResult, buffer_size: int, connect_timeout: int) -> None:
        self.abort()
        # A try that fails late leaves its loops running, and two of them would read from one socket.
        client = self._client
        for task in (client._reading_task, client._ping_interval_task, client._flusher_task):
            if task is not None and not task.done():
                task.cancel()
        await super().connect(uri, _READ_BYTES, connect_timeout)

    async def connect_tls(
        self, uri: str | ParseResult, ssl_context: ssl.SSLContext, buffer_size: int, connect_timeout: int
    ) -> None:
        await super().connect_tls(uri, ssl_context, buffer_size, connect_timeout)
        # nats-py makes a new reader and protocol; asyncio warns of a protocol that does not know of TLS.
        self._io_reader._limit = _READ_BYTES
        self._io_writer._protocol._over_ssl = True

    def close(self) -> None:
        """Close in order, but do not wait for a server that is left because it does not answer."""
        if self._client.is_reconnecting:
            self.abort()
        else:
            super().close()

    def abort(self) -> None:
        """Give up the socket, whatever is unsent; it is closed a turn of the event loop later."""
        for writer in (self._io_writer, self._bare_io_writer):
            if writer is not None:
                with contextlib.suppress(AttributeError):  # closed after a last long write
                    writer.transport.abort()

    async def read(self, buffer_size: int) -> bytes:
        data: bytes = await super().read(_READ_BYTES)
        return data
