"""The guarantees of streams, state and leases, over NATS and in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import anyio
import anyio.lowlevel
import pytest
from bus_examples import example, summary, ticket
from bus_worlds import World, nothing_comes, take

from bus import BusError, BusUnavailable, Conflict, NotFound, Record, Undecodable
from bus.messages import DeadLetter, EpisodeSample, Heartbeat, RoundClosed

Worlds = Callable[[], AbstractAsyncContextManager[World]]


async def test_publish_stores_once_and_says_where(world: Worlds) -> None:
    async with world() as w:
        assert await w.bus.publish(summary(1)) == 1
        assert await w.bus.publish(summary(2)) == 2
        assert await w.bus.publish(summary(1)) == 1
        assert await w.bus.publish(ticket(1)) == 1
        info = await w.bus.stream_info("EVENT")
        assert (info.first, info.last, info.messages) == (1, 2, 2)
        assert info.bytes > 0


async def test_publish_all_is_windowed_and_ordered(world: Worlds) -> None:
    async with world() as w:
        assert await w.bus.publish_all(map(summary, range(700))) == list(range(1, 701))
        rounds = [record.message.round async for record in w.bus.replay("EVENT")]
        assert rounds == list(range(700))
        assert await w.bus.publish_all([]) == []


async def test_records_know_their_sender(world: Worlds) -> None:
    async with world() as w, w.peer("scorer", "host-1") as scorer:
        await scorer.publish(summary(3))
        record = await w.bus.last("event.scorer.round")
        assert record is not None
        envelope = record.envelope
        assert (envelope.role, envelope.instance, envelope.run) == ("scorer", "host-1", w.bus.run)
        assert envelope.ts > 1_600_000_000_000_000_000


async def test_follow_reads_what_is_there_and_what_comes(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish_all(map(summary, range(5)))
        async with w.bus.follow("EVENT", start=3) as source:
            assert [record.sequence for record in await take(source, 3)] == [3, 4, 5]
            assert await nothing_comes(source)
            await w.bus.publish_all(map(summary, range(5, 8)))
            records = await take(source, 3)
            assert [record.sequence for record in records] == [6, 7, 8]
            assert [record.message for record in records] == [summary(5), summary(6), summary(7)]


async def test_follow_reads_far_more_than_it_buffers(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish_all(map(summary, range(1100)))
        async with w.bus.follow("EVENT") as source:
            assert [record.sequence for record in await take(source, 1100)] == list(range(1, 1101))


async def test_follow_filters_by_tail(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish_all([sample(1), closed(1), sample(2), closed(2)])
        async with w.bus.follow("SAMPLE", tails=["sample.credit.>"]) as source:
            assert [record.message for record in await take(source, 2)] == [closed(1), closed(2)]
        async with w.bus.follow("SAMPLE", tails=["sample.agent.>", "sample.credit.>"]) as source:
            assert [record.sequence for record in await take(source, 4)] == [1, 2, 3, 4]


def sample(number: int) -> EpisodeSample:
    return example(EpisodeSample, episode=f"e{number}")


def closed(number: int) -> RoundClosed:
    return example(RoundClosed, round=number)


async def test_follow_skips_and_keeps_what_it_cannot_read(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish(summary(1))
        await w.inject("EVENT", "event.future.kind", b"\x93\x07\x08\x09")
        await w.bus.publish(summary(2))
        async with w.bus.follow("EVENT") as source, w.bus.follow("DLQ") as letters:
            assert [record.sequence for record in await take(source, 2)] == [1, 3]
            (record,) = await take(letters, 1)
            letter = record.message
            assert isinstance(letter, DeadLetter)
            assert (letter.source, letter.sequence, letter.subject) == ("EVENT", 2, "event.future.kind")
            assert letter.frame == b"\x93\x07\x08\x09"
            figures = w.bus.statistics()
            assert sum(value for name, value in figures.items() if name.endswith("undecodable")) == 1


async def test_a_position_beyond_the_end_is_loss_not_patience(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish_all(map(summary, range(3)))
        with pytest.raises(BusError, match="ends at 3, but was read up to 9"):
            async with w.bus.follow("EVENT", start=10):
                pass
        with pytest.raises(BusError, match="ends at 3"):
            _ = [record async for record in w.bus.replay("EVENT", start=5)]
        async with w.bus.follow("EVENT", start=4) as source:
            await w.bus.publish(summary(9))
            assert (await take(source, 1))[0].sequence == 4


async def test_follow_starts_at_what_a_purge_left(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish_all(map(summary, range(5)))
        assert await w.bus.purge("EVENT", below=4) == 3
        async with w.bus.follow("EVENT") as source:
            assert [record.sequence for record in await take(source, 2)] == [4, 5]


async def test_replay_ends_where_the_stream_ended(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish_all(map(summary, range(4)))
        seen: list[Record] = []
        async for record in w.bus.replay("EVENT", start=2):
            seen.append(record)
            await w.bus.publish(summary(100 + record.sequence))
        assert [record.sequence for record in seen] == [2, 3, 4]
        assert [record async for record in w.bus.replay("SAMPLE")] == []


async def test_replay_merges_filters_in_order(world: Worlds) -> None:
    async with world() as w:
        kinds = itertools.cycle([sample, closed])
        await w.bus.publish_all([make(number) for number, make in zip(range(600), kinds, strict=False)])
        records = [r async for r in w.bus.replay("SAMPLE", tails=["sample.credit.>", "sample.agent.>"])]
        assert [record.sequence for record in records] == list(range(1, 601))
        only = [r async for r in w.bus.replay("SAMPLE", start=11, tails=["sample.credit.>"])]
        assert [record.sequence for record in only] == list(range(12, 601, 2))


async def test_get_and_last(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish_all([summary(1), summary(2)])
        assert await w.bus.get("EVENT", 1) == summary(1)
        record = await w.bus.last("event.scorer.round")
        assert record is not None
        assert (record.sequence, record.message) == (2, summary(2))
        assert await w.bus.last("event.nobody.said") is None
        with pytest.raises(NotFound):
            await w.bus.get("EVENT", 3)
        await w.bus.purge("EVENT", below=2)
        with pytest.raises(NotFound):
            await w.bus.get("EVENT", 1)
        sequence = await w.inject("EVENT", "event.odd.one", b"odd")
        with pytest.raises(Undecodable):
            await w.bus.get("EVENT", sequence)


async def test_purge_by_position_and_by_tail(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish_all([sample(1), closed(1), sample(2), closed(2)])
        assert await w.bus.purge("SAMPLE", below=1) == 0
        assert await w.bus.purge("SAMPLE", below=4, tail="sample.agent.>") == 2
        assert await w.bus.purge("SAMPLE", below=4) == 1
        info = await w.bus.stream_info("SAMPLE")
        assert (info.first, info.last, info.messages) == (4, 4, 1)
        assert await w.bus.purge("SAMPLE") == 1
        info = await w.bus.stream_info("SAMPLE")
        assert (info.first, info.last, info.messages) == (5, 4, 0)


async def test_state_is_compared_and_set(world: Worlds) -> None:
    async with world() as w, w.peer("tester", "two") as other:
        assert await w.bus.state_get("config") is None
        first = await w.bus.state_put("config", b"one")
        assert await other.state_get("config") == (first, b"one")
        second = await other.state_update("config", b"two", first)
        assert second > first
        with pytest.raises(Conflict):
            await w.bus.state_update("config", b"three", first)
        with pytest.raises(Conflict):
            await w.bus.state_update("config", b"three", 0)
        assert await w.bus.state_get("config") == (second, b"two")
        created = await w.bus.state_update("roles/learner.fence", b"", 0)
        assert await w.bus.state_get("roles/learner.fence") == (created, b"")
        with pytest.raises(BusError):
            await w.bus.state_put("no spaces", b"")


async def test_one_of_many_writers_wins(world: Worlds) -> None:
    async with world() as w:
        revision = await w.bus.state_put("count", b"0")
        outcomes: list[bool] = []

        async def write() -> None:
            try:
                await w.bus.state_update("count", b"1", revision)
            except Conflict:
                outcomes.append(False)
            else:
                outcomes.append(True)

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(write)
        assert outcomes.count(True) == 1


async def test_a_lease_has_one_holder_and_growing_revisions(world: Worlds) -> None:
    async with world() as w, w.peer("tester", "two") as other:
        async with w.bus.lease("leader.learner", ttl=1.0) as first:
            with pytest.raises(BusUnavailable, match=r"held by tester/one"):
                async with other.lease("leader.learner", ttl=1.0, wait=0.2):
                    pass
            async with other.lease("leader.scorer", ttl=1.0):
                assert not first.lost.is_set()
        start = anyio.current_time()
        async with other.lease("leader.learner", ttl=1.0) as second:
            assert anyio.current_time() - start < 0.9
            assert second.revision > first.revision


async def test_a_held_lease_outlives_its_ttl(world: Worlds) -> None:
    async with (
        world() as w,
        w.peer("tester", "two") as other,
        w.bus.lease("leader.x", ttl=1.0) as lease,
    ):
        with pytest.raises(BusUnavailable):
            async with other.lease("leader.x", ttl=1.0, wait=1.4):
                pass
        assert not lease.lost.is_set()


async def test_a_lost_lease_says_so(world: Worlds) -> None:
    async with world() as w, w.peer("tester", "two") as other, w.bus.lease("leader.x", ttl=1.0) as old:
        await w.break_lease("leader.x")
        async with other.lease("leader.x", ttl=1.0) as new:
            with anyio.fail_after(3):
                await old.lost.wait()
            assert new.revision > old.revision
            assert not new.lost.is_set()


async def test_messages_without_stream_reach_those_who_listen(world: Worlds) -> None:
    async with world() as w, w.peer("tester", "two") as other:
        beat = example(Heartbeat)
        assert await w.bus.publish(beat) == 0
        await w.bus.stream_info("EVENT")
        async with other.listen("hb.>") as source:
            await w.bus.publish(beat)
            (message,) = await take(source, 1)
            assert message == beat
            assert await nothing_comes(source)


async def test_what_does_not_exist_is_named(world: Worlds) -> None:
    async with world() as w:
        with pytest.raises(BusError, match="unknown stream 'NOPE'"):
            await w.bus.stream_info("NOPE")
        with pytest.raises(BusError, match="unknown consumer 'nobody'"):
            async with w.bus.consume("nobody", limit=1):
                pass
        with pytest.raises(BusError, match="takes no work"):
            async with w.bus.consume("agent", limit=0):
                pass
        with pytest.raises(BusError, match="work queue"):
            async with w.bus.follow("TASK"):
                pass
        with pytest.raises(BusError, match="no stream holds"):
            await w.bus.last("nowhere.at.all")


async def test_statistics_are_numbers(world: Worlds) -> None:
    async with world() as w:
        await w.bus.publish(summary(1))
        async with w.bus.consume("agent", limit=2), w.bus.follow("EVENT") as source:
            await take(source, 1)
            figures = w.bus.statistics()
        assert figures
        assert sum(value for name, value in figures.items() if name.endswith("stored")) == 1
