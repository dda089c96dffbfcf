"""The bus while things break: a killed server, lost answers, a dead read loop, poison, silence."""

from __future__ import annotations

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
from bus_trouble import drop_once, freeze, kill, rejected, served, until
from bus_worlds import TOKEN, nats_world

from bus import BusError, Limits, Record, provision, state
from bus.subjects import CONSUMERS

pytestmark = pytest.mark.slow

provisioning = sys.modules["bus.provision"]


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
                await until(lambda: len(bus._open) == 2, "following")
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


async def test_a_server_that_does_not_answer_is_an_error_not_a_hang(tmp_path: Path) -> None:
    """A server whose disk is full keeps its connections and stays silent; SIGSTOP looks the same."""
    limits = Limits(ack_seconds=0.1, unanswered=3)
    async with served(tmp_path, limits=limits) as (handle, bus):
        freeze(handle.pid)
        try:
            with anyio.fail_after(5), pytest.raises(BusError, match="does not store") as caught:
                await bus.publish(summary(1))
            assert "full disk" in caught.value.remedy
            assert bus.statistics()["publish_retries"] == 2
        finally:
            os.kill(handle.pid, signal.SIGCONT)


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
        monkeypatch.setitem(CONSUMERS, "agent", replace(CONSUMERS["agent"], ack_seconds=60.0))
        await provision(nats_url, run=w.bus.run, token=TOKEN, store_gb=0.5)
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
    async with nats_world(nats_url, lease_seconds=1.0) as w, w.peer("tester", "two") as other:
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
    async with nats_world(nats_url, lease_seconds=1.0) as w:
        await w.bus.publish(ticket(1))
        async with w.bus.consume("designer", limit=1) as source:
            delivery = await anext(source)
            lost = drop_once(monkeypatch, w.bus)
            await delivery.ack()
            await until(lambda: lost == [b"+ACK"], "the lost acknowledgement")
            with anyio.move_on_after(2.0) as scope:
                await anext(source)
            assert scope.cancelled_caught
        assert (await w.bus.stream_info("TASK")).messages == 0


async def test_an_update_whose_answer_was_lost_is_no_conflict(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nats_world(nats_url) as w:
        monkeypatch.setattr(state.secrets, "token_hex", lambda size: "the-same-id")
        first = await w.bus.state_update("key", b"mine", 0)
        assert await w.bus.state_update("key", b"mine", 0) == first
