"""Named bytes and large messages where they meet allow-lists and a full store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from bus_examples import request
from bus_worlds import nats_world, take
from scenes.brokers import Broker, broker

from bus import BusError, NatsBus, connect, provision

RUN = "beside"


@asynccontextmanager
async def joined(secured: Broker, role: str) -> AsyncIterator[NatsBus]:
    joining: dict[str, Any] = {"run": RUN, "role": role, "instance": f"{role}-0", **secured.login(role)}
    async with connect(secured.url, **joining) as bus:
        yield bus


async def test_each_role_reads_named_bytes_that_only_the_learner_writes(tmp_path: Path) -> None:
    with broker(tmp_path, RUN, tls=False) as secured:
        await provision(secured.url, run=RUN, store_gb=1, **secured.login())
        async with (
            joined(secured, "agent") as agent,
            joined(secured, "learner") as learner,
            joined(secured, "server") as server,
        ):
            await learner.blobs.put("weights", b"first" * 1_000_000)
            await learner.blobs.put("weights", b"second")
            assert await server.blobs.get("weights") == b"second"
            with anyio.fail_after(5), pytest.raises(BusError, match="does not allow us to publish"):
                await agent.blobs.put("weights", b"false")
            assert await learner.blobs.remove("weights")
            assert (await learner.stream_info("EVENT")).messages == 0


async def test_large_messages_wait_for_room(nats_url: str) -> None:
    """Twenty tasks of 3 MB through a stream of 8 MB: finished work makes room for the next."""
    async with nats_world(nats_url, store_gb=0.2) as w:
        bodies = [msgspec.structs.replace(request(number), source="s" * (3 << 20)) for number in range(20)]
        stored: list[int] = []

        async def produce() -> None:
            for body in bodies:
                stored.append(await w.bus.publish(body))  # noqa: PERF401 (others look at it as it grows)

        async with w.peer("agent", "two") as agent, anyio.create_task_group() as group:
            group.start_soon(produce)
            with anyio.fail_after(10):
                while w.bus.statistics()["publish_full"] < 1:  # noqa: ASYNC110 (a figure has no event)
                    await anyio.sleep(0.01)
            assert len(stored) < 3
            seen = []
            async with agent.consume("agent", limit=1) as queue:
                for _ in bodies:
                    (delivery,) = await take(queue, 1)
                    seen.append(delivery.message.index)
                    await delivery.ack()
        assert seen == list(range(20))
