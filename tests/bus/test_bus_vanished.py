"""A worker whose host vanishes says no good-bye: the broker takes it for alive for minutes, and serves it."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from bus_examples import ticket
from bus_proxy import proxied
from bus_worlds import TOKEN, nats_world

from bus import Delivery, connect
from bus import pull as pulling
from bus.subjects import CONSUMERS

pytestmark = pytest.mark.slow
LEASE, REQUEST = 3.0, 8.0
WORK, LIMIT = 4, 64  # the request would last for 16 times the work
PATIENCE = 60.0  # the broker would take the host for alive for longer


def test_work_comes_back_as_soon_as_the_documentation_says() -> None:
    assert CONSUMERS["designer"].ack_seconds + pulling._EXPIRES_SECONDS <= 35


async def test_what_it_is_served_comes_back_after_a_lease_and_one_request(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work was asked for before the host was lost; what comes then is served to nobody while that lasts."""
    monkeypatch.setattr(pulling, "_EXPIRES_SECONDS", REQUEST)
    async with nats_world(nats_url, lease_seconds=LEASE) as world, proxied(nats_url) as proxy:
        login = {"run": world.bus.run, "role": "tester", "instance": "lost", "token": TOKEN}
        async with connect(proxy.url, **login) as lost, lost.consume("designer", limit=LIMIT):
            await until(world.aside, lambda queue: queue["num_waiting"] > 0)
            proxy.flowing.clear()
            await world.bus.publish_all(map(ticket, range(WORK)))
            await until(world.aside, lambda queue: queue["num_ack_pending"] == WORK)
            await until(world.aside, lambda queue: queue["num_waiting"] == 0)
            found = dict[int, Delivery]()
            async with world.bus.consume("designer", limit=LIMIT) as source:
                with anyio.fail_after(PATIENCE):
                    while len(found) < WORK:
                        delivery = await anext(source)
                        found.setdefault(delivery.sequence, delivery)
                        await delivery.ack()
            in_vain = {delivery.attempt - 1 for delivery in found.values()}
            assert min(in_vain) >= 1, "all of it went the wrong way"
            assert max(in_vain) <= 1 + REQUEST // LEASE, "and no more once the request had ended"
            proxy.flowing.set()


async def until(bus: object, holds: Callable[[dict[str, int]], bool]) -> None:
    """Wait until the broker's account of the queue is so."""
    with anyio.fail_after(PATIENCE):
        while not holds(await queue_of(bus)):  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.02)


async def queue_of(bus: object) -> dict[str, int]:
    stream = bus.names.stream("TASK")  # type: ignore[attr-defined]
    return await bus.connection.api(f"CONSUMER.INFO.{stream}.designer")  # type: ignore[attr-defined,no-any-return]
