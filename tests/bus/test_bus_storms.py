"""The bus in a storm, with exact ledgers: connections cut at any byte, crowds, cancellation, silence."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel
import psutil
import pytest
from bus_examples import summary, ticket
from bus_proxy import proxied
from bus_trouble import RUN, freeze, rejected, served, until
from bus_worlds import TOKEN, plain_server, shorten_leases

from bus import Bus, connect, provision
from bus.messages import DesignRejected, RoundSummary

MB = 1 << 20
pytestmark = pytest.mark.slow


def join(url: str, instance: str, **options: object) -> object:
    return connect(url, run=RUN, role="tester", instance=instance, token=TOKEN, **options)


def hasten(bus: Bus) -> Bus:
    """Let a client notice silence and come back within a moment."""
    client = bus.connection.client
    client.options.update(reconnect_time_wait=0.01, ping_interval=0.1, connect_timeout=0.3)
    client._ping_interval_task.cancel()  # it sleeps for the interval of before
    client._ping_interval_task = asyncio.get_running_loop().create_task(client._ping_interval())
    return bus


async def ledger(bus: Bus) -> dict[int, int]:
    """Return where each event lies, by its number; fails when one lies there twice."""
    places: dict[int, int] = {}
    async for record in bus.replay("EVENT", tails=["event.designer.rejected"]):
        assert isinstance(record.message, DesignRejected)
        assert record.message.attempt not in places, "stored twice"
        places[record.message.attempt] = record.sequence
    return places


@pytest.mark.parametrize("seed", [1, 2])
async def test_connections_cut_at_any_byte_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    """Sizes from one byte to eight megabytes, to and from a server whose connections are cut 40 times."""
    chance = random.Random(seed)
    sizes = [chance.choice((1, 30, 900, 20_000, 150_000)) for _ in range(150)]
    sizes[40], sizes[80], sizes[120] = 8 * MB - 10_000, MB, 3 * MB
    tickets = 60
    with plain_server(tmp_path) as url:
        await provision(url, run=RUN, token=TOKEN, store_gb=0.5)
        async with proxied(url) as proxy, join(proxy.url, "cut") as bus, join(url, "whole") as whole:
            await shorten_leases(whole, 1.0)
            acked: dict[int, int] = {}
            seen: list[tuple[int, int]] = []
            done: Counter[int] = Counter()

            async def follow() -> None:
                async with bus.follow("EVENT", tails=["event.designer.rejected"]) as records:
                    async for record in records:
                        seen.append((record.sequence, record.message.attempt))  # noqa: PERF401 (others look at it)

            async def work() -> None:
                async with bus.consume("designer", limit=8) as source:
                    async for delivery in source:
                        await bus.publish(summary(delivery.message.slot))
                        done[delivery.message.slot] += 1
                        await delivery.ack()

            async def publish(share: int) -> None:
                for number in range(share, len(sizes), 6):
                    acked[number] = await bus.publish(rejected(number, sizes[number]))

            async def task() -> None:
                for number in range(tickets):
                    await bus.publish(ticket(number))

            with anyio.fail_after(50):
                async with anyio.create_task_group() as group:
                    group.start_soon(follow)
                    group.start_soon(work)
                    await until(lambda: len(bus._open) == 2, "both readers")
                    proxy.cut_after(chance.choice((7, 200, 3000, 60_000, 400_000)) for _ in range(40))
                    group.start_soon(task)
                    async with anyio.create_task_group() as publishers:
                        for share in range(6):
                            publishers.start_soon(publish, share)
                    await until(lambda: len(seen) >= len(sizes) and len(done) == tickets, "the end", 40)
                    group.cancel_scope.cancel()
            assert proxy.cut > 10
            places = await ledger(whole)
            assert places == acked
            assert seen == sorted((sequence, number) for number, sequence in places.items())
            results = [
                record.message.round
                async for record in whole.replay("EVENT", tails=["event.scorer.round"])
                if isinstance(record.message, RoundSummary)
            ]
            assert sorted(results) == list(range(tickets))
            assert bus.statistics()["publish_in_flight"] == 0


async def test_a_slow_line_is_slow_and_nothing_else(tmp_path: Path) -> None:
    """Lines and bodies arrive in pieces of a few bytes."""
    with plain_server(tmp_path) as url:
        await provision(url, run=RUN, token=TOKEN, store_gb=0.25)
        async with proxied(url) as proxy:
            proxy.piece = 11
            async with join(proxy.url, "slow") as bus:
                sequences = await bus.publish_all([rejected(number, 300 * number) for number in range(12)])
                async with bus.follow("EVENT") as records:
                    read = [await anext(records) for _ in range(12)]
        assert [record.sequence for record in read] == sequences
        assert [len(record.message.reason) for record in read] == [300 * number for number in range(12)]


# Silence.


def sockets_to(url: str) -> int:
    """Return how many sockets of this process have to do with a server."""
    port = int(url.rsplit(":", 1)[1])
    return sum(bool(one.raddr) and one.raddr.port == port for one in psutil.Process().net_connections())


async def fill(bus: Bus, acked: dict[int, int], numbers: range) -> None:
    """Publish more than the buffers of a connection hold."""

    async def one(number: int) -> None:
        acked[number] = await bus.publish(rejected(number, 900_000))

    async with anyio.create_task_group() as group:
        for number in numbers:
            group.start_soon(one, number)


async def test_a_line_that_swallows_everything_is_left_for_another(tmp_path: Path) -> None:
    """Bytes written into a dead connection do not delay its end."""
    with plain_server(tmp_path) as url:
        await provision(url, run=RUN, token=TOKEN, store_gb=0.25)
        async with proxied(url) as proxy, join(proxy.url, "hole") as bus:
            await bus.publish(rejected(0, 1))
            hasten(bus)
            bus.connection.client.set_server_pool([url])
            acked: dict[int, int] = {}
            proxy.flowing.clear()
            with anyio.fail_after(10):
                await fill(bus, acked, range(1, 16))
            assert bus.connection.client.connected_url.port == int(url.rsplit(":", 1)[1])
            places = await ledger(bus)
            assert {number: places[number] for number in acked} == acked


async def test_a_frozen_server_costs_no_sockets(tmp_path: Path) -> None:
    """Each try to come back ends before the next one begins."""
    async with served(tmp_path) as (handle, bus):
        hasten(bus)
        acked: dict[int, int] = {}
        tries: list[int] = []
        bus.connection.client._error_cb = noted(tries)
        freeze(handle.pid)
        async with anyio.create_task_group() as group:
            group.start_soon(fill, bus, acked, range(10))
            await until(lambda: len(tries) > 4, "tries", 15)
            assert sockets_to(handle.url) <= 2
            os.kill(handle.pid, signal.SIGCONT)
        assert await ledger(bus) == acked
        assert sockets_to(handle.url) == 1


def noted(into: list[int]) -> Callable[[Exception], object]:
    async def note(error: Exception) -> None:
        into.append(1)

    return note
