"""The bus against a hostile world: cancellation and lost connections at every moment, servers that end."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from bus_examples import summary, ticket
from bus_trouble import RUN, kill, over_nats, rejected, served, until, use
from bus_worlds import TOKEN, nats_world, nothing_comes, plain_server, take

from bus import BusError, BusUnavailable, Limits, NatsBus, NotFound, connect, provision, work
from bus.messages import DeadLetter
from bus.subjects import CONSUMERS

serving = sys.modules["bus.server"]
pytestmark = pytest.mark.slow


def cut(bus: NatsBus) -> None:
    """Lose the connection, and whatever is on its way in both directions."""
    bus.connection.client.options["reconnect_time_wait"] = 0.01
    bus.connection.client._transport._io_writer.transport.abort()


async def turns(count: int) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


async def test_a_connection_lost_at_any_moment_loses_and_doubles_nothing(nats_url: str) -> None:
    """Publish, take, answer, acknowledge: cut after each number of turns of the event loop."""
    moments = [*range(14), 18, 25, 40]
    brief = replace(CONSUMERS["designer"], ack_seconds=0.3)
    async with nats_world(nats_url, brief, CONSUMERS["agent"]) as w, w.bus.follow("EVENT") as answers:
        bus = over_nats(w)
        use(brief, bus)
        done: list[int] = []

        async def worker() -> None:
            async with bus.consume("designer", limit=2) as source:
                async for delivery in source:
                    done.append(delivery.message.slot)
                    await bus.publish(summary(delivery.message.slot))
                    await delivery.ack()

        async with anyio.create_task_group() as group:
            group.start_soon(worker)
            for number, moment in enumerate(moments):
                group.start_soon(bus.publish, ticket(number))
                await turns(moment)
                cut(bus)
                (record,) = await take(answers, 1, 5)
                assert record.message == summary(number)
            with anyio.fail_after(5):
                while (await bus.stream_info("TASK")).messages:  # noqa: ASYNC110 (only the server knows)
                    await anyio.sleep(0.01)
            group.cancel_scope.cancel()
        assert done == list(range(len(moments)))
        assert bus.statistics()["connection_disconnects"] > len(moments) // 2


async def test_an_acknowledgement_cancelled_at_any_moment_is_given(nats_url: str) -> None:
    async with nats_world(nats_url) as w:
        await w.bus.publish_all(map(ticket, range(12)))
        async with w.bus.consume("designer", limit=12) as source:
            for number, delivery in enumerate(await take(source, 12)):
                task = asyncio.ensure_future(delivery.ack())
                await turns(number // 2)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if not delivery.settled:
                    await delivery.ack()
            assert await nothing_comes(source)
        assert (await w.bus.stream_info("TASK")).messages == 0


async def test_a_dead_letter_that_was_cancelled_can_be_written_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nats_world(nats_url) as w:
        await w.bus.publish(ticket(1))
        async with w.bus.consume("designer", limit=1) as source:
            (delivery,) = await take(source, 1)
            with monkeypatch.context() as patched, anyio.move_on_after(0.05) as scope:
                patched.setattr(over_nats(w).publisher, "settle", for_ever)
                await delivery.term("no use")
            assert scope.cancelled_caught
            assert not delivery.settled
            await delivery.term("no use")
            await w.bus.publish(ticket(2))
            assert (await take(source, 1, 2))[0].message == ticket(2)
        letters = [record.message async for record in w.bus.replay("DLQ")]
        assert [type(letter) for letter in letters] == [DeadLetter]


async def for_ever(*_: Any, **__: Any) -> None:
    await anyio.sleep_forever()


async def test_a_server_that_stays_away_costs_no_place_in_the_window(tmp_path: Path) -> None:
    with plain_server(tmp_path) as url:
        await provision(url, run=RUN, token=TOKEN, store_gb=0.25)
        entered = connect(url, run=RUN, role="x", instance="1", token=TOKEN, patience=0.2)
        bus = await entered.__aenter__()
        await bus.publish(summary(0))
    await until(lambda: not bus.connection.connected, "the disconnect")
    for number in range(4):
        with anyio.fail_after(3), pytest.raises(BusUnavailable, match="PubAck"):
            await bus.publish(summary(number))
    figures = bus.statistics()
    assert (figures["publish_in_flight"], figures["publish_in_flight_bytes"]) == (0, 0)
    await entered.__aexit__(None, None, None)


async def test_a_long_wait_for_room_does_not_count_as_absence(tmp_path: Path) -> None:
    """Back-pressure may last longer than the patience with a server that is away for a moment."""
    async with served(tmp_path, patience=2.0) as (handle, bus):
        name = bus.names.stream("TASK")
        config = (await bus.connection.api(f"STREAM.INFO.{name}"))["config"]
        await bus.connection.api(f"STREAM.UPDATE.{name}", {**config, "max_msgs": 1})
        await bus.publish(ticket(0))
        async with anyio.create_task_group() as group:
            group.start_soon(bus.publish, ticket(1))
            await until(lambda: bus.statistics()["publish_full"] > 2, "the full stream")
            await kill(handle)
            assert await bus.purge("TASK") == 1


async def test_a_call_has_patience_with_a_server_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limit of a request is for its answer, not for an outage."""
    monkeypatch.setattr(serving, "_BACKOFF", (0.6,))
    async with served(tmp_path) as (handle, bus):
        os.kill(handle.pid, signal.SIGKILL)
        await until(lambda: not bus.connection.connected, "the disconnect")
        assert "config" in await bus.connection.api(f"STREAM.INFO.{bus.names.stream('EVENT')}", seconds=0.3)
        await until(lambda: handle.restarts == 1, "the end of the restart")


