"""The guarantees of work queues, over NATS and in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import anyio
import anyio.lowlevel
import pytest
from bus_examples import request, summary, ticket
from bus_worlds import World, nothing_comes, take

from bus import Delivery
from bus.messages import DeadLetter
from bus.subjects import CONSUMERS

Worlds = Callable[[], AbstractAsyncContextManager[World]]


async def test_work_is_delivered_once_and_gone_when_acknowledged(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish_all(map(ticket, range(20)))
        seen = []
        async with w.bus.consume("designer", limit=8) as source:
            for _ in range(20):
                (delivery,) = await take(source, 1)
                assert delivery.attempt == 1
                assert delivery.tail == delivery.message.tail
                seen.append(delivery.message.slot)
                await delivery.ack()
            assert await nothing_comes(source)
        assert sorted(seen) == list(range(20))
        assert (await w.bus.stream_info("TASK")).messages == 0


async def test_no_more_than_limit_in_hand(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish_all(map(ticket, range(10)))
        async with w.bus.consume("designer", limit=3) as source:
            held = await take(source, 3)
            assert await nothing_comes(source)
            await held[1].ack()
            (more,) = await take(source, 1)
            assert more.message.slot == 3
            assert await nothing_comes(source)


async def test_each_consumer_gets_its_own_kind(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish_all([ticket(1), request(1), ticket(2)])
        async with w.bus.consume("agent", limit=10) as source:
            (delivery,) = await take(source, 1)
            assert delivery.message == request(1)
            await delivery.ack()
            assert await nothing_comes(source)


async def test_nak_brings_work_back_after_its_delay(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish(ticket(1))
        async with w.bus.consume("designer", limit=2) as source:
            (first,) = await take(source, 1)
            await first.nak()
            (second,) = await take(source, 1)
            assert second.attempt == 2
            start = anyio.current_time()
            await second.nak(0.3)
            (third,) = await take(source, 1)
            assert anyio.current_time() - start >= 0.29
            assert third.attempt == 3
            await third.ack()


async def test_a_second_verdict_does_nothing(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish(ticket(1))
        async with w.bus.consume("designer", limit=2) as source:
            (delivery,) = await take(source, 1)
            await delivery.ack()
            await delivery.nak()
            await delivery.term("too late")
            assert await nothing_comes(source)
        assert (await w.bus.stream_info("DLQ")).messages == 0


async def test_a_failing_worker_hands_work_back(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish(ticket(1))

        async def fail() -> None:
            async with w.bus.consume("designer", limit=1) as source:
                await take(source, 1)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        async with w.bus.consume("designer", limit=1) as source:
            assert (await take(source, 1))[0].attempt == 2


async def test_workers_share_a_queue(world: Worlds) -> None:
    async with world() as w, w.peer("tester", "two") as other:
        seen: list[int] = []

        async def work(source: AsyncIterator[Delivery]) -> None:
            async for delivery in source:
                seen.append(delivery.message.slot)
                await anyio.lowlevel.checkpoint()
                await delivery.ack()
                if len(seen) >= 60:
                    group.cancel_scope.cancel()

        async with w.bus.consume("designer", limit=4) as mine, other.consume("designer", limit=4) as theirs:
            with anyio.fail_after(15):
                async with anyio.create_task_group() as group:
                    group.start_soon(work, mine)
                    group.start_soon(work, theirs)
                    await w.bus.publish_all(map(ticket, range(60)))
        assert sorted(seen) == list(range(60))


async def test_given_up_work_becomes_a_dead_letter(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish(ticket(5))
        async with w.bus.consume("designer", limit=1) as source:
            (delivery,) = await take(source, 1)
            await delivery.term("no such skill")
        letters = [record async for record in w.bus.replay("DLQ")]
        assert [letter.tail for letter in letters] == ["dlq.task"]
        letter = letters[0].message
        assert isinstance(letter, DeadLetter)
        assert (letter.reason, letter.attempts, letter.sequence) == ("no such skill", 1, 1)
        assert letter.subject == ticket(5).tail
        assert (await w.bus.stream_info("TASK")).messages == 0


async def test_undecodable_work_is_put_aside(world: Worlds) -> None:
    async with world() as w:
        sequence = await w.inject("TASK", "task.designer.design.x", b"\xc1 garbage")
        await w.bus.publish(ticket(1))
        async with w.bus.consume("designer", limit=1) as source:
            (delivery,) = await take(source, 1)
            assert delivery.message == ticket(1)
            await delivery.ack()
        letter = (await w.bus.get("DLQ", 1)).frame
        assert letter == b"\xc1 garbage"
        assert sequence == 1
        assert (await w.bus.stream_info("TASK")).messages == 0


async def test_work_that_always_fails_becomes_poison(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish(ticket(1))
        most = CONSUMERS["designer"].attempts
        async with w.bus.consume("designer", limit=1) as source, w.bus.follow("DLQ") as letters:
            for attempt in range(1, most + 1):
                (delivery,) = await take(source, 1)
                assert delivery.attempt == attempt
                await delivery.nak()
            (record,) = await take(letters, 1)
        assert isinstance(record.message, DeadLetter)
        assert record.message.reason == "delivered too often"
        assert record.message.attempts == most
        assert (await w.bus.stream_info("TASK")).messages == 0


async def test_a_full_task_stream_makes_publishers_wait(world: Worlds) -> None:
    async with world() as w, w.peer("tester", "two") as other:
        await w.limit_tasks(3)
        stored: list[int] = []

        async def produce() -> None:
            stored.extend(await w.bus.publish_all(map(ticket, range(12))))

        async with anyio.create_task_group() as group:
            group.start_soon(produce)
            await anyio.sleep(0.3)
            assert not stored
            assert (await w.bus.stream_info("TASK")).messages == 3
            assert await w.bus.publish(summary(1)) == 1
            seen = set()
            async with other.consume("designer", limit=2) as source:
                for _ in range(12):
                    (delivery,) = await take(source, 1)
                    seen.add(delivery.message.slot)
                    await delivery.ack()
        assert seen == set(range(12))
        assert sorted(stored) == list(range(1, 13))


async def test_a_momentary_limit_bounds_what_is_taken(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish_all(map(ticket, range(10)))
        now = 2
        async with w.bus.consume("designer", limit=8, now=lambda: now) as source:
            held = await take(source, 2)
            assert await nothing_comes(source)
            now = 5
            await held[0].ack()
            held += await take(source, 4)
            assert await nothing_comes(source)
            now = 1
            await held[1].ack()
            assert await nothing_comes(source)


async def test_a_limit_of_nothing_leaves_to_others_what_was_asked_for(world: Worlds) -> None:
    async with world() as w, w.peer("designer", "two") as other:
        now = 8
        async with w.bus.consume("designer", limit=8, now=lambda: now) as mine:
            await w.bus.publish(ticket(0))
            (held,) = await take(mine, 1)
            now = 0
            await w.bus.publish_all(map(ticket, range(1, 13)))
            async with other.consume("designer", limit=16) as theirs:
                for delivery in await take(theirs, 12):
                    assert delivery.attempt <= 2
                    await delivery.ack()
            await held.ack()
            now = 8
            await w.bus.publish(ticket(20))
            (again,) = await take(mine, 1)
            assert again.message == ticket(20)


@pytest.mark.slow
async def test_what_was_asked_for_before_a_limit_fell_goes_to_another(world: Worlds) -> None:
    async with world() as w, w.peer("designer", "two") as other:
        now = 64
        async with w.bus.consume("designer", limit=64, now=lambda: now) as mine:
            await w.bus.publish(ticket(0))
            (held,) = await take(mine, 1)
            now = 1
            await held.ack()
            await anyio.sleep(2.5)  # the heartbeat by which an idle consumer looks at its limit again
            async with other.consume("designer", limit=64) as theirs:
                await w.bus.publish_all(map(ticket, range(1, 41)))
                await take(theirs, 35)
                for delivery in await take(mine, 1):
                    await delivery.ack()
