"""Pitfalls of the connection, by their number in docs/bus-pitfalls.md."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest
from bus_examples import example, summary, ticket
from bus_trouble import RUN, delay_restarts, rejected, served, until
from bus_worlds import TOKEN, nats_world, plain_server, take

from bus import BusUnavailable, connect, provision
from bus.messages import Heartbeat


async def test_pitfall_09_a_dead_read_loop_is_revived(nats_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled flush kills nats-py's read loop: the connection looks well and hears nothing."""
    monkeypatch.setattr(sys.modules["bus.connection"], "_WATCHDOG_SECONDS", 0.2)
    async with nats_world(nats_url) as w:
        client = w.bus.connection.client
        with anyio.fail_after(10):
            while not client._reading_task.done():
                flush = asyncio.ensure_future(client.flush())
                await asyncio.sleep(0)
                flush.cancel()
                await asyncio.sleep(0.01)
        assert client.is_connected
        async with w.bus.follow("EVENT") as source:
            await w.bus.publish(summary(1))
            with anyio.fail_after(10):
                assert (await anext(source)).message == summary(1)
        assert w.bus.statistics()["connection_revived"] == 1


async def test_pitfall_09_no_wait_of_ours_kills_the_read_loop(nats_url: str) -> None:
    """Everything that waits for the server is cancelled at every moment it can be."""
    async with nats_world(nats_url) as w:
        bus = w.bus

        async def listen() -> None:
            async with bus.listen("hb.>"):
                pass

        async def work() -> None:
            async with bus.consume("agent", limit=1):
                pass

        waits: tuple[Callable[[], Awaitable[object]], ...] = (
            bus.connection.barrier,
            lambda: bus.stream_info("EVENT"),
            lambda: bus.publish(summary(1)),
            listen,
            work,
        )
        for wait in waits:
            for turns in range(25):
                task = asyncio.ensure_future(wait())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        with anyio.fail_after(5):
            await bus.connection.barrier()
            await bus.publish(summary(2))
        figures = bus.statistics()
        assert (figures["connection_revived"], figures["connection_disconnects"]) == (0, 0)
        assert (figures["publish_in_flight"], figures["publish_waiting"]) == (0, 0)


async def test_pitfall_10_who_listens_hears_all_that_comes_afterwards(nats_url: str) -> None:
    async with nats_world(nats_url) as w, w.peer("tester", "two") as other:
        for number in range(60):
            async with other.listen("hb.>") as source:
                await w.bus.publish(example(Heartbeat, instance=str(number)))
                (message,) = await take(source, 1, 2)
                assert message.instance == str(number)


async def test_pitfall_13_no_outage_is_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More failed attempts to reconnect than the 60 after which nats-py would give up."""
    delay_restarts(monkeypatch, 3.0)
    async with served(tmp_path) as (handle, bus):
        client = bus.connection.client
        client.options["reconnect_time_wait"] = 0.005
        attempts: list[int] = []
        real = bus.connection._on_error

        async def count(error: Exception) -> None:
            attempts.append(1)
            await real(error)

        client._error_cb = count
        os.kill(handle.pid, signal.SIGKILL)
        await until(lambda: len(attempts) > 70, "many attempts", 20)
        assert not client.is_closed
        with anyio.fail_after(10):
            assert await bus.publish(summary(1)) == 1


async def test_pitfall_13_a_connection_that_is_closed_for_good_ends_every_wait(nats_url: str) -> None:
    async with nats_world(nats_url) as w, w.peer("tester", "two") as bus:
        ended: list[str] = []

        async def wait(name: str, call: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(BusUnavailable, match="closed"):
                await call()
            ended.append(name)

        async def work() -> None:
            async with bus.consume("designer", limit=1) as source:
                await anext(source)

        async def read() -> None:
            async with bus.follow("EVENT") as source:
                await anext(source)

        async def hear() -> None:
            async with bus.listen("hb.>") as source:
                await anext(source)

        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(wait, "hear", hear)
                group.start_soon(wait, "work", work)
                group.start_soon(wait, "read", read)
                await until(lambda: len(bus._open) == 2, "both readers")
                await anyio.sleep(0.05)
                await bus.connection.client.close()
                group.start_soon(wait, "publish", lambda: bus.publish(summary(1)))
                group.start_soon(wait, "info", lambda: bus.stream_info("EVENT"))
        assert sorted(ended) == ["hear", "info", "publish", "read", "work"]


async def test_pitfall_25_leaving_waits_for_no_deadline_and_forgets_nothing_on_its_way(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that is still travelling to a worker that leaves is handed back, not left to its lease."""
    monkeypatch.setattr(sys.modules["bus.connection"], "_RETIRE_SECONDS", 60.0)
    monkeypatch.setattr(sys.modules["bus.work"], "_LEAVE_SECONDS", 60.0)
    async with nats_world(nats_url) as w, w.peer("tester", "two") as other:
        await w.bus.publish_all(ticket(number, skill="x" * 2000) for number in range(300))
        with anyio.fail_after(30):
            for _ in range(5):
                async with w.bus.consume("designer", limit=300) as source:
                    await take(source, 1)  # and with it what fits into one read of the socket
        async with other.consume("designer", limit=300) as source:
            again = await take(source, 300, 5)
        assert sorted(delivery.message.slot for delivery in again) == list(range(300))


async def test_pitfall_25_leaving_does_not_wait_for_a_server_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["bus.connection"], "_RETIRE_SECONDS", 0.1)
    monkeypatch.setattr(sys.modules["bus.work"], "_LEAVE_SECONDS", 0.2)
    async with served(tmp_path) as (handle, bus):
        await bus.publish(ticket(1))
        with anyio.fail_after(10):
            async with bus.consume("designer", limit=2) as source, bus.follow("EVENT"):
                await take(source, 1)
                os.kill(handle.pid, signal.SIGSTOP)
        os.kill(handle.pid, signal.SIGCONT)


async def test_pitfall_26_closing_without_a_server_is_quiet(tmp_path: Path) -> None:
    with plain_server(tmp_path) as url:
        await provision(url, run=RUN, token=TOKEN, store_gb=0.25)
        entered = connect(url, run=RUN, role="x", instance="1", token=TOKEN)
        bus = await entered.__aenter__()
        await bus.publish(summary(1))
    with anyio.move_on_after(0.05):
        await bus.publish_all(rejected(number, 500_000) for number in range(8))
    await bus.publish(example(Heartbeat))
    start = anyio.current_time()
    await entered.__aexit__(None, None, None)
    assert anyio.current_time() - start < 2.0
    assert bus.connection.closed


async def test_pitfall_26_closing_while_bytes_wait_is_quiet(tmp_path: Path) -> None:
    """The server dies with bytes on their way to it, and we close before anybody has noticed."""
    async with served(tmp_path) as (handle, bus):
        with anyio.fail_after(5):
            async with connect(handle.url, run=RUN, role="y", instance="2", token=handle.token) as leaving:
                os.kill(handle.pid, signal.SIGSTOP)
                with anyio.move_on_after(0.1):
                    await leaving.publish_all(rejected(number, 900_000) for number in range(16))
                os.kill(handle.pid, signal.SIGKILL)
        with anyio.fail_after(10):
            assert await bus.publish(summary(1))