async def test_a_lame_duck_is_left_before_its_streams_are_missed(tmp_path: Path) -> None:
    """A server that is told to end answers 503 for as long as its grace lasts (10 s by default)."""
    async with served(tmp_path, limits=Limits(absent_seconds=1.0)) as (handle, bus):
        async with bus.consume("designer", limit=1) as source:
            os.kill(handle.pid, signal.SIGUSR2)
            await until(lambda: not bus.connection.connected, "leaving", 2)
            async with anyio.create_task_group() as group:
                group.start_soon(bus.publish, summary(1))
                group.start_soon(bus.publish, ticket(1))
                await anyio.sleep(1.2)  # longer than a stream may be absent
                await kill(handle)
            assert (await take(source, 1, 5))[0].message == ticket(1)
        assert bus.statistics()["connection_lame_ducks"] == 1


async def test_a_queue_made_anew_counts_from_one_and_its_work_is_done(nats_url: str) -> None:
    """A worker remembers what it did by place and subject: the same number is not the same work."""
    async with nats_world(nats_url) as w:
        bus = over_nats(w)
        async with bus.consume("designer", limit=4) as source:
            await bus.publish(ticket(1))
            (old,) = await take(source, 1)
            assert old.sequence == 1
            await bus.connection.api(f"STREAM.DELETE.{bus.names.stream('TASK')}")
            await provision(nats_url, run=bus.run, token=TOKEN, store_gb=0.25)
            await bus.publish(ticket(2))
            (new,) = await take(source, 1, 5)
            assert (new.sequence, new.message) == (1, ticket(2))
            await old.ack()
            await new.ack()
            with anyio.fail_after(5):
                while (await bus.stream_info("TASK")).messages:  # noqa: ASYNC110 (only the server knows)
                    await anyio.sleep(0.01)


async def test_more_than_was_wanted_is_handed_back(nats_url: str) -> None:
    """Requests of before a reconnect may be served as well: no worker gets more than it can do."""
    async with nats_world(nats_url) as w, w.peer("tester", "two") as other:
        await w.bus.publish_all(map(ticket, range(6)))
        async with w.bus.consume("designer", limit=1) as source:
            (held,) = await take(source, 1)
            mine = over_nats(w)._open["consume_designer"]
            assert isinstance(mine, work.Work)
            mine._pull._request(3)
            await until(lambda: w.bus.statistics()["consume_designer_surplus"] == 3, "the surplus")
            assert await nothing_comes(source, 0.05)
            async with other.consume("designer", limit=5) as theirs:
                assert {delivery.message.slot for delivery in await take(theirs, 5, 5)} == set(range(1, 6))
            await held.ack()


