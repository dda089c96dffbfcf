"""A role of your own: message kinds and a queue that this package does not know."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import ClassVar

import anyio
import msgspec
import pytest
from bus_examples import summary, ticket
from bus_worlds import TOKEN, World, nats_world, nothing_comes, take

from bus import BusError, Undecodable, codec, connect, provision
from bus.messages import DesignTicket, Message, register_message

Worlds = Callable[[], AbstractAsyncContextManager[World]]


@register_message
class Counted(Message, frozen=True, kw_only=True, tag="counted.v1"):
    """A fact of the role ``counter``."""

    number: int

    @property
    def key(self) -> str:
        return f"counted:{self.number}"

    @property
    def tail(self) -> str:
        return "event.counter.counted"


@register_message
class CountOrder(Message, frozen=True, kw_only=True, tag="count_order.v1"):
    """Work for the role ``counter``."""

    stream: ClassVar[str] = "TASK"
    number: int

    @property
    def key(self) -> str:
        return f"count:{self.number}"

    @property
    def tail(self) -> str:
        return f"task.counter.count.{self.number}"


class Unregistered(Counted, frozen=True, kw_only=True, tag="unregistered.v1"):
    """A kind that its author forgot to register."""


def stranger(kind: str = "weighed.v1") -> tuple[str, bytes]:
    """Return tail and frame of a fact whose class no reader of this process has."""
    parts = msgspec.msgpack.decode(codec.encode(Counted(number=1), run="r", role="scale", instance="1"))
    parts[1] = parts[7]["kind"] = kind
    return "event.scale.weighed", msgspec.msgpack.encode(parts)


async def test_a_kind_of_your_own_is_stored_followed_and_got(world: Worlds) -> None:
    async with world() as w:
        counted = [Counted(number=number) for number in range(3)]
        assert await w.bus.publish_all(counted) == [1, 2, 3]
        async with w.bus.follow("EVENT") as source:
            assert [record.message for record in await take(source, 3)] == [
                Counted(number=n) for n in range(3)
            ]
        assert await w.bus.get("EVENT", 2) == Counted(number=1)
        assert [record.message async for record in w.bus.replay("EVENT", start=3)] == [Counted(number=2)]
        last = await w.bus.last("event.counter.counted")
        assert last is not None
        assert last.message == Counted(number=2)


@pytest.mark.parametrize("kind", ["weighed.v1", "round_summary.v9", "counted.v2"])
async def test_a_fact_of_an_unknown_kind_is_passed_over_and_not_buried(world: Worlds, kind: str) -> None:
    async with world() as w:
        await w.bus.publish(summary(1))
        await w.inject("EVENT", *stranger(kind))
        await w.bus.publish(summary(2))
        async with w.bus.follow("EVENT") as source:
            assert [record.sequence for record in await take(source, 2)] == [1, 3]
            assert await nothing_comes(source)
        assert [record.sequence async for record in w.bus.replay("EVENT")] == [1, 3]
        assert (await w.bus.stream_info("DLQ")).messages == 0
        with pytest.raises(Undecodable, match=kind.replace(".", "[.]")):
            await w.bus.get("EVENT", 2)


async def test_work_of_an_unknown_kind_becomes_a_dead_letter(world: Worlds) -> None:
    async with world() as w:
        await w.inject("TASK", "task.designer.design.odd", stranger()[1])
        await w.bus.publish(ticket(1))
        async with w.bus.consume("designer", limit=1) as work:
            assert (await take(work, 1))[0].message == ticket(1)
        assert (await w.bus.stream_info("DLQ")).messages == 1


@pytest.mark.parametrize("many", [False, True])
async def test_a_class_that_is_not_registered_is_refused_on_publish(world: Worlds, many: bool) -> None:
    async with world() as w:
        message = Unregistered(number=1)
        with pytest.raises(BusError, match=r"Unregistered is not registered.*register_message"):
            await (w.bus.publish_all([message]) if many else w.bus.publish(message))
        assert (await w.bus.stream_info("EVENT")).messages == 0


def test_a_tag_has_a_form_and_one_owner() -> None:
    class Odd(Counted, frozen=True, kw_only=True, tag="Odd Kind"):
        pass

    class Copy(Counted, frozen=True, kw_only=True, tag="design_ticket.v1"):
        pass

    with pytest.raises(BusError, match=r"tag 'Odd Kind'.*name\.v1"):
        register_message(Odd)
    with pytest.raises(BusError, match=r"design_ticket\.v1 is registered by bus\.messages"):
        register_message(Copy)
    assert register_message(DesignTicket) is DesignTicket


async def test_a_role_of_your_own_has_a_queue_of_its_own(nats_url: str) -> None:
    run = "extension-queue"
    await provision(nats_url, run=run, token=TOKEN, store_gb=0.25, roles=["scorer", "counter", "designer"])
    joining = {"run": run, "role": "counter", "instance": "1", "token": TOKEN}
    async with connect(nats_url, **joining) as bus, bus.consume("counter", limit=2) as work:
        await bus.publish_all([CountOrder(number=1), ticket(1), CountOrder(number=2)])
        deliveries = await take(work, 2)
        assert [delivery.message for delivery in deliveries] == [CountOrder(number=1), CountOrder(number=2)]
        for delivery in deliveries:
            await bus.publish(Counted(number=delivery.message.number))
            await delivery.ack()
        assert await nothing_comes(work)


async def test_a_queue_that_does_not_exist_is_an_error_at_once(nats_url: str) -> None:
    async with nats_world(nats_url) as w, w.peer("counter", "1") as bus:
        with anyio.fail_after(5), pytest.raises(BusError, match=r"no queue counter.*run\.roles"):
            async with bus.consume("counter", limit=1):
                pass
