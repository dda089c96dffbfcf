"""The client of nats-py, with the faults repaired that make it deaf or stuck.

The only module that uses private attributes of nats-py; its version is pinned to 2.16. The repairs are listed
in ``docs/bus-pitfalls.md``; ``tests/bus/test_bus_nats_client.py`` fails when a new version works differently.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable
from typing import Any

import msgspec
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import BadSubjectError
from nats.protocol import command, parser

log = logging.getLogger("spade.bus")
_LINE_END = b"\r\n"
_VERSION_LINE = b"NATS/1.0"

# Only a space separates the words of a line: other white space may be part of a foreign subject, and the
# patterns of nats-py would end the connection at such a message, again after each reconnect.
parser.MSG_RE = re.compile(rb"\AMSG ([^ \r\n]+) (\d+) (([^ \r\n]+) )?(\d+)\r\n")
parser.HMSG_RE = re.compile(rb"\AHMSG ([^ \r\n]+) (\d+) (([^ \r\n]+) )?(\d+) (\d+)\r\n")


class Arrival(msgspec.Struct, gc=False, eq=False):
    """A received message. ``head`` is its block of headers, b"" without any."""

    subject: str
    reply: str
    data: bytes
    head: bytes = b""

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers. Control messages have ``Status``, perhaps ``Description``."""
        return read_headers(self.head) if self.head else {}


def read_headers(head: bytes) -> dict[str, str]:
    """Return the headers of a block that begins with ``NATS/1.0``. Never raises: strangers write headers."""
    first, _, rest = head.partition(_LINE_END)
    found: dict[str, str] = {}
    status, _, description = first.removeprefix(_VERSION_LINE).strip().partition(b" ")
    if status:
        found["Status"] = status.decode("utf-8", "replace")
        found["Description"] = description.decode("utf-8", "replace")
    for line in rest.split(_LINE_END):
        name, colon, value = line.partition(b":")
        if colon:
            found[name.strip().decode("utf-8", "replace")] = value.strip().decode("utf-8", "replace")
    return found


def headers_block(headers: dict[str, str]) -> bytes:
    """Return headers as they travel; a line break in a value becomes a space."""
    lines = [f"{name}: {' '.join(value.split())}\r\n" for name, value in headers.items()]
    return f"NATS/1.0\r\n{''.join(lines)}\r\n".encode()


class NatsClient(Client):  # type: ignore[misc]
    """A nats-py client that hands messages to plain functions and writes without waiting.

    Do not use its ``flush``, ``drain``, ``fetch``, ``publish_async`` or watchers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._handlers: dict[int, Callable[[Arrival], None]] = {}

    async def listen(self, subject: str, handler: Callable[[Arrival], None]) -> Subscription:
        """Subscribe; ``handler`` is called with each message and must neither wait nor raise."""
        # Before the subscription is written: its first message may arrive before we go on here.
        number = self._sid + 1
        self._handlers[number] = handler
        return await self.subscribe(subject, pending_msgs_limit=0, pending_bytes_limit=0)

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
        if head:
            line = command.hpub_cmd(subject, reply, head, payload)
        else:
            line = command.pub_cmd(subject, reply, payload)
        self._pending.append(line)
        self._pending_data_size += len(line)
        if self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        """Hand a message to its function. An exception here would end the read loop of nats-py."""
        self.stats["in_msgs"] += 1
        self.stats["in_bytes"] += len(data)
        handler = self._handlers.get(sid)
        if handler is None:
            return
        where = subject.decode("utf-8", "replace")
        try:
            handler(Arrival(where, reply.decode("utf-8", "replace"), data, headers or b""))
        except Exception:
            log.exception("a message on %s could not be handled", where)

    def drop_unsent(self) -> None:
        """Drop unwritten bytes: they belong to a connection that is gone."""
        self._pending.clear()
        self._pending_data_size = 0

    def abort(self) -> None:
        """Give up the socket now, whatever is unsent."""
        for name in ("_io_writer", "_bare_io_writer"):
            with contextlib.suppress(AttributeError):  # not open yet, or closed after a last long write
                getattr(self._transport, name).transport.abort()

    async def revive(self) -> str:
        """Reconnect when a loop or the reconnect task of nats-py has ended; return which one, "" for none."""
        reconnecting = self._reconnection_task
        if self.is_connected and any(task.done() for task in self._loops()):
            await self.force_reconnect()
            return "a loop of the bus connection"
        if self.is_reconnecting and reconnecting is not None and reconnecting.done():
            self._status = Client.CONNECTED
            await self.force_reconnect()
            return "the reconnect task of the bus connection"
        return ""

    def _loops(self) -> list[asyncio.Task[None]]:
        loops = (self._reading_task, self._ping_interval_task, self._flusher_task)
        return [task for task in loops if task is not None]

    async def _attempt_reconnect(self) -> None:
        """Reconnect without waiting for the good-bye of a server that does not answer."""
        self.abort()
        await super()._attempt_reconnect()

    async def _connect_to_server(self, server: Any) -> None:
        """Leave nothing of an earlier try behind: two loops would read from one socket."""
        self.abort()
        for task in self._loops():
            task.cancel()
        await super()._connect_to_server(server)

    async def _process_connect_init(self) -> None:
        await super()._process_connect_init()
        if self._server_info.get("tls_required"):
            # nats-py makes a new protocol; asyncio warns of one that does not know of TLS.
            self._transport._io_writer._protocol._over_ssl = True