async def test_a_purge_ahead_of_a_reader_is_no_gap_of_ours(nats_url: str) -> None:
    async with nats_world(nats_url) as w:
        await w.bus.publish_all(rejected(number, 100_000) for number in range(400))
        async with w.bus.follow("EVENT") as source:
            assert (await take(source, 1))[0].sequence == 1
            await w.bus.purge("EVENT", below=390)
            await w.bus.publish(summary(1))
            seen = [1]
            with anyio.fail_after(10):
                async for record in source:
                    seen.append(record.sequence)
                    if seen[-1] == 401:
                        break
        assert seen == sorted(set(seen))
        assert seen[-12:] == list(range(390, 402))


async def test_a_replay_survives_the_server_it_reads_from(tmp_path: Path) -> None:
    async with served(tmp_path) as (handle, bus):
        await bus.publish_all(map(summary, range(1500)))
        seen: list[int] = []
        async for record in bus.replay("EVENT"):
            seen.append(record.sequence)
            if len(seen) in (100, 700):
                await kill(handle)
        assert seen == list(range(1, 1501))


async def test_a_follower_of_a_deleted_stream_ends(nats_url: str) -> None:
    async with nats_world(nats_url) as w:
        bus = over_nats(w)
        name = bus.names.stream("EVENT")
        config = (await bus.connection.api(f"STREAM.INFO.{name}"))["config"]
        await bus.publish_all(map(summary, range(3)))

        async def follow() -> None:
            async with bus.follow("EVENT") as source:
                await take(source, 3)
                await bus.connection.api(f"STREAM.DELETE.{name}")
                await anext(source)

        with anyio.fail_after(5), pytest.raises(NotFound, match="provisioned"):
            await follow()
        await bus.connection.api(f"STREAM.CREATE.{name}", config)
        with pytest.raises(BusError, match="ends at 0, but was read up to 3"):
            async with bus.follow("EVENT", start=4):
                pass


@pytest.mark.parametrize("before", [0, 3])
async def test_an_answer_lost_for_longer_than_the_server_knows_an_id_doubles_nothing(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """A long outage: whoever wrote just before it looks whether that was stored."""
    monkeypatch.setattr(sys.modules["bus.publisher"], "_DOUBT_SECONDS", 0.0)
    async with nats_world(nats_url) as w, w.peer("tester", "two") as other:
        bus = over_nats(w)
        name = bus.names.stream("EVENT")
        config = (await bus.connection.api(f"STREAM.INFO.{name}"))["config"]
        await bus.connection.api(f"STREAM.UPDATE.{name}", {**config, "duplicate_window": 100_000_000})
        bus.publisher.limits = Limits(ack_seconds=0.4)
        await bus.publish_all(map(summary, range(before)))
        lost = lose_next_answer(bus)
        async with anyio.create_task_group() as group:
            group.start_soon(bus.publish, summary(10))
            await until(lambda: bool(lost), "the lost answer")
            if before:
                await other.publish_all(map(summary, range(20, 23)))
        assert await bus.publish(summary(11)) == (before + 5 if before else 2)
        rounds = [record.message.round async for record in bus.replay("EVENT")]
        assert rounds.count(10) == 1


def lose_next_answer(bus: NatsBus) -> list[Any]:
    """Let the next answer to a publisher be lost on its way."""
    lost: list[Any] = []
    handlers = bus.connection.client._handlers
    (number,) = [key for key, handler in handlers.items() if handler == bus.publisher._on_answer]

    def lose(message: Any) -> None:
        lost.append(message)
        handlers[number] = bus.publisher._on_answer

    handlers[number] = lose
    return lost


async def test_a_message_that_was_lost_is_written_again_however_late(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["bus.publisher"], "_DOUBT_SECONDS", 0.0)
    async with nats_world(nats_url) as w:
        bus = over_nats(w)
        bus.publisher.limits = Limits(ack_seconds=0.2)
        await bus.publish(summary(0))
        real = bus.connection.write
        lost: list[str] = []

        def write(subject: str, payload: bytes, reply: str = "", head: bytes = b"") -> bool:
            if not lost:
                lost.append(subject)
                return True
            return real(subject, payload, reply, head)

        monkeypatch.setattr(bus.connection, "write", write)
        with anyio.fail_after(5):
            assert await bus.publish(summary(1)) == 2
        assert lost
