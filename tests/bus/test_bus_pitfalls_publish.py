"""Pitfalls of publishing, by their number in docs/bus-pitfalls.md."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from bus_examples import summary, ticket
from bus_trouble import RUN, delay_restarts, freeze, kill, rejected, served, until
from bus_worlds import TOKEN, nats_world, nothing_comes, plain_server, take
from scenes.brokers import USUAL

from bus import Bus, BusError, BusUnavailable, Conflict, Denied, Limits, connect, provision
from bus.nats_client import Arrival
from bus.subjects import STREAMS


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A server that is there and says nothing."""
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@asynccontextmanager
async def outage(handle: Any, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Be without a server for the body, and for some tenths of a second at least."""
    delay_restarts(monkeypatch, 0.5)
    wanted = handle.restarts + 1
    os.kill(handle.pid, signal.SIGKILL)
    await until(lambda: not bus.connection.connected, "the disconnect")
    yield
    await until(lambda: handle.restarts >= wanted, "the restart")


def _in_the_middle(bus: Bus) -> bool:
    figures = bus.statistics()
    return figures["publish_stored"] > 200 and figures["publish_in_flight"] > 0


async def test_pitfall_06_nothing_stays_pending_when_the_server_is_killed(tmp_path: Path) -> None:
    async with served(tmp_path, limits=Limits(window=32)) as (handle, bus):
        sequences: list[int] = []

        async def publish() -> None:
            sequences.extend(await bus.publish_all(map(summary, range(1000))))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(publish)
                await until(lambda: _in_the_middle(bus), "some stored and some in flight")
                await kill(handle)
        assert len(set(sequences)) == 1000
        assert (await bus.stream_info("EVENT")).messages == 1000
        figures = bus.statistics()
        assert (figures["publish_in_flight"], figures["publish_waiting"]) == (0, 0)


async def test_pitfall_07_a_refusal_reaches_who_published(nats_url: str) -> None:
    async with nats_world(nats_url) as w:
        bus = w.bus
        await w.limit_tasks(2)
        bus.publisher.limits = Limits(full_seconds=0.3)
        with anyio.fail_after(5), pytest.raises(BusUnavailable, match="no room in stream TASK"):
            await bus.publish_all(map(ticket, range(3)))
        await bus.purge("TASK")
        await bus.publish(ticket(2))
        name = bus.names.stream("EVENT")
        config = (await bus.connection.api(f"STREAM.INFO.{name}"))["config"]
        await bus.connection.api(f"STREAM.UPDATE.{name}", {**config, "max_msg_size": 1000})
        with anyio.fail_after(2), pytest.raises(BusError, match=r"refused .*event\.designer\.rejected"):
            await bus.publish(rejected(1, 5000))
        with anyio.fail_after(2), pytest.raises(Conflict):
            await bus.state_update("key", b"value", 7)
        assert bus.statistics()["publish_in_flight"] == 0


async def test_pitfall_07_a_store_that_fails_is_not_taken_for_a_full_stream(nats_url: str) -> None:
    """One code stands for all failures of the store: only a limit that was reached is worth the wait."""
    async with nats_world(nats_url) as w:
        bus = w.bus
        bus.publisher.limits = Limits(absent_seconds=0.3)
        answer = b'{"error":{"code":500,"err_code":10077,"description":"write 1.blk: input/output error"}}'
        async with stand_in(nats_url, bus, "EVENT", answer):
            with anyio.fail_after(5), pytest.raises(BusError, match=r"cannot store .* input/output error"):
                await bus.publish(summary(1))


@asynccontextmanager
async def stand_in(url: str, bus: Bus, stream: str, answer: bytes) -> AsyncIterator[list[str]]:
    """Remove a stream; somebody else listens on its subjects, and answers unless ``answer`` is empty."""
    name = bus.names.stream(stream)
    config = (await bus.connection.api(f"STREAM.INFO.{name}"))["config"]
    await bus.connection.api(f"STREAM.DELETE.{name}")
    heard: list[str] = []
    async with connect(url, run=bus.run, role="y", instance="1", token=TOKEN) as other:

        def reply(message: Arrival) -> None:
            heard.append(message.subject)
            if answer:
                other.connection.write(message.reply, answer)

        await other.connection.subscribe(config["subjects"][0], reply)
        await other.connection.barrier()
        yield heard
    await bus.connection.api(f"STREAM.CREATE.{name}", config)


async def test_pitfall_08_the_window_is_bounded_and_survives_cancellation(tmp_path: Path) -> None:
    async with served(tmp_path) as (handle, bus):
        with stopped(handle.pid):
            with anyio.move_on_after(0.2) as scope:
                await bus.publish_all(map(summary, range(1000)))
            assert scope.cancelled_caught
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await bus.publish_all(map(summary, range(1000)))
            async with anyio.create_task_group() as group:
                for number in range(400):
                    group.start_soon(bus.publish, summary(number))
                await until(lambda: bus.statistics()["publish_waiting"] == 144, "a full window")
                assert bus.statistics()["publish_in_flight"] == 256
                group.cancel_scope.cancel()
            figures = bus.statistics()
            assert (figures["publish_in_flight"], figures["publish_waiting"]) == (0, 0)
        assert await bus.publish(summary(2000)) >= 1


async def test_pitfall_08_a_full_socket_does_not_swallow_cancellation(tmp_path: Path) -> None:
    """More bytes than the socket takes wait: the caller who is cancelled ends at once, and as cancelled."""
    async with served(tmp_path, limits=Limits(window_bytes=1 << 30)) as (handle, bus):
        with stopped(handle.pid):
            task = asyncio.ensure_future(bus.publish_all(rejected(number, 4 << 20) for number in range(60)))
            await until(lambda: bus.statistics()["publish_in_flight"] == 60, "a backlog")
            start = anyio.current_time()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert anyio.current_time() - start < 5.0
            assert bus.statistics()["publish_in_flight"] == 0


async def test_pitfall_11_a_publish_given_up_during_an_outage_is_not_stored_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as (handle, bus):
        await bus.publish(summary(0))
        async with outage(handle, bus, monkeypatch):
            for number in (1, 2):
                with anyio.move_on_after(0.02):
                    await bus.publish(summary(number))
        assert await bus.publish(summary(1)) == 2
        assert await bus.publish(summary(1)) == 2
        assert [record.message.round async for record in bus.replay("EVENT")] == [0, 1]


async def test_pitfall_12_an_outage_freezes_the_window_and_overflows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path) as (handle, bus):
        sequences: list[int] = []

        async def publish() -> None:
            sequences.extend(await bus.publish_all(rejected(number, 1_000_000) for number in range(40)))

        with anyio.fail_after(15):
            async with anyio.create_task_group() as group, outage(handle, bus, monkeypatch):
                group.start_soon(publish)
                await until(
                    lambda: bus.statistics()["publish_in_flight_bytes"] > 15 << 20, "the frozen window"
                )
                figures = bus.statistics()
                assert figures["publish_in_flight_bytes"] <= 16 << 20
                assert bus.connection.client.pending_data_size < 10_000
        assert sequences == list(range(1, 41))


async def test_pitfall_17_what_nobody_waits_for_is_stored_nevertheless(nats_url: str) -> None:
    """No stream keeps only what has a consumer: the server would accept messages and forget them."""
    async with nats_world(nats_url) as w:
        bus = w.bus
        for kind in STREAMS:
            config = (await bus.connection.api(f"STREAM.INFO.{bus.names.stream(kind)}"))["config"]
            assert config["retention"] in ("limits", "workqueue")
        await bus.publish_all([summary(1), ticket(1)])
        assert (await bus.stream_info("EVENT")).messages == 1
        assert (await bus.stream_info("TASK")).messages == 1


@pytest.mark.parametrize("answer", [b"", b"thank you"])
async def test_pitfall_18_a_listener_is_not_taken_for_a_stream(nats_url: str, answer: bytes) -> None:
    async with nats_world(nats_url) as w:
        bus = w.bus
        bus.publisher.limits = Limits(ack_seconds=0.1, unanswered=2, absent_seconds=0.3)
        async with stand_in(nats_url, bus, "EVENT", answer) as heard:
            expected = "makes no sense" if answer else "without an answer. .*not provisioned"
            with anyio.fail_after(5), pytest.raises(BusError, match=expected):
                await bus.publish(summary(1))
            assert heard


async def test_pitfall_18_no_stream_and_no_listener_says_so(nats_url: str) -> None:
    limits = Limits(absent_seconds=0.3)
    async with connect(nats_url, run="nobody", role="x", instance="1", token=TOKEN, limits=limits) as bus:
        with pytest.raises(BusError, match=r"no stream takes spade\.nobody") as caught:
            await bus.publish(summary(1))
        assert "provisioned" in caught.value.remedy
        with pytest.raises(BusError, match="provisioned"):
            async with bus.follow("EVENT"):
                pass


async def test_pitfall_19_a_flood_is_stored_to_the_last_message(nats_url: str) -> None:
    """Thousands of publishers at once.

    What returned is stored, and the server never owes more than the window.
    """
    async with nats_world(nats_url) as w:
        bus = w.bus
        returned: list[int] = []
        most = 0.0

        async def publish(number: int) -> None:
            nonlocal most
            returned.append(await bus.publish(summary(number)))
            most = max(most, bus.statistics()["publish_in_flight"])

        with anyio.fail_after(20):
            async with anyio.create_task_group() as group:
                for number in range(700):
                    group.start_soon(publish, number)
        assert sorted(returned) == list(range(1, 701))
        assert (await bus.stream_info("EVENT")).messages == 700
        assert 0 < most <= 256


@contextmanager
def guarded_server(directory: Path) -> Iterator[str]:
    """A server with two users: ``all`` may do everything, ``few`` may not write events or take work."""
    deny = '["spade.*.event.>", "$JS.API.CONSUMER.MSG.NEXT.>"]'
    users = (
        'users: [ { user: "all", password: "p" },'
        f' {{ user: "few", password: "p", permissions: {{ publish: {{ deny: {deny} }},'
        ' subscribe: { deny: ["spade.*.hb.>"] } } } ]'
    )
    with plain_server(directory, f"{USUAL}authorization {{ {users} }}\n") as url:
        yield url


async def test_pitfall_30_what_is_denied_is_said_at_once(tmp_path: Path) -> None:
    with guarded_server(tmp_path) as url:
        await provision(url.replace("//", "//all:p@"), run=RUN, store_gb=0.25)
        async with connect(url.replace("//", "//few:p@"), run=RUN, role="x", instance="1") as bus:
            with (
                anyio.fail_after(2),
                pytest.raises(Denied, match=r"publish to spade\.trouble\.event\.scorer"),
            ):
                await bus.publish(summary(1))
            with anyio.fail_after(4), pytest.raises(Denied, match=r"MSG\.NEXT\.TASK_trouble\.designer"):
                async with bus.consume("designer", limit=1) as source:
                    await anext(source)
            with anyio.fail_after(4), pytest.raises(Denied, match=r"subscribe to spade\.trouble\.hb"):
                async with bus.listen("hb.>") as messages:
                    await anext(messages)
            assert await bus.publish(ticket(1)) == 1
            figures = bus.statistics()
            assert figures["connection_denied"] == 3
            assert figures["publish_in_flight"] == 0


async def test_pitfall_30_an_absent_peer_is_no_denial(nats_url: str) -> None:
    async with nats_world(nats_url) as w, w.bus.consume("designer", limit=1) as source:
        assert await nothing_comes(source)
        with contextlib.suppress(BusError):
            await w.bus.state_update("key", b"x", 9)
        await w.bus.publish(ticket(1))
        assert (await take(source, 1))[0].message == ticket(1)
        assert w.bus.statistics()["connection_denied"] == 0
