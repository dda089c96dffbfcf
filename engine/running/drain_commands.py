"""Orders to the roles of a run: drain, resume.

They are facts of the stream EVENT, so an order is as durable as the work it is about: a role that is
reconnecting when it is given, or whose broker is away, reads it afterwards. For a role that starts, the last
one says whether there is still a run to work for. What only listens (strangers' roles) is told on
``ctl.all`` as well, once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import anyio
import structlog

from bus import Bus
from bus.messages import Control, Message, RunOrdered

TAIL = "event.supervisor.ordered"

Command = Literal["drain", "resume"]


class Standing(NamedTuple):
    """Whether the run drains (or has drained, and was not resumed), and the sequence of EVENT from which on
    further orders come.
    """

    drains: bool
    start: int


async def give(bus: Bus, command: Command, roles: Sequence[str] = (), *, closing: bool = False) -> int:
    """Order ``roles``, all when empty, and return the order's sequence in EVENT, when it is stored.

    ``closing`` says that the others' turn will come: who starts from now on does nothing. Raises BusError.
    """
    names = tuple(roles)
    sequence = await bus.publish(
        RunOrdered(command=command, at=time.time_ns(), roles=names, closing=closing or not names)
    )
    await bus.publish(Control(command=command, roles=names))
    return sequence


async def standing(bus: Bus) -> Standing:
    """Return what holds for a role that starts now. That roles were drained alone, to go on elsewhere, holds
    for nobody who starts. Raises BusError.
    """
    held = Standing(drains=False, start=1)
    async for record in bus.replay("EVENT", tails=(TAIL,)):
        order, start = record.message, record.sequence + 1
        if isinstance(order, RunOrdered) and (order.closing or order.command == "resume"):
            held = Standing(order.command == "drain", start)
        else:
            held = Standing(held.drains, start)
    return held


def drains(message: Message, role: str) -> bool:
    """Whether ``message`` orders a drain of ``role``; the role "" stands for the whole run."""
    if not isinstance(message, RunOrdered) or message.command != "drain":
        return False
    return not message.roles or role in message.roles


async def heed(
    bus: Bus, role: str, draining: anyio.Event, *, start: int, log: structlog.stdlib.BoundLogger
) -> None:
    """Set ``draining`` when an order from sequence ``start`` on drains ``role`` ("": the whole run).

    Runs for ever. Raises BusError.
    """
    async with bus.follow("EVENT", start=start, tails=(TAIL,)) as records:
        async for record in records:
            if drains(record.message, role) and not draining.is_set():
                log.info("drain.ordered", sequence=record.sequence)
                draining.set()
