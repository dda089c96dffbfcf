"""Publishing stored messages again, under the ids they were stored with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import msgspec

from bus import NatsBus
from bus.codec import claim_in
from bus.errors import Forgotten
from bus.reads import Stored
from engine.busview.show import View
from engine.running import drain_commands


class Sent(msgspec.Struct, kw_only=True):
    """``stored`` are new at the target, ``known`` it had already; ``last`` is the last source sequence
    that is safely there.
    """

    stored: int = 0
    known: int = 0
    bytes: int = 0
    last: int = 0


def id_of(run: str, stream: str, stored: Stored, seen: View) -> str:
    """Return the id to publish a stored message under: its own, always the same one otherwise."""
    return stored.id or seen.id or f"replay:{run}:{stream}:{stored.sequence}"


async def send_again(
    messages: AsyncIterator[tuple[Stored, View]],
    source: NatsBus,
    target: NatsBus,
    stream: str,
    sent: Sent,
    told: Callable[[Sent], None],
) -> None:
    """Publish ``messages`` of ``stream`` one after the other, each acknowledged, so that their order is
    kept and an interruption leaves no gap. ``sent`` counts as it goes. Orders are left out: a drain of then
    is none of now.

    Raises BusError when the target refuses one, or has no room for it.
    """
    async for stored, seen in messages:
        if stored.tail == drain_commands.TAIL:
            continue
        if claim_in(stored.frame) is not None:
            # Its body lies in a blob: it is put into one of the target's, with the message.
            try:
                await target.publish(await source.get(stream, stored.sequence))
            except Forgotten:
                continue
            duplicate = False
        else:
            answer = await target.publisher.send(
                target.names.stream(stream),
                target.names.subject(stored.tail),
                stored.frame,
                {},
                message_id=id_of(source.run, stream, stored, seen),
            )
            duplicate = answer.duplicate
        if duplicate:
            sent.known += 1
        else:
            sent.stored += 1
            sent.bytes += len(stored.frame)
        sent.last = stored.sequence
        told(sent)
