"""The bus against a hostile world: cancellation and lost connections at every moment, servers that end."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from bus_examples import summary, ticket
from bus_trouble import RUN, delay_restarts, kill, rejected, served, until
from bus_worlds import TOKEN, nats_world, nothing_comes, plain_server, take

from bus import BusError, BusUnavailable, Limits, NotFound, connect, provision
from bus.messages import DeadLetter
from bus.subjects import DEDUPE_SECONDS

pytestmark = pytest.mark.slow


async def turns(count: int) -> None:
    for _ in range(count):
        await anyio.lowlevel.checkpoint()


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
                patched.setattr(w.bus.publisher, "_store", for_ever)
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
    delay_restarts(monkeypatch, 0.6)
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
        bus = w.bus
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
        bus = w.bus
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


def test_the_server_knows_an_id_for_longer_than_a_client_waits_for_it() -> None:
    """A message whose answer was lost is written again within the patience, and stored once."""
    patience = inspect.signature(connect).parameters["patience"].default
    again = Limits().unanswered * Limits().ack_seconds
    assert patience + again < DEDUPE_SECONDS


async def test_an_answer_that_was_lost_doubles_nothing(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nats_world(nats_url) as w:
        w.bus.publisher.limits = Limits(ack_seconds=0.4)
        lost: list[Any] = []
        with monkeypatch.context() as deaf:
            deaf.setattr(w.bus.connection.client, "_handlers", dict.fromkeys(range(99), lost.append))
            async with anyio.create_task_group() as group:
                group.start_soon(w.bus.publish, summary(10))
                await until(lambda: bool(lost), "the lost answer")
                deaf.undo()
        assert await w.bus.publish(summary(10)) == 1
        figures = w.bus.statistics()
        assert (figures["publish_retries"], figures["publish_duplicates"]) == (1, 2)
        assert (await w.bus.stream_info("EVENT")).messages == 1
