"""Writing to and hearing from one nats-py client, without what makes it hang or forget.

nats-py's own ways to wait (a forced flush, ``flush``, ``drain``) swallow cancellation, end its read loop
when they are cancelled, or are no barrier (reference nats section 4, rows 9, 10, 25).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import anyio
import nats.errors
from anyio.lowlevel import checkpoint
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from bus.errors import BusError, BusUnavailable
from bus.lane import Arrival, Lane, headers_block

log = logging.getLogger("spade.bus")
_BACKLOG_BYTES = 32 << 20
_RETIRE_SECONDS = 1.0
_ELECTION_FACTOR = 6


class Wire:
    """The bytes of one connection, through all its reconnects."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.client = Client()
        self.lane = Lane(self.client)
        self.closed = False
        self._watchers: set[Callable[[], None]] = set()
        self._last_error = ""

    @property
    def connected(self) -> bool:
        """Whether bytes written now have a server to go to."""
        return bool(self.client._status == Client.CONNECTED) and not self.closed

    @property
    def clustered(self) -> bool:
        """Whether the server is one of several."""
        return bool(self.client._server_info.get("cluster"))

    def election_time(self, seconds: float) -> float:
        """Return for how long a stream or a consumer may be missing that one server would have back within
        ``seconds``: in a cluster its leader may have died, and a busy one takes its time to elect another.
        """
        return seconds * (_ELECTION_FACTOR if self.clustered else 1)

    @property
    def unsent_bytes(self) -> int:
        """How many bytes have not been given to the system: nats-py's and those of its socket."""
        writer = getattr(self.client._transport, "_io_writer", None)
        buffered = writer.transport.get_write_buffer_size() if writer is not None else 0
        return int(self.client.pending_data_size) + int(buffered)

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` at every connect, disconnect and close. Returns a function that ends it."""
        self._watchers.add(callback)
        return lambda: self._watchers.discard(callback)

    def check_open(self, awaited: str) -> None:
        """Raise BusUnavailable when the connection is closed for good."""
        if self.closed:
            reason = f" ({self._last_error})" if self._last_error else ""
            raise BusUnavailable(awaited, 0, remedy=f"The connection to {self.url} is closed{reason}.")

    async def send(
        self, subject: str, payload: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Write one message; waits only while very much waits already.

        Raises nats-py's OutboundBufferLimitError while there is no server: nothing is kept for later.
        """
        if self.crowded:
            await self.uncrowded()
        if len(payload) > self.client.max_payload:
            raise nats.errors.MaxPayloadError
        if not self.write(subject, payload, reply, headers_block(headers) if headers else b""):
            raise nats.errors.OutboundBufferLimitError

    def write(self, subject: str, payload: bytes, reply: str, head: bytes = b"") -> bool:
        """Put one message in line without waiting; False when there is no server. ``head`` are headers as
        :func:`bus.lane.headers_block` makes them. Writers of many messages heed :attr:`crowded`.
        """
        if not self.connected:
            return False
        self.lane.write(subject, payload, reply, head)
        return True

    @property
    def crowded(self) -> bool:
        """Whether so much waits to be written that a writer should wait for :meth:`uncrowded`."""
        return bool(self.client._pending_data_size > _BACKLOG_BYTES)

    async def uncrowded(self) -> None:
        """Return when the socket has taken enough of what waits, or the connection is gone."""
        while self.connected and self.crowded:
            await self._written()

    async def _written(self) -> None:
        """Return when the socket has taken what waits, or the connection changed."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        unwatch = self.watch(lambda: None if written.done() else written.set_result(None))
        try:
            if self.connected:
                await self.client._flush_queue.put(written)
                await written
        finally:
            unwatch()

    async def barrier(self) -> bool:
        """Return True when the server has read all that was written before and we have all that it sent
        before; False when the connection changed meanwhile. May be cancelled at any time.
        """
        await self._written()
        if not self.connected:
            return False
        answered = anyio.Event()
        # A PONG that finds its future cancelled ends nats-py's read loop: nobody else touches this one.
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        pong.add_done_callback(lambda _: answered.set())
        self.client._pongs.append(pong)
        self.client._transport.write(b"PING\r\n")
        unwatch = self.watch(answered.set)
        try:
            await answered.wait()
        finally:
            unwatch()
        return pong.done()

    async def subscribe(self, subject: str, handler: Callable[[Arrival], None]) -> Subscription:
        """Subscribe; ``handler`` must neither wait nor raise. Bounds are the caller's.

        Raises BusUnavailable when the connection is closed.
        """
        self.check_open(f"subscription to {subject}")
        # Before the subscription is written: its first message may arrive before we go on here.
        number = self.client._sid + 1
        self.lane.handlers[str(number)] = handler
        try:
            subscription = await self.client.subscribe(subject, pending_msgs_limit=0, pending_bytes_limit=0)
        except BaseException:
            del self.lane.handlers[str(number)]
            raise
        if subscription._id != number:
            raise BusError(f"nats-py numbers subscriptions in another way ({subscription._id}, not {number})")
        return subscription

    async def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription; a connection that is gone has ended it already."""
        self.lane.handlers.pop(str(subscription._id), None)
        with contextlib.suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()

    async def retire(self, subscription: Subscription) -> None:
        """End a subscription after all that was sent to it has been handled, within a second.

        nats-py forgets a subscription before the server does: what is on its way would be lost.
        """
        with anyio.move_on_after(_RETIRE_SECONDS):
            if self.connected:
                await self.client._send_unsubscribe(subscription._id)
                await self.barrier()
            while subscription.pending_msgs and not self.closed:
                await checkpoint()
        await self.unsubscribe(subscription)
