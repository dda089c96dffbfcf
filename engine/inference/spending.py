"""What a run may pay for the answers of an endpoint, over all its lives and hosts.

A request reserves the most that it may cost before it is sent, so requests that are on their way together
stay below the limit too. What was paid is kept in a ledger outside of the process: one that is started again
knows what those before it have spent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

import anyio
import structlog

from bus import BusError, Conflict
from engine.errors import SpadeError

if TYPE_CHECKING:
    from bus import Bus
    from engine.config import EndpointConfig as Settings

# Code and prose take three to four bytes a token; what a request reserves is more than that.
_BYTES_RESERVED, _BYTES_COUNTED = 2, 3
_MILLION = 1e6
_SETTLE_SECONDS = 10.0

log = structlog.get_logger("spade.endpoint")


class EndpointSpent(SpadeError):
    """The run has paid for an endpoint what it may pay: nothing more is asked."""


class Ledger(Protocol):
    """Keeps a sum that several processes add to."""

    async def add(self, amount: float) -> float:
        """Add to the sum and return it."""


class InMemory:
    """The ledger of one process."""

    def __init__(self) -> None:
        self._sum = 0.0

    async def add(self, amount: float) -> float:
        """Add to the sum and return it."""
        self._sum += amount
        return self._sum


class OnBus:
    """The ledger of a run, under ``key`` of its state bucket. Raises BusError."""

    def __init__(self, bus: Bus, key: str) -> None:
        self._bus, self._key = bus, key

    async def add(self, amount: float) -> float:
        """Add to the sum and return it; nothing is written for an amount of 0."""
        while True:
            found = await self._bus.state_get(self._key)
            revision, value = found or (0, b"0")
            total = float(value) + amount
            if not amount:
                return total
            try:
                await self._bus.state_update(self._key, repr(total).encode(), revision)
            except Conflict:
                continue  # another host has paid meanwhile
            return total


class Bill:
    """One request: what was reserved for it, and what it came to. An answer that was not seen may have been
    made and charged all the same, so it counts like the others.
    """

    def __init__(self, reserved: float) -> None:
        self.reserved = reserved
        self.cost = 0.0
        self.sent = self.answered = False


class Purse:
    """Pays for the requests of one endpoint. With ``max_cost`` 0 it only counts."""

    def __init__(self, settings: Settings, ledger: Ledger | None = None) -> None:
        self._settings, self._ledger = settings, ledger or InMemory()
        self._spent = self._reserved = self._owed = 0.0
        self._open = 0
        self._answers, self._cost, self._unseen = 0, 0.0, 0.0
        self._settled = anyio.Condition()

    @asynccontextmanager
    async def paying(self, body: bytes, most_tokens: int) -> AsyncIterator[Bill]:
        """Pay for the request in this context; its answer is told to :meth:`count`.

        Waits while the rest of the money is reserved for others. Raises EndpointSpent when this request
        could cost more than is left, BusError when the ledger cannot be read or written.
        """
        bill = Bill(self._price(len(body) / _BYTES_RESERVED, most_tokens))
        await self._reserve(bill)
        try:
            yield bill
        finally:
            # Cancelled or not, what was asked for is paid: it must reach the ledger.
            with anyio.CancelScope(shield=True), anyio.move_on_after(_SETTLE_SECONDS):
                await self._settle(bill)

    def count(self, bill: Bill, body: bytes, text: str, tokens: tuple[int, int]) -> None:
        """Note the answer to a request. ``tokens`` in and out are estimated where they are 0: not told."""
        asked, written = tokens
        asked_for = asked or len(body) / _BYTES_COUNTED
        bill.cost = self._price(asked_for, written or len(text.encode()) / _BYTES_COUNTED)
        bill.answered = True

    def statistics(self) -> dict[str, float]:
        """``cost`` of the answers of this process, ``cost_unseen`` of those that never came; with a limit,
        ``spent`` by the whole run and what is ``left``.
        """
        found = {"cost": self._cost, "cost_unseen": self._unseen}
        if self._settings.max_cost:
            found |= {"spent": self._spent, "left": max(0.0, self._settings.max_cost - self._spent)}
        return found

    def _price(self, tokens_in: float, tokens_out: float) -> float:
        return (tokens_in * self._settings.price_in + tokens_out * self._settings.price_out) / _MILLION

    async def _reserve(self, bill: Bill) -> None:
        if not self._settings.max_cost:
            return
        async with self._settled:
            await self._enter()
            while self._short(bill) and self._open:
                await self._settled.wait()
            if self._short(bill):
                raise self._exhausted(bill)
            self._open += 1
            self._reserved += bill.reserved

    def _short(self, bill: Bill) -> bool:
        taken = self._spent + self._owed + self._reserved
        return taken + bill.reserved > self._settings.max_cost

    async def _settle(self, bill: Bill) -> None:
        if bill.sent and not bill.answered:
            bill.cost = self._cost / self._answers if self._answers else bill.reserved
            self._unseen += bill.cost
        elif bill.answered:
            self._answers += 1
            self._cost += bill.cost
        if not self._settings.max_cost:
            return
        async with self._settled:
            self._open -= 1
            self._reserved = self._reserved - bill.reserved if self._open else 0.0
            self._owed += bill.cost
            self._settled.notify_all()
            try:
                await self._enter()
            except BusError as error:
                log.warning("cost_not_entered", owed=self._owed, why=str(error))

    async def _enter(self) -> None:
        """Enter what is owed into the ledger, and read what all have spent."""
        owed = self._owed
        self._spent = await self._ledger.add(owed)
        self._owed -= owed

    def _exhausted(self, bill: Bill) -> EndpointSpent:
        settings, spent = self._settings, self._spent + self._owed
        return EndpointSpent(
            f"The run has spent {spent:.2f} on the endpoint {settings.base_url} ({settings.model}), another "
            f"request may cost {bill.reserved:.2f}, and max_cost is {settings.max_cost:g}.",
            where="designer.external.max_cost",
            remedy="Raise it and run the same command again: the run goes on where it stopped. Or go on "
            'with designer.kind="policy" (hint_writer="self").',
        )
