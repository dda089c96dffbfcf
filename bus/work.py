"""Taking work from a queue: leases kept alive, verdicts confirmed, poison put aside."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic

import anyio
import msgspec

from bus import codec
from bus.concurrency import ArrivalQueue, flat_task_group
from bus.connection import Connection
from bus.errors import BusError, NotFound, Undecodable
from bus.interface import Delivery, Verdict
from bus.messages import DeadLetter
from bus.nats_client import Arrival
from bus.pull import Delivered, Pull, PullSettings, read
from bus.subjects import SECOND, Consumer, Names

log = logging.getLogger("spade.bus")
Bury = Callable[[DeadLetter], Awaitable[None]]
PROGRESS_SECONDS = 10.0
_CONFIRM_SECONDS = 3.0
_CONFIRM_TRIES = 4
_LEAVE_SECONDS = 2.0
_GONE_SECONDS = 15.0
_REMEMBERED = 10_000
_SURPLUS_SECONDS = 0.1  # or it would come back to the request that is being withdrawn


# Sequence and subject: a stream that was created again, or lost its end, counts from there again.
_Place = tuple[int, str]


@dataclass(slots=True, eq=False)
class _InHand:
    """A message that the server leased to us. ``reply`` is where its verdict goes."""

    place: _Place
    reply: str
    delivery: Delivery | None = None


@dataclass(slots=True, eq=False)
class _SentVerdict:
    """A verdict that the server has not confirmed yet."""

    place: _Place
    reply: str
    payload: bytes
    due: float = 0.0
    tries: int = 0


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
        self._stream = names.stream(consumer.stream)
        self.arrivals: ArrivalQueue[Delivery] = ArrivalQueue()
        self._poison: ArrivalQueue[tuple[_InHand, DeadLetter]] = ArrivalQueue()
        self._in_hand: dict[_Place, _InHand] = {}
        self._finished: dict[_Place, None] = {}
        self._verdicts: dict[str, _SentVerdict] = {}
        self._due, self._quiet = anyio.Event(), anyio.Event()
        self._prefix = f"{connection.inbox}.verdict.{id(self):x}."
        self._serial = 0
        self._gone_first = self._gone_last = 0.0
        self._counts = dict.fromkeys(
            ("delivered", "redelivered", "suppressed", "surplus", "poison", "acked", "naked", "unconfirmed"),
            0.0,
        )
        self._pull = Pull(
            connection,
            stream=self._stream,
            consumer=consumer.name,
            settings=PullSettings(least=max(1, limit // (16 if now else 4))),
            wanted=lambda: self._momentary() - len(self._in_hand),
            on_message=self._on_message,
            on_gone=self._on_gone,
        )

    def _momentary(self) -> int:
        return self._limit if self._now is None else min(self._limit, self._now())

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters of this consumer."""
        return {
            "held": float(len(self._in_hand)),
            "owed": float(self._pull.owed),
            "unread": float(len(self.arrivals)),
            "verdicts_in_flight": float(len(self._verdicts)),
            "resets": float(self._pull.resets),
            **self._counts,
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take work while the context is open; unsettled work is handed back at its end.

        Raises BusError when the queue does not exist: the server would never answer a request.
        """
        queue = self._consumer.name
        try:
            await self._connection.api(f"CONSUMER.INFO.{self._stream}.{queue}")
        except NotFound as error:
            raise BusError(
                f"there is no queue {queue} in run {self._names.run} on this broker",
                remedy=f"Name the role {queue} in run.roles, or run `spade bus provision --role {queue}`.",
            ) from error
        subscription = await self._connection.subscribe(f"{self._prefix}*", self._on_confirmed)
        unwatch = self._connection.watch(self._on_state)
        try:
            async with flat_task_group() as group:
                group.start_soon(self._pull.run)
                group.start_soon(self._keep_alive)
                group.start_soon(self._bury_all)
                group.start_soon(self._confirm_again)
                try:
                    yield
                finally:
                    group.cancel_scope.cancel()
        finally:
            await self._leave()
            unwatch()
            with anyio.CancelScope(shield=True):
                await self._connection.unsubscribe(subscription)

    async def _leave(self) -> None:
        """Hand back everything unsettled and see the last verdicts confirmed, within two seconds."""
        self.arrivals.end()
        with anyio.move_on_after(_LEAVE_SECONDS, shield=True):
            for held in list(self._in_hand.values()):
                self._hand_back(held, 0.0)
            self._quiet = anyio.Event()
            while self._verdicts and self._connection.connected:
                await self._quiet.wait()

    # Arrivals.

    def _on_message(self, message: Arrival, delivered: Delivered) -> None:
        place = (delivered.stream_sequence, message.subject)
        self._counts["redelivered"] += delivered.attempt > 1
        if place not in self._in_hand and place not in self._finished:
            self._accept(place, message, delivered)
            return
        self._counts["suppressed"] += 1
        self._pull.wake()
        if place in self._in_hand:
            self._in_hand[place].reply = message.reply
        else:
            self._repeat_verdict(place, message.reply)

    def _accept(self, place: _Place, message: Arrival, delivered: Delivered) -> None:
        idle = self._momentary() <= 0
        if idle or len(self._in_hand) >= self._limit:
            # The limit fell, or a request from before a reconnect is served beside its replacement.
            self._counts["surplus"] += 1
            if idle:
                self._pull.withdraw()
            self._connection.write(message.reply, _nak(_SURPLUS_SECONDS))
            return
        held = self._in_hand[place] = _InHand(place, message.reply)
        try:
            envelope, content = read(message)
        except Undecodable as error:
            self._set_aside(held, message, delivered, error.reason)
            return
        if delivered.attempt > self._consumer.attempts:
            self._set_aside(held, message, delivered, "delivered too often")
            return
        self._counts["delivered"] += 1
        held.delivery = Delivery(
            message=content,
            sequence=delivered.stream_sequence,
            tail=self._names.tail(message.subject),
            attempt=delivered.attempt,
            envelope=envelope,
            settle=self._settle,
        )
        self.arrivals.put(held.delivery)

    def _set_aside(self, held: _InHand, message: Arrival, delivered: Delivered, reason: str) -> None:
        letter = DeadLetter(
            source=self._consumer.stream,
            sequence=delivered.stream_sequence,
            subject=self._names.tail(message.subject),
            reason=reason,
            attempts=delivered.attempt - 1 if reason == "delivered too often" else delivered.attempt,
            frame=message.data,
        )
        log.error("%s %d cannot be used: %s", letter.source, letter.sequence, reason)
        self._poison.put((held, letter))

    async def _bury_all(self) -> None:
        async for held, letter in self._poison:
            await self._bury(letter)
            self._counts["poison"] += 1
            self._end(held, b"+TERM")

    def _on_gone(self, why: str) -> None:
        now = monotonic()
        if now - self._gone_last > 2.0:
            self._gone_first = now
        self._gone_last = now
        if now - self._gone_first > self._connection.election_time(_GONE_SECONDS):
            self.arrivals.end(
                BusError(
                    f"consumer {self._consumer.name} of stream {self._stream} is gone ({why})",
                    remedy="Has the run been provisioned?",
                )
            )

    # Verdicts.

    async def _settle(self, delivery: Delivery, verdict: Verdict, delay: float, reason: str) -> None:
        held = self._in_hand.get((delivery.sequence, self._names.subject(delivery.tail)))
        if held is None or held.delivery is not delivery:
            return
        if verdict == "nak":
            self._hand_back(held, delay)
            return
        if verdict == "term":
            try:
                await self._bury(self._letter(delivery, reason))
            except BaseException:
                delivery.settled = False  # or its place would stay taken
                raise
            self._counts["poison"] += 1
        self._counts["acked"] += verdict == "ack"
        self._end(held, b"+ACK" if verdict == "ack" else b"+TERM")

    def _letter(self, delivery: Delivery, reason: str) -> DeadLetter:
        envelope = delivery.envelope
        frame = codec.encode(
            delivery.message,
            run=envelope.run,
            role=envelope.role,
            instance=envelope.instance,
            ts=envelope.ts,
            attempt=envelope.attempt,
        )
        return DeadLetter(
            source=self._consumer.stream,
            sequence=delivery.sequence,
            subject=delivery.tail,
            reason=reason,
            attempts=delivery.attempt,
            frame=frame,
        )

    def _hand_back(self, held: _InHand, delay: float) -> None:
        """Nak once: a lost one ends with the lease, and a late second one could hit another's lease."""
        self._in_hand.pop(held.place, None)
        self._counts["naked"] += 1
        self._pull.wake()
        self._connection.write(held.reply, _nak(delay))

    def _end(self, held: _InHand, payload: bytes) -> None:
        self._in_hand.pop(held.place, None)
        self._finished[held.place] = None
        if len(self._finished) > _REMEMBERED:
            del self._finished[next(iter(self._finished))]
        self._pull.wake()
        self._write_verdict(self._note_verdict(held.place, held.reply, payload))

    def _note_verdict(self, place: _Place, reply: str, payload: bytes) -> str:
        self._serial += 1
        token = str(self._serial)
        self._verdicts[token] = _SentVerdict(place, reply, payload)
        return token

    def _repeat_verdict(self, place: _Place, reply: str) -> None:
        """Answer a redelivery of finished work: its verdict was lost on the way."""
        known = [verdict for verdict in self._verdicts.values() if verdict.place == place]
        for verdict in known:
            verdict.reply, verdict.due, verdict.tries = reply, 0.0, 0
        if not known:
            self._note_verdict(place, reply, b"+ACK")
        self._due.set()

    def _on_confirmed(self, message: Arrival) -> None:
        verdict = self._verdicts.pop(message.subject[len(self._prefix) :], None)
        if verdict is not None:
            self._finished.pop(verdict.place, None)
        if not self._verdicts:
            self._quiet.set()

    def _on_state(self) -> None:
        for verdict in self._verdicts.values():
            verdict.due, verdict.tries = 0.0, 0
        self._due.set()

    def _write_verdict(self, token: str) -> None:
        verdict = self._verdicts[token]
        if not self._connection.connected:
            return
        if verdict.tries >= _CONFIRM_TRIES:
            self._counts["unconfirmed"] += 1
            del self._verdicts[token]
            return
        verdict.tries += 1
        verdict.due = monotonic() + _CONFIRM_SECONDS
        self._connection.write(verdict.reply, verdict.payload, self._prefix + token)

    async def _confirm_again(self) -> None:
        while True:
            self._due = anyio.Event()
            now = monotonic()
            for token in [token for token, verdict in self._verdicts.items() if verdict.due <= now]:
                self._write_verdict(token)
            with anyio.move_on_after(_CONFIRM_SECONDS / 2):
                await self._due.wait()

    async def _keep_alive(self) -> None:
        """Renew the leases of the work in hand, well before they end."""
        while True:
            await anyio.sleep(min(PROGRESS_SECONDS, self._consumer.ack_seconds / 3))
            for held in self._in_hand.values():
                self._connection.write(held.reply, b"+WPI")


def _nak(delay: float) -> bytes:
    return b"-NAK" if delay <= 0 else b"-NAK " + msgspec.json.encode({"delay": int(delay * SECOND)})
