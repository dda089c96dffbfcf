"""A worker whose host vanishes says no good-bye: the broker takes it for alive for minutes, and serves it."""

from __future__ import annotations

from dataclasses import replace
from time import monotonic

import anyio
import pytest
from bus_examples import ticket
from bus_proxy import proxied
from bus_worlds import TOKEN, nats_world

from bus import Delivery, connect
from bus.pull import PullSettings
from bus.subjects import CONSUMERS

pytestmark = pytest.mark.slow
LEASE = 3.0
SLACK = 4.0  # for a busy machine


async def test_what_it_is_served_comes_back_after_a_lease_and_one_request(nats_url: str) -> None:
    """Work was asked for before the host was lost; what comes then is served to nobody, once."""
    consumer = replace(CONSUMERS["designer"], ack_seconds=LEASE)
    async with nats_world(nats_url, consumer) as world, proxied(nats_url) as proxy:
        login = {"run": world.bus.run, "role": "tester", "instance": "lost", "token": TOKEN}
        async with connect(proxy.url, **login) as lost, lost.consume("designer", limit=64):
            while (await queue_of(world.aside))["num_waiting"] == 0:  # noqa: ASYNC110 - nobody tells
                await anyio.sleep(0.02)
            proxy.flowing.clear()
            await world.bus.publish_all(map(ticket, range(32)))
            gone, found = monotonic(), dict[int, Delivery]()
            async with world.bus.consume("designer", limit=64) as source:
                with anyio.fail_after(60):
                    while len(found) < 32:
                        delivery = await anext(source)
                        found[delivery.sequence] = delivery
                        await delivery.ack()
            assert monotonic() - gone < LEASE + PullSettings().expires + SLACK
            assert max(delivery.attempt for delivery in found.values()) > 1, "some went the wrong way"
            proxy.flowing.set()


async def queue_of(bus: object) -> dict[str, int]:
    stream = bus.names.stream("TASK")  # type: ignore[attr-defined]
    return await bus.connection.api(f"CONSUMER.INFO.{stream}.designer")  # type: ignore[attr-defined,no-any-return]
