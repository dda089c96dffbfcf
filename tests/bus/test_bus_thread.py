"""The bus on a thread of its own: what it is for, cancellation, bounds, and how it ends."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from bus_examples import request, summary, ticket
from bus_worlds import TOKEN, World, nats_world, nothing_comes, take

from bus import BusError, BusUnavailable, NotFound, connect
from bus.bridge import Bridge, Channel, FarThread
from bus.interface import Bus
from bus.subjects import CONSUMERS
from bus.thread import ThreadBus

pytestmark = pytest.mark.slow

Worlds = Callable[[], AbstractAsyncContextManager[World]]


@pytest.fixture
def threaded(nats_url: str) -> Callable[[], AbstractAsyncContextManager[World]]:
    return partial(nats_world, nats_url, own_thread=True)


def test_every_method_of_a_bus_crosses_the_border() -> None:
    assert Bus.__abstractmethods__ <= set(vars(ThreadBus))


async def test_a_role_that_blocks_its_loop_keeps_its_work(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pitfall 31: a loop is blocked for 3 s, the leases are 1 s, and another worker waits for both kinds.

    The designer's bus has its own thread, the agent's lives in the loop.
    """
    slow = [replace(CONSUMERS[name], ack_seconds=1.0) for name in ("designer", "agent")]
    for consumer in slow:
        monkeypatch.setitem(CONSUMERS, consumer.name, consumer)
    again: list[tuple[str, int]] = []

    async def rob(run: str) -> None:
        joining = {"run": run, "role": "rival", "instance": "1", "token": TOKEN}
        async with connect(nats_url, **joining) as bus, anyio.create_task_group() as group:
            with anyio.move_on_after(3.5):
                for name in CONSUMERS:
                    group.start_soon(take_all, bus, name)
                await anyio.sleep_forever()
            group.cancel_scope.cancel()

    async def take_all(bus: Bus, name: str) -> None:
        async with bus.consume(name, limit=1) as source:
            async for delivery in source:
                again.append((name, delivery.attempt))
                await delivery.ack()

    async with nats_world(nats_url, *slow, own_thread=True) as w:
        await w.bus.publish_all([ticket(1), request(1)])
        plain = w.aside
        async with w.bus.consume("designer", limit=1) as mine, plain.consume("agent", limit=1) as other:
            (design,), (play,) = await take(mine, 1), await take(other, 1)
            rival = threading.Thread(target=anyio.run, args=(rob, w.bus.run))
            rival.start()
            time.sleep(3.0)  # noqa: ASYNC251 (this is the fault)
            await design.ack()
            await play.ack()
            await anyio.to_thread.run_sync(rival.join)
    assert again == [("agent", 2)]


async def test_a_cancelled_call_is_cancelled_over_there(threaded: Worlds) -> None:
    async with threaded() as w:
        await w.limit_tasks(1)
        await w.bus.publish(ticket(1))
        with anyio.move_on_after(0.2) as scope:
            await w.bus.publish(ticket(2))
        assert scope.cancelled_caught
        figures = w.bus.statistics()
        assert figures["thread_in_flight"] == 0
        assert figures["publish_in_flight"] == 0
        with anyio.move_on_after(0.1) as scope:
            async with w.bus.lease("leader.x", ttl=1.0), w.bus.lease("leader.x", ttl=1.0):
                pass
        assert scope.cancelled_caught
        async with w.bus.lease("leader.x", ttl=1.0, wait=3.0):
            pass


