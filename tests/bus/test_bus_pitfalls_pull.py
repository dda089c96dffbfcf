"""Pitfalls of taking and following messages, by their number in docs/bus-pitfalls.md."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from bus_examples import request, summary, ticket
from bus_trouble import consumers_of, drop_once, kill, rejected, served, until
from bus_worlds import nats_world, nothing_comes, take

from bus import BusError, BusUnavailable, Delivery, follow, reads, work
from bus.messages import DeadLetter
from bus.pull import Pull
from bus.subjects import CONSUMERS

pulling = sys.modules["bus.pull"]


def hasten(monkeypatch: pytest.MonkeyPatch, expires: float = 0.2, heartbeat: float = 0.05) -> None:
    """Let requests end within a moment."""
    monkeypatch.setattr(pulling, "_EXPIRES_SECONDS", expires)
    monkeypatch.setattr(pulling, "_HEARTBEAT_SECONDS", heartbeat)


async def test_pitfall_01_no_pull_request_is_orphaned(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests expire all the time, and each message finds one that is still ours."""
    hasten(monkeypatch, 0.03, 0.01)
    async with nats_world(nats_url) as w, w.bus.consume("designer", limit=4) as source:
        waits = []
        for number in range(60):
            await anyio.sleep(0.007 * (number % 6))
            start = anyio.current_time()
            await w.bus.publish(ticket(number))
            (delivery,) = await take(source, 1, 5)
            assert delivery.attempt == 1
            await delivery.ack()
            waits.append(anyio.current_time() - start)
        assert sorted(waits)[len(waits) // 2] < 0.2
        assert max(waits) < 1.0


async def test_pitfall_02_a_time_limit_is_an_error_of_ours(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle queue is no error; a server that is silent is BusUnavailable, never a bare TimeoutError."""
    hasten(monkeypatch)
    monkeypatch.setattr(reads, "_SECONDS", 0.1)
    async with nats_world(nats_url) as w:
        await w.bus.publish(summary(1))
        async with w.bus.consume("designer", limit=1) as source:
            assert await nothing_comes(source, 0.45)
        connection = w.bus.connection
        with monkeypatch.context() as silent:
            silent.setattr(connection, "api", partial(connection.api, seconds=0.1))
            silent.setattr(connection.client, "_handlers", {})
            for call in (
                lambda: w.bus.get("EVENT", 1),
                lambda: w.bus.last("event.scorer.round"),
                lambda: w.bus.state_get("config"),
                lambda: w.bus.stream_info("EVENT"),
                lambda: anext(w.bus.replay("EVENT")),
            ):
                with anyio.fail_after(5), pytest.raises(BusUnavailable):
                    await call()


async def test_pitfall_03_a_waiting_worker_gets_work_soon_after_a_restart(tmp_path: Path) -> None:
    async with served(tmp_path) as (handle, bus), bus.consume("designer", limit=2) as source:
        assert await nothing_comes(source, 0.05)
        await kill(handle)
        await bus.publish(ticket(1))
        start = anyio.current_time()
        (delivery,) = await take(source, 1, 5)
        assert anyio.current_time() - start < 2.5
        await delivery.ack()


async def test_pitfall_03_a_lost_pull_request_is_noticed_by_its_silence(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nats_world(nats_url) as w:
        bus = w.bus
        got: list[int] = []
        await bus.publish(ticket(1))
        drop_once(monkeypatch, bus)
        hasten(monkeypatch, 2.0, 0.2)
        pull = puller(bus, got, lambda: 1 - len(got))
        async with anyio.create_task_group() as group:
            group.start_soon(pull.run)
            await until(lambda: bool(got), "a second request", 5)
            group.cancel_scope.cancel()
        assert pull.requests == 2


def puller(bus: Any, got: list[int], wanted: Callable[[], int], max_bytes: int = 0) -> Pull:
    return Pull(
        bus.connection,
        stream=bus.names.stream("TASK"),
        consumer="designer",
        max_bytes=max_bytes,
        wanted=wanted,
        on_message=lambda message, delivered: got.append(delivered.stream_sequence),
        on_broken=lambda gone: pytest.fail("gone") if gone else None,
    )


async def test_pitfall_04_a_pause_takes_no_consumer_away(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Durables have no age; a follower whose short-lived consumer was removed goes on with another."""
    hasten(monkeypatch)
    monkeypatch.setattr(follow, "_INACTIVE_SECONDS", 0.3)
    async with nats_world(nats_url) as w:
        bus = w.bus
        for name in CONSUMERS:
            info = await bus.connection.api(f"CONSUMER.INFO.{bus.names.stream('TASK')}.{name}")
            assert info["config"].get("inactive_threshold", 0) == 0
        await bus.publish(summary(0))
        async with bus.follow("EVENT") as source, bus.consume("designer", limit=1) as tasks:
            await take(source, 1)
            with monkeypatch.context() as pause, anyio.fail_after(10):
                pause.setattr(Pull, "_request", no_request)
                while await consumers_of(bus, "EVENT"):  # noqa: ASYNC110 (only the server knows)
                    await anyio.sleep(0.05)
            await bus.publish_all([summary(1), ticket(1)])
            assert [record.sequence for record in await take(source, 1, 5)] == [2]
            assert (await take(tasks, 1, 5))[0].message == ticket(1)


def no_request(*_: Any) -> None:
    return None


async def test_pitfall_05_a_deleted_consumer_ends_the_worker(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "_GONE_SECONDS", 0.3)
    async with nats_world(nats_url) as w:

        async def take_all() -> None:
            async with w.bus.consume("agent", limit=1) as source:
                await w.bus.publish(request(1))
                await (await anext(source)).ack()
                await w.bus.connection.api(f"CONSUMER.DELETE.{w.bus.names.stream('TASK')}.agent")
                await anext(source)

        with anyio.fail_after(5), pytest.raises(BusError, match=r"no queue agent .*run\.roles"):
            await take_all()


async def test_pitfall_14_a_slow_reader_loses_nothing(nats_url: str) -> None:
    """No limit of the client drops what was asked for; what is asked for is bounded."""
    async with nats_world(nats_url) as w, w.peer("tester", "two") as other:
        bus = w.bus
        await bus.publish_all(rejected(number, 200_000) for number in range(200))
        await bus.publish_all(ticket(number, skill="x" * 50_000) for number in range(100))
        async with bus.follow("EVENT") as source, bus.consume("designer", limit=100) as tasks:
            await other.publish(summary(1))
            time.sleep(0.3)  # noqa: ASYNC251 (the slow reader)
            assert [record.sequence for record in await take(source, 201)] == list(range(1, 202))
            assert {delivery.attempt for delivery in await take(tasks, 100)} == {1}
            assert bus.statistics()["follow_event_restarts"] == 0


async def test_pitfall_20_the_largest_message_fits_into_a_request(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "_CAPACITY_BYTES", 100_000)
    async with nats_world(nats_url) as w:
        bus = w.bus
        await bus.publish_all(rejected(number, 4 << 20) for number in range(4))
        async with bus.follow("EVENT") as source:
            assert [record.sequence for record in await take(source, 4, 5)] == [1, 2, 3, 4]


async def test_pitfall_20_a_request_that_brings_nothing_is_not_repeated_at_once(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nats_world(nats_url) as w:
        bus = w.bus
        monkeypatch.setattr(pulling, "_OVERHEAD_BYTES", 0)
        await bus.publish(ticket(1, skill="x" * 300_000))
        got: list[int] = []
        pull = puller(bus, got, lambda: 1 - len(got), 1000)
        real = bus.connection.client._max_payload
        bus.connection.client._max_payload = 1000
        async with anyio.create_task_group() as group:
            group.start_soon(pull.run)
            await until(lambda: pull.requests >= 4, "several requests", 5)
            start, before = anyio.current_time(), pull.requests
            await until(lambda: pull.requests >= before + 3, "three more", 5)
            assert anyio.current_time() - start > 0.15
            bus.connection.client._max_payload = real
            await until(lambda: got == [1], "the message", 5)
            group.cancel_scope.cancel()


async def test_pitfall_21_work_that_kills_its_worker_becomes_a_dead_letter(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says nak: the leases end, and the server never stops delivering by itself."""
    deadly = replace(CONSUMERS["designer"], ack_seconds=0.15, attempts=3)
    monkeypatch.setitem(CONSUMERS, "designer", deadly)
    async with nats_world(nats_url) as w:
        bus = w.bus
        info = await bus.connection.api(f"CONSUMER.INFO.{bus.names.stream('TASK')}.designer")
        assert info["config"].get("max_deliver", -1) == -1
        await bus.publish(ticket(1))
        for attempt in (1, 2, 3):
            await die_at_work(bus, attempt, monkeypatch)
        async with bus.follow("DLQ") as letters, bus.consume("designer", limit=1) as source:
            (record,) = await take(letters, 1, 5)
            assert isinstance(record.message, DeadLetter)
            assert (record.message.reason, record.message.attempts) == ("delivered too often", 3)
            assert await nothing_comes(source)
        assert (await bus.stream_info("TASK")).messages == 0


async def die_at_work(bus: Any, attempt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take one message and go without a word."""
    real = bus.connection.write

    def write(subject: str, *rest: Any) -> bool:
        return True if subject.startswith("$JS.ACK.") else bool(real(subject, *rest))

    with monkeypatch.context() as patched:
        patched.setattr(bus.connection, "write", write)
        async with bus.consume("designer", limit=1) as source:
            (delivery,) = await take(source, 1, 5)
            assert delivery.attempt == attempt


async def test_pitfall_29_work_is_done_side_by_side(nats_url: str) -> None:
    """Twenty pieces of work that wait for each other: handed out one after the other they would hang."""
    async with nats_world(nats_url) as w:
        await w.bus.publish_all(map(ticket, range(20)))
        started: list[int] = []
        together = anyio.Event()

        async def do(delivery: Delivery) -> None:
            started.append(delivery.sequence)
            if len(started) == 20:
                together.set()
            await together.wait()
            await delivery.ack()

        with anyio.fail_after(5):
            async with w.bus.consume("designer", limit=20) as source, anyio.create_task_group() as group:
                for _ in range(20):
                    group.start_soon(do, await anext(source))
        assert (await w.bus.stream_info("TASK")).messages == 0


async def test_pitfall_31_a_blocked_loop_does_no_work_twice(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The lease ends while the loop is blocked; the redelivery to ourselves is recognised and counted."""
    monkeypatch.setattr(sys.modules["bus.connection"], "_WATCHDOG_SECONDS", 0.1)
    monkeypatch.setattr(sys.modules["bus.connection"], "_LAG_SECONDS", 0.2)
    async with nats_world(nats_url, lease_seconds=0.3) as w:
        bus = w.bus
        await bus.publish(ticket(1))
        async with bus.consume("designer", limit=2) as source:
            (delivery,) = await take(source, 1)
            time.sleep(0.7)  # noqa: ASYNC251 (the blocked loop)
            await until(lambda: bus.statistics()["consume_designer_suppressed"] >= 1, "the redelivery", 5)
            assert await nothing_comes(source)
            await delivery.ack()
            assert await nothing_comes(source, 0.4)
            assert "the event loop of the bus was blocked" in caplog.text
        assert (await bus.stream_info("TASK")).messages == 0


async def test_pitfall_32_an_answer_comes_though_a_worker_dies(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work is a task, not a request: another worker takes it, and one answer is stored."""
    async with (
        nats_world(nats_url, lease_seconds=0.3) as w,
        w.peer("tester", "two") as other,
        w.bus.follow("EVENT") as answers,
    ):
        await w.bus.publish(ticket(1))
        await die_at_work(w.bus, 1, monkeypatch)
        async with other.consume("designer", limit=1) as theirs:
            (again,) = await take(theirs, 1, 5)
            assert again.attempt == 2
            await other.publish(summary(again.message.slot))
            await again.ack()
        assert (await take(answers, 1))[0].message == summary(1)
        await w.bus.publish(summary(1))  # the first worker was not dead after all
        assert await nothing_comes(answers)
