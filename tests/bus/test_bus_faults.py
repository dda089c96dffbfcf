"""The bus while things break: a killed server, lost answers, a dead read loop, poison, silence."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from bus_examples import summary, ticket
from bus_trouble import RUN, SLOW, drop_once, freeze, kill, rejected, served, until, use
from bus_worlds import TOKEN, nats_world, plain_server

from bus import BusError, BusUnavailable, Delivery, Limits, NatsBus, Record, connect, provision, serve, state
from bus.connection import open_connection
from bus.subjects import CONSUMERS

pytestmark = pytest.mark.slow

provisioning = sys.modules["bus.provision"]


async def test_nothing_acknowledged_is_lost_and_nothing_is_stored_twice(tmp_path: Path) -> None:
    """Publish without pause while the server is killed three times."""
    async with served(tmp_path) as (handle, bus):
        acknowledged: dict[int, int] = {}
        stop = anyio.Event()

        async def publish(worker: int) -> None:
            number = worker
            while not stop.is_set():
                acknowledged[number] = await bus.publish(summary(number))
                number += 10

        with anyio.fail_after(40):
            async with anyio.create_task_group() as group:
                for worker in range(10):
                    group.start_soon(publish, worker)
                for _ in range(3):
                    seen = len(acknowledged)
                    await until(lambda seen=seen: len(acknowledged) > seen + 100, "progress")
                    await kill(handle)
                stop.set()
        stored = {record.sequence: record.message.round async for record in bus.replay("EVENT")}
        assert {number: sequence for sequence, number in stored.items()} == acknowledged
        assert len(stored) == len(acknowledged) > 300
        assert bus.statistics()["connection_reconnects"] == 3


async def test_followers_see_everything_once_in_order_through_kills(tmp_path: Path) -> None:
    async with served(tmp_path) as (handle, bus):
        seen: list[Record] = []
        filtered: list[Record] = []
        done = anyio.Event()

        async def follow(into: list[Record], tails: list[str] | None) -> None:
            async with bus.follow("EVENT", tails=tails) as source:
                async for record in source:
                    into.append(record)  # noqa: PERF401 (others look at the list as it grows)

        async def publish() -> None:
            for start in range(0, 1200, 100):
                await bus.publish_all(map(summary, range(start, start + 100)))
                await anyio.lowlevel.checkpoint()
            done.set()

        with anyio.fail_after(40):
            async with anyio.create_task_group() as group:
                group.start_soon(follow, seen, None)
                group.start_soon(follow, filtered, ["event.scorer.*", "event.agent.>"])
                await until(lambda: "follow_EVENT".lower() in str(bus.statistics()).lower(), "following")
                group.start_soon(publish)
                for amount in (150, 600):
                    await until(lambda amount=amount: len(seen) > amount, "reading")
                    await kill(handle)
                await done.wait()
                await until(lambda: len(seen) >= 1200 and len(filtered) >= 1200, "the end")
                await bus.publish(summary(5000))
                await until(lambda: len(seen) == 1201 == len(filtered), "one more")
                group.cancel_scope.cancel()
        assert [record.sequence for record in seen] == list(range(1, 1202))
        assert [record.sequence for record in filtered] == list(range(1, 1202))
        assert {record.message.round for record in seen} == {*range(1200), 5000}


async def test_work_is_all_done_through_kills(tmp_path: Path) -> None:
    async with served(tmp_path) as (handle, bus):
        done: list[int] = []

        async def do(delivery: Delivery) -> None:
            await anyio.sleep(0.002)
            await bus.publish(summary(delivery.message.slot))
            done.append(delivery.message.slot)
            await delivery.ack()

        async def worker() -> None:
            async with bus.consume("designer", limit=16) as source, anyio.create_task_group() as inner:
                async for delivery in source:
                    inner.start_soon(do, delivery)

        with anyio.fail_after(50):
            async with anyio.create_task_group() as group:
                group.start_soon(worker)
                await bus.publish_all(map(ticket, range(300)))
                for amount in (30, 150):
                    await until(lambda amount=amount: len(set(done)) > amount, "work")
                    await kill(handle)
                await until(lambda: len(set(done)) == 300, "all work", 40)
                group.cancel_scope.cancel()
        stored = [record.message.round async for record in bus.replay("EVENT")]
        assert sorted(stored) == list(range(300))


async def test_publishing_waits_for_the_server_and_then_gives_up(tmp_path: Path) -> None:
    with contextlib.ExitStack() as server:
        url = server.enter_context(plain_server(tmp_path))
        await provision(url, run=RUN, token=TOKEN, store_gb=0.25)
        async with connect(url, run=RUN, role="x", instance="1", token=TOKEN, patience=0.8) as bus:
            await bus.publish(summary(1))
            server.close()
            await until(lambda: not bus.connection.connected, "the disconnect")
            with pytest.raises(BusUnavailable, match=r"PubAck of spade\.trouble\.event") as caught:
                await bus.publish(summary(2))
            assert caught.value.deadline == 0.8
            with pytest.raises(BusUnavailable):
                await bus.stream_info("EVENT")
            assert bus.statistics()["publish_in_flight"] == 0


async def test_no_server_and_a_wrong_token_are_told_apart(nats_url: str) -> None:
    with pytest.raises(BusUnavailable, match=r"connection to nats://127\.0\.0\.1:1"):
        async with open_connection("nats://127.0.0.1:1", name="t", connect_seconds=0.4):
            pass
    with anyio.fail_after(3), pytest.raises(BusError, match="refused the token"):
        async with open_connection(nats_url, name="t", token="guess", connect_seconds=10):
            pass


async def test_a_server_that_does_not_answer_is_an_error_not_a_hang(tmp_path: Path) -> None:
    """A server whose disk is full keeps its connections and stays silent; SIGSTOP looks the same."""
    limits = Limits(ack_seconds=0.1, unanswered=3)
    async with serve(tmp_path, run=RUN, store_gb=0.25) as handle:
        await provision(handle.url, run=RUN, token=handle.token, store_gb=0.25)
        async with connect(
            handle.url, run=RUN, role="x", instance="1", token=handle.token, limits=limits
        ) as bus:
            freeze(handle.pid)
            try:
                with anyio.fail_after(5), pytest.raises(BusError, match="does not store") as caught:
                    await bus.publish(summary(1))
                assert "full disk" in caught.value.remedy
                assert bus.statistics()["publish_retries"] == 3
            finally:
                os.kill(handle.pid, signal.SIGCONT)


async def test_a_message_too_large_for_the_server_is_refused_here(nats_url: str) -> None:
    async with nats_world(nats_url) as w:
        with pytest.raises(BusError, match=r"exceeds the \d+ bytes.*agent\.play_tokens.*bus\.max_payload_mb"):
            await w.bus.publish(rejected(0, 9 << 20))
        assert (await w.bus.stream_info("EVENT")).messages == 0


async def test_large_messages_flow_without_exceeding_the_bounds(nats_url: str) -> None:
    """60 MB of messages through windows of 16 MB and requests of 32 MB, slowly read."""
    async with nats_world(nats_url, store_gb=0.5) as w:
        await w.bus.publish_all(rejected(number, 4 << 20) for number in range(15))
        unread: list[float] = []
        async with w.bus.follow("EVENT") as source:
            with anyio.fail_after(20):
                for number in range(15):
                    assert (await anext(source)).message.attempt == number
                    await anyio.sleep(0.01)
                    unread.append(w.bus.statistics()["follow_event_unread_bytes"])
            assert w.bus.statistics()["follow_event_restarts"] == 0
        assert max(unread) <= 64 << 20
        assert [record.message.attempt async for record in w.bus.replay("EVENT")] == list(range(15))
        poison = await w.inject("EVENT", "event.large.poison", b"\xc1" * ((8 << 20) - 1000))
        async with w.bus.follow("EVENT", start=poison), w.bus.follow("DLQ") as letters:
            with anyio.fail_after(10):
                letter = (await anext(letters)).message
        assert letter.sequence == poison
        assert "cut from" in letter.reason


async def test_provisioning_twice_changes_nothing(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with nats_world(nats_url) as w:
        await w.bus.publish(summary(1))
        asked: list[str] = []

        async def ask(connection: Any, verb: str, body: Any, name: str) -> None:
            asked.append(verb)

        monkeypatch.setattr(provisioning, "_ask", ask)
        await provision(nats_url, run=w.bus.run, token=TOKEN, store_gb=0.25)
        assert asked == []
        await provision(nats_url, run=w.bus.run, token=TOKEN, store_gb=0.5, task_slots=9000)
        assert f"STREAM.UPDATE.EVENT_{w.bus.run}" in asked
        assert f"CONSUMER.DURABLE.CREATE.TASK_{w.bus.run}.agent" in asked
        assert not [verb for verb in asked if verb.startswith("STREAM.CREATE")]
        assert await w.bus.get("EVENT", 1) == summary(1)


async def test_a_dead_reconnect_task_is_revived(tmp_path: Path) -> None:
    async with served(tmp_path) as (handle, bus):
        os.kill(handle.pid, signal.SIGKILL)
        await until(lambda: bus.connection.client.is_reconnecting, "reconnecting")
        bus.connection.client._reconnection_task.cancel()
        with anyio.fail_after(15):
            await bus.publish(summary(1))
        assert bus.statistics()["connection_revived"] == 1


async def test_work_in_hand_is_kept_alive(nats_url: str) -> None:
    """Twice the lease, and nobody else gets the work."""
    async with nats_world(nats_url, SLOW, CONSUMERS["agent"]) as w, w.peer("tester", "two") as other:
        use(SLOW, w.bus, other)
        await w.bus.publish(ticket(1))
        async with w.bus.consume("designer", limit=1) as mine:
            delivery = await anext(mine)
            async with other.consume("designer", limit=1) as theirs:
                with anyio.move_on_after(2.2) as scope:
                    await anext(theirs)
                assert scope.cancelled_caught
            await delivery.ack()
        assert (await w.bus.stream_info("TASK")).messages == 0


async def test_a_lost_acknowledgement_is_not_work_done_twice(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nats_world(nats_url, SLOW, CONSUMERS["agent"]) as w:
        use(SLOW, w.bus)
        assert isinstance(w.bus, NatsBus)
        await w.bus.publish(ticket(1))
        async with w.bus.consume("designer", limit=1) as source:
            delivery = await anext(source)
            lost = drop_once(monkeypatch, w.bus)
            await delivery.ack()
            assert lost == [b"+ACK"]
            with anyio.move_on_after(2.0) as scope:
                await anext(source)
            assert scope.cancelled_caught
            figures = w.bus.statistics()
            assert figures["consume_designer_suppressed"] >= 1
        assert (await w.bus.stream_info("TASK")).messages == 0


async def test_a_publish_lost_on_its_way_is_sent_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nats_world(nats_url) as w:
        assert isinstance(w.bus, NatsBus)
        w.bus.publisher.limits = Limits(ack_seconds=0.1)
        drop_once(monkeypatch, w.bus)
        with anyio.fail_after(8):
            assert await w.bus.publish(summary(1)) == 1
        assert w.bus.statistics()["publish_retries"] == 1


async def test_an_update_whose_answer_was_lost_is_no_conflict(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nats_world(nats_url) as w:
        monkeypatch.setattr(state.secrets, "token_hex", lambda size: "the-same-id")
        first = await w.bus.state_update("key", b"mine", 0)
        assert await w.bus.state_update("key", b"mine", 0) == first
