"""Taking work from a queue: leases kept alive, verdicts confirmed, poison put aside."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import anyio
import msgspec
from anyio.abc import TaskGroup

from bus import codec
from bus.codec import Envelope
from bus.concurrency import ArrivalQueue, flat_task_group
from bus.connection import Connection, status_of
from bus.errors import BusError, NotFound, Undecodable
from bus.messages import DeadLetter, Message
from bus.nats_client import Arrival
from bus.pull import Delivered, Pull
from bus.subjects import SECOND, Consumer, Names

log = logging.getLogger("spade.bus")
Bury = Callable[[DeadLetter], Awaitable[None]]
_PROGRESS_SECONDS = 10.0
_CONFIRM_SECONDS = 3.0
_CONFIRM_TRIES = 4
_CONFIRM_PAUSE = 0.1
_LEAVE_SECONDS = 2.0
_GONE_SECONDS = 15.0
_SURPLUS_SECONDS = 0.1  # or it would come back to the request that is being withdrawn
Verdict = Literal["ack", "nak", "term"]
Settle = Callable[["Delivery", Verdict, float, str], Awaitable[None]]


@dataclass(slots=True)
class Delivery:
    """One piece of work. Settle it once with :meth:`ack`, :meth:`nak` or :meth:`term`.

    Until then the bus renews its lease. ``attempt`` counts deliveries from 1. A second settlement does
    nothing.
    """

    message: Message
    sequence: int
    tail: str
    attempt: int
    envelope: Envelope
    settle: Settle = field(repr=False)
    settled: bool = False

    async def ack(self) -> None:
        """Acknowledge the work after its result is stored; returns when that is on its way.

        A lost acknowledgement is repeated, and a redelivery to this client is suppressed; another client may
        get the work again, so results have deterministic ids.
        """
        await self._end("ack", 0.0, "")

    async def nak(self, delay: float = 0.0) -> None:
        """Hand the work back; it is delivered again after ``delay`` seconds."""
        await self._end("nak", delay, "")

    async def term(self, reason: str) -> None:
        """Give the work up for good: a dead letter keeps it together with ``reason``."""
        await self._end("term", 0.0, reason)

    async def _end(self, verdict: Verdict, delay: float, reason: str) -> None:
        if not self.settled:
            self.settled = True
            await self.settle(self, verdict, delay, reason)


# Sequence and subject: a stream that was created again, or lost its end, counts from there again.
_Place = tuple[int, str]


@dataclass(slots=True, eq=False)
class _InHand:
    """A message that the server leased to us, delivered ``attempt`` times.

    ``reply`` is where its ``verdict`` goes, which is empty until the work is settled.
    """

    place: _Place
    frame: bytes
    attempt: int
    reply: str
    delivery: Delivery | None = None
    verdict: bytes = b""


class Work:
    """One ``consume``. Iterate ``arrivals`` while :meth:`running` is open."""

    def __init__(
        self,
        connection: Connection,
        names: Names,
        consumer: Consumer,
        *,
        limit: int,
        bury: Bury,
        now: Callable[[], int] | None = None,
    ) -> None:
        self._connection, self._names, self._consumer, self._bury = connection, names, consumer, bury
        self._limit, self._now = limit, now
        self._queue = f"{names.stream('TASK')}.{consumer.name}"
        self.arrivals: ArrivalQueue[Delivery] = ArrivalQueue()
        self._in_hand: dict[_Place, _InHand] = {}
        self._tasks: TaskGroup | None = None
        self._gone = anyio.Event()
        self.counts = Counter[str]()
        self._pull = Pull(
            connection,
            stream=names.stream("TASK"),
            consumer=consumer.name,
            wanted=lambda: self._momentary() - len(self._in_hand),
            on_message=self._on_message,
            on_broken=lambda gone: self._gone.set() if gone else None,
        )

    def _momentary(self) -> int:
        return self._limit if self._now is None else min(self._limit, self._now())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take work while the context is open; unsettled work is handed back at its end.

        Raises BusError when the queue does not exist: the server would never answer a request.
        """
        seconds = await self._lease_seconds()
        try:
            async with flat_task_group() as self._tasks:
                self._tasks.start_soon(self._pull.run)
                self._tasks.start_soon(self._keep_alive, seconds / 3)
                self._tasks.start_soon(self._end_when_gone)
                try:
                    yield
                finally:
                    self._tasks.cancel_scope.cancel()
        finally:
            self._tasks = None
            await self._leave()

    async def _lease_seconds(self) -> float:
        """Ask the server how long it leases work. Raises BusError when the queue does not exist."""
        try:
            info = await self._connection.api(f"CONSUMER.INFO.{self._queue}")
        except NotFound as error:
            name = self._consumer.name
            raise BusError(
                f"there is no queue {name} in run {self._names.run} on this broker",
                remedy=f"Name the role {name} in run.roles, or run `spade bus provision --run "
                f"{self._names.run} --url URL --streams-only --role {name}`.",
            ) from error
        return float(info["config"]["ack_wait"]) / SECOND

    async def _leave(self) -> None:
        """Hand back everything unsettled and see the last verdicts confirmed, within two seconds."""
        self.arrivals.end()
        with anyio.move_on_after(_LEAVE_SECONDS, shield=True), contextlib.suppress(BusError):
            async with flat_task_group() as group:
                for held in list(self._in_hand.values()):
                    if held.verdict:
                        group.start_soon(self._confirm, held)
                    else:
                        self._hand_back(held, 0.0)

    # Arrivals.

    def _on_message(self, message: Arrival, delivered: Delivered) -> None:
        place = (delivered.stream_sequence, message.subject)
        self.counts["redelivered"] += delivered.attempt > 1
        held = self._in_hand.get(place)
        if held is not None:
            self.counts["suppressed"] += 1
            held.reply = message.reply
            self._pull.wake()
            return
        idle = self._momentary() <= 0
        if idle or len(self._in_hand) >= self._limit:
            # The limit fell, or a request from before a reconnect is served beside its replacement.
            self.counts["surplus"] += 1
            if idle:
                self._pull.withdraw()
            self._connection.write(message.reply, _nak(_SURPLUS_SECONDS))
            return
        held = self._in_hand[place] = _InHand(place, message.data, delivered.attempt, message.reply)
        try:
            envelope, content = codec.decode(message.data, message.head)
        except Undecodable as error:
            self._set_aside(held, error.reason)
            return
        if held.attempt > self._consumer.attempts:
            held.attempt -= 1
            self._set_aside(held, "delivered too often")
            return
        self.counts["delivered"] += 1
        tail = self._names.tail(message.subject)
        held.delivery = Delivery(content, place[0], tail, held.attempt, envelope, self._settle)
        self.arrivals.put(held.delivery)

    def _set_aside(self, held: _InHand, reason: str) -> None:
        log.error("task %d cannot be used: %s", held.place[0], reason)
        if self._tasks is not None:
            self._tasks.start_soon(self._give_up, held, reason)

    async def _give_up(self, held: _InHand, reason: str) -> None:
        """Put a message that cannot be used into a dead letter, then remove it from the queue."""
        sequence, subject = held.place
        letter = DeadLetter(
            source="TASK",
            sequence=sequence,
            subject=self._names.tail(subject),
            reason=reason,
            attempts=held.attempt,
            frame=held.frame,
        )
        await self._bury(letter)
        self.counts["poison"] += 1
        self._conclude(held, b"+TERM")

    async def _end_when_gone(self) -> None:
        """Raise BusError when the queue is away for long; one that was made again is used."""
        while True:
            await self._gone.wait()
            await anyio.sleep(_GONE_SECONDS)
            self._gone = anyio.Event()
            await self._lease_seconds()

    # Verdicts.

    async def _settle(self, delivery: Delivery, verdict: Verdict, delay: float, reason: str) -> None:
        held = self._in_hand.get((delivery.sequence, self._names.subject(delivery.tail)))
        if held is None or held.delivery is not delivery:
            return
        if verdict == "nak":
            self._hand_back(held, delay)
        elif verdict == "ack":
            self._conclude(held, b"+ACK")
        else:
            try:
                await self._give_up(held, reason)
            except BaseException:
                delivery.settled = False  # or its place would stay taken
                raise

    def _hand_back(self, held: _InHand, delay: float) -> None:
        """Nak once: a lost one ends with the lease, and a late second one could hit another's lease."""
        self._in_hand.pop(held.place, None)
        self._pull.wake()
        self._connection.write(held.reply, _nak(delay))

    def _conclude(self, held: _InHand, verdict: bytes) -> None:
        held.verdict = verdict
        if self._tasks is not None:
            self._tasks.start_soon(self._confirm, held)

    async def _confirm(self, held: _InHand) -> None:
        """Tell the server a verdict until it says that it knows; a redelivery meanwhile is suppressed."""
        tries = 0
        while tries < _CONFIRM_TRIES and not self._connection.closed:
            await self._connection.wait_connected("connection to acknowledge through")
            try:
                answer = await self._connection.ask(held.reply, held.verdict, seconds=_CONFIRM_SECONDS)
            except TimeoutError:
                tries += 1
                continue
            if answer is not None and status_of(answer) != "503":
                break
            tries += answer is not None  # the queue is away; without an answer, the connection was
            await anyio.sleep(_CONFIRM_PAUSE)
        self._in_hand.pop(held.place, None)
        self._pull.wake()

    async def _keep_alive(self, period: float) -> None:
        """Renew the leases of the work in hand, well before they end."""
        while True:
            await anyio.sleep(min(_PROGRESS_SECONDS, period))
            for held in self._in_hand.values():
                if not held.verdict:
                    self._connection.write(held.reply, b"+WPI")


def _nak(delay: float) -> bytes:
    return b"-NAK" if delay <= 0 else b"-NAK " + msgspec.json.encode({"delay": int(delay * SECOND)})
