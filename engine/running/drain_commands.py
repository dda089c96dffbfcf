"""Drain, pause and resume commands to the roles of a run.

A command is a fact in the stream EVENT, so it is as durable as the work that it concerns: a role that was
disconnected when the command was given reads it afterwards. A role that starts reads the last command to
learn whether the run still goes on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import anyio
import structlog

from bus import Bus
from bus.messages import Message, RunOrdered

Command = Literal["drain", "resume", "pause"]


class Standing(NamedTuple):
    """The state that the commands so far leave a run in.

    ``drains`` is true when the run drains, or has drained and was not resumed. ``start`` is the sequence in
    EVENT at which further commands begin.
    """

    drains: bool
    start: int


async def give(bus: Bus, command: Command, roles: Sequence[str] = (), *, closing: bool = False) -> int:
    """Store a command to ``roles`` (all when empty) and return its sequence in EVENT.

    ``closing`` announces that the other roles will follow: a role that starts afterwards does no work.
    Raises BusError.
    """
    names = tuple(roles)
    return await bus.publish(
        RunOrdered(command=command, at=time.time_ns(), roles=names, closing=closing or not names)
    )


async def standing(bus: Bus) -> Standing:
    """Return the state for a role that starts now.

    Commands to single roles do not concern it: a drain of those that go on elsewhere, a pause.
    Raises BusError.
    """
    held = Standing(drains=False, start=1)
    async for record in bus.replay("EVENT", tails=(RunOrdered.tail_form,)):
        order, start = record.message, record.sequence + 1
        if isinstance(order, RunOrdered) and order.closing:
            held = Standing(order.command == "drain", start)
        else:
            held = Standing(held.drains, start)
    return held


def drains(message: Message, role: str) -> bool:
    """Return whether ``message`` drains ``role``; the role "" stands for the whole run."""
    if not isinstance(message, RunOrdered) or message.command != "drain":
        return False
    return not message.roles or role in message.roles


async def heed(
    bus: Bus, role: str, draining: anyio.Event, *, start: int, log: structlog.stdlib.BoundLogger
) -> None:
    """Set ``draining`` when a command from sequence ``start`` on drains ``role`` ("": the whole run).

    Runs until it is cancelled. Raises BusError.
    """
    async with bus.follow("EVENT", start=start, tails=(RunOrdered.tail_form,)) as records:
        async for record in records:
            if drains(record.message, role) and not draining.is_set():
                log.info("drain.ordered", sequence=record.sequence)
                draining.set()