async def test_errors_are_raised_where_they_belong(threaded: Worlds) -> None:
    async with threaded() as w:
        with pytest.raises(NotFound):
            await w.bus.get("EVENT", 7)
        with pytest.raises(BusError, match="characters"):
            await w.bus.state_put("no spaces", b"")
        with pytest.raises(ZeroDivisionError):
            await w.bus.publish_all(summary(1 // number) for number in (1, 0))

        async def fail() -> None:
            async with w.bus.follow("EVENT"):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()


async def test_a_reader_that_fails_over_there_ends_the_body_here(threaded: Worlds) -> None:
    async with threaded() as w:
        api, name = w.aside.connection.api, w.aside.names.stream("EVENT")

        async def follow() -> None:
            async with w.bus.follow("EVENT"):
                await api(f"STREAM.DELETE.{name}")
                await anyio.sleep(30)

        with pytest.raises(NotFound):
            await follow()
        await api(f"STREAM.CREATE.{name}", {"name": name, "subjects": [w.aside.names.subject("event.>")]})


async def test_little_lies_between_the_threads(threaded: Worlds) -> None:
    async with threaded() as w:
        await w.bus.publish_all(map(summary, range(1500)))
        async with w.bus.follow("EVENT") as source:
            assert (await take(source, 1))[0].sequence == 1
            await anyio.sleep(0.2)
            assert len(source) <= 64
            assert w.bus.statistics()["follow_event_unread"] >= 300
            assert [record.sequence for record in await take(source, 1499)] == list(range(2, 1501))
            assert await nothing_comes(source)


async def test_a_blocked_loop_keeps_its_lease(threaded: Worlds) -> None:
    async with threaded() as w, w.bus.lease("leader.x", ttl=1.0) as lease:
        time.sleep(1.6)  # noqa: ASYNC251 (this is the fault)
        await anyio.lowlevel.checkpoint()
        assert not lease.lost.is_set()
        with pytest.raises(BusUnavailable):
            async with w.aside.lease("leader.x", ttl=1.0, wait=0.1):
                pass


async def test_the_thread_ends_with_its_bus(nats_url: str, threaded: Worlds) -> None:
    async with threaded() as w:
        before = threading.active_count()
        joining = {"run": w.bus.run, "role": "x", "instance": "1", "token": TOKEN}
        async with connect(nats_url, own_thread=True, **joining) as bus:
            assert threading.active_count() > before
            await bus.publish(summary(1))
        assert threading.active_count() == before
        with pytest.raises(BusUnavailable):
            await bus.publish(summary(2))


async def test_a_server_that_is_not_there_is_told_at_once() -> None:
    joining = {"run": "r", "role": "x", "instance": "1", "connect_seconds": 0.3}
    with pytest.raises(BusUnavailable, match="connection to"):
        async with connect("nats://127.0.0.1:1", own_thread=True, **joining):
            pass
    with anyio.move_on_after(0.1) as scope:
        async with connect("nats://127.0.0.1:1", own_thread=True, **joining):
            pass
    assert scope.cancelled_caught


# The bridge by itself.


@asynccontextmanager
async def bridge_to(context: object = None) -> AsyncIterator[Bridge]:
    @asynccontextmanager
    async def nothing() -> AsyncIterator[None]:
        yield

    thread = FarThread(nothing, "far")
    await thread.start()
    try:
        yield thread.bridge
    finally:
        await thread.stop()


async def test_calls_run_on_the_other_thread() -> None:
    async with bridge_to() as bridge:

        async def where() -> int:
            await anyio.lowlevel.checkpoint()
            return threading.get_ident()

        assert await bridge.call(where) != threading.get_ident()
        found: list[int] = []

        async def several() -> None:
            found.append(await bridge.call(where))

        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(several)
        assert len(found) == 50
        assert len(set(found)) == 1


async def test_posts_are_carried_out_in_order_before_what_is_closed_later() -> None:
    done: list[int] = []

    async def note(number: int) -> None:
        await anyio.sleep(0.001 * (number % 3))
        done.append(number)

    @asynccontextmanager
    async def context() -> AsyncIterator[None]:
        yield
        done.append(-1)

    async with bridge_to() as bridge:
        async with bridge.hold(context):
            for number in range(20):
                bridge.post(partial(note, number))
        assert done == [*range(20), -1]


@pytest.fixture
def restless() -> Iterator[None]:
    """Let the threads change as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("restless")
async def test_a_channel_loses_nothing_in_a_race() -> None:
    async def numbers() -> AsyncIterator[int]:
        for number in range(20_000):
            if number % 997 == 0:
                await anyio.lowlevel.checkpoint()
            yield number

    async with bridge_to() as bridge:
        channel = Channel[int](bridge, 16, weight=lambda number: 1 + number % 3)

        async with anyio.create_task_group() as group:
            group.start_soon(bridge.call, lambda: channel.serve(numbers()))
            with anyio.fail_after(20):
                assert [number async for number in channel] == list(range(20_000))


async def test_an_item_that_comes_between_looking_and_waiting_is_seen() -> None:
    class Late(deque[int]):
        """Is empty at the first look; then the far side adds an item, and sees nobody who waits."""

        def __bool__(self) -> bool:
            if not self.looked:
                self.looked = True
                self.append(7)
                channel._call_home()
                return False
            return len(self) > 0

        looked = False

    async with bridge_to() as bridge:
        channel = Channel[int](bridge, 16)
        channel._items = Late()
        with anyio.fail_after(2):
            assert await anext(channel) == 7


async def test_a_thread_that_dies_ends_what_waits_for_it() -> None:
    @asynccontextmanager
    async def broken() -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            group.start_soon(fail)
            yield

    async def fail() -> None:
        await anyio.sleep(0.1)
        raise ZeroDivisionError

    thread = FarThread(broken, "far")
    await thread.start()
    with pytest.raises(BusUnavailable, match="thread of the bus"):
        await thread.bridge.call(anyio.sleep_forever)
    with pytest.raises(ExceptionGroup):
        await thread.watch()
    await thread.stop()
