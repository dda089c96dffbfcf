"""The budget of a run for an endpoint.

A request reserves the most that it may cost before it is sent, so requests in flight together stay within the
budget too. The sum lies in the run's state bucket: a restarted process, or one on another host, continues it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import structlog

from bus import BusError, Conflict
from engine.errors import SpadeError

if TYPE_CHECKING:
    from bus import Bus
    from engine.config import EndpointConfig

# Code and prose have three to four bytes per token; a reservation assumes fewer.
_BYTES_RESERVED, _BYTES_COUNTED = 2, 3
_MILLION = 1e6
_SETTLE_SECONDS = 10.0

Add = Callable[[float], Awaitable[float]]
"""Adds an amount to the sum of the run and returns the sum; an amount of 0 only reads. Raises BusError."""

log = structlog.get_logger("spade.endpoint")


class EndpointSpent(SpadeError):
    """The budget of the run for an endpoint is spent; no further request is sent."""


def run_total(bus: Bus, key: str) -> Add:
    """Return the sum of all processes of a run, kept under ``key`` of its state bucket."""

    async def add(amount: float) -> float:
        while True:
            revision, value = await bus.state_get(key) or (0, b"0")
            total = float(value) + amount
            if not amount:
                return total
            try:
                await bus.state_update(key, repr(total).encode(), revision)
            except Conflict:
                continue  # another host has added meanwhile
            return total

    return add


@dataclass
class Charge:
    """The price of one request: ``reserved`` before the answer, ``cost`` once it is known.

    A request that was ``sent`` and not answered may have been charged, so it counts with its reservation.
    """

    reserved: float
    cost: float | None = None
    sent: bool = False


class EndpointBudget:
    """Pays for the requests of one endpoint. With ``max_cost`` 0 it only counts."""

    def __init__(self, settings: EndpointConfig, add: Add | None = None) -> None:
        self._settings, self._add = settings, add or self._add_here
        self._here = self._spent = self._reserved = self._owed = 0.0
        self._cost = self._unseen = 0.0
        self._open = 0
        self._settled = anyio.Condition()

    @asynccontextmanager
    async def request(self, body: bytes, most_tokens: int) -> AsyncIterator[Charge]:
        """Pay for the request in this context, whose answer is passed to :meth:`count`.

        Waits while the rest of the budget is reserved. Raises EndpointSpent when the request could cost more
        than is left, BusError when the run's sum cannot be read.
        """
        charge = Charge(self._price(len(body) / _BYTES_RESERVED, most_tokens))
        if self._settings.max_cost:
            await self._reserve(charge)
        try:
            yield charge
        finally:
            # A request that was sent is paid for, also when it is cancelled.
            with anyio.CancelScope(shield=True), anyio.move_on_after(_SETTLE_SECONDS):
                await self._settle(charge)

    def count(self, charge: Charge, body: bytes, text: str, tokens: tuple[int, int]) -> None:
        """Note the answer to a request; ``tokens`` in and out are estimated where they are 0 (not given)."""
        tokens_in = tokens[0] or len(body) / _BYTES_COUNTED
        charge.cost = self._price(tokens_in, tokens[1] or len(text.encode()) / _BYTES_COUNTED)

    def statistics(self) -> dict[str, float]:
        """Return the ``cost`` of this process's answers, and ``cost_unseen`` of those that never came.

        With a limit also the whole run's ``spent`` and ``left``.
        """
        found = {"cost": self._cost, "cost_unseen": self._unseen}
        if self._settings.max_cost:
            found |= {"spent": self._spent, "left": max(0.0, self._settings.max_cost - self._spent)}
        return found

    def _price(self, tokens_in: float, tokens_out: float) -> float:
        return (tokens_in * self._settings.price_in + tokens_out * self._settings.price_out) / _MILLION

    async def _add_here(self, amount: float) -> float:
        self._here += amount
        return self._here

    async def _reserve(self, charge: Charge) -> None:
        def short() -> bool:
            taken = self._spent + self._owed + self._reserved
            return taken + charge.reserved > self._settings.max_cost

        async with self._settled:
            await self._pay()
            while short() and self._open:
                await self._settled.wait()
            if short():
                raise self._exhausted(charge)
            self._open += 1
            self._reserved += charge.reserved

    async def _settle(self, charge: Charge) -> None:
        unseen = charge.reserved if charge.sent and charge.cost is None else 0.0
        self._cost += charge.cost or 0.0
        self._unseen += unseen
        if not self._settings.max_cost:
            return
        async with self._settled:
            self._open -= 1
            self._reserved = self._reserved - charge.reserved if self._open else 0.0
            self._owed += unseen + (charge.cost or 0.0)
            self._settled.notify_all()
            try:
                await self._pay()
            except BusError as error:
                log.warning("cost_not_recorded", owed=self._owed, why=str(error))

    async def _pay(self) -> None:
        """Add what this process owes to the run's sum, and read the sum."""
        owed = self._owed
        self._spent = await self._add(owed)
        self._owed -= owed

    def _exhausted(self, charge: Charge) -> EndpointSpent:
        settings, spent = self._settings, self._spent + self._owed
        return EndpointSpent(
            f"The run has spent {spent:.2f} on the endpoint {settings.base_url} ({settings.model}), another "
            f"request may cost {charge.reserved:.2f}, and max_cost is {settings.max_cost:g}.",
            where="designer.external.max_cost",
            remedy="Raise it and run the same command again: the run continues where it stopped. Or continue "
            'with designer.kind="policy" (hint_writer="self").',
        )
