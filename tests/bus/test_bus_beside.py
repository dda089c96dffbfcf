"""Large bodies and presence where they meet the rest: allow-lists, a full store."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from brokers import Broker, broker
from bus_examples import example, request
from bus_worlds import nats_world, take

from bus import NatsBus, connect, provision
from bus.messages import EpisodeFinished, RoleHello, SampleReady
from bus.subjects import PIECES

RUN = "beside"
LARGE = 1 << 16


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.claims._CHECK_SECONDS", (0.03, 0.2, 2.0))


@asynccontextmanager
async def joined(secured: Broker, role: str) -> AsyncIterator[NatsBus]:
    joining: dict[str, Any] = {"run": RUN, "role": role, "instance": f"{role}-0", **secured.login(role)}
    async with connect(secured.url, inline=4096, **joining) as bus:
        yield bus


async def test_each_role_may_send_large_bodies_and_say_that_it_is_there(tmp_path: Path) -> None:
    """Also the cleaning: a body goes with its task, and with the samples the learner purges."""
    with broker(tmp_path, RUN, tls=False) as secured:
        await provision(secured.url, run=RUN, store_gb=1, **secured.login())
        async with (
            joined(secured, "scorer") as scorer,
            joined(secured, "agent") as agent,
            joined(secured, "learner") as learner,
            agent.announce(RoleHello(role="agent", instance="agent-0", since=1)),
            learner.announce(RoleHello(role="learner", instance="learner-0", since=1)),
        ):
            assert [one.hello.role for one in await scorer.present()] == ["agent", "learner"]
            work = msgspec.structs.replace(request(1), source="s" * LARGE)
            await scorer.publish(work)
            async with agent.consume("agent", limit=1) as queue:
                (delivery,) = await take(queue, 1)
                assert delivery.message == work
                played = example(EpisodeFinished, reason="r" * LARGE)
                await agent.publish(played)
                await delivery.ack()
            async with scorer.follow("EVENT", tails=["event.agent.>"]) as facts:
                assert (await take(facts, 1))[0].message == played
            sample = example(SampleReady, role="agent", group="g" * LARGE)
            await scorer.publish(sample)
            async with learner.follow("SAMPLE") as samples:
                (record,) = await take(samples, 1)
            assert record.message == sample
            assert await learner.purge("SAMPLE", below=record.sequence + 1) == 1
            await scorer.claims.sweep()  # the agent may not look whether its task is gone
            async with joined(secured, "supervisor") as admin:
                left = {kind: (await admin.stream_info(kind)).messages for kind in PIECES}
                assert left == {"BODY": 0, "EVENTBODY": 1, "BLOB": 0}
                assert await admin.get("EVENT", 1) == played


async def test_a_full_store_of_bodies_makes_publishers_wait(nats_url: str) -> None:
    """Twenty bodies of 3 MB through a store of 8 MB: finished work makes room for the next."""
    async with nats_world(nats_url, store_gb=0.049) as w:
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
            assert len(stored) < math.ceil(8 / 3)
            seen = []
            async with agent.consume("agent", limit=1) as queue:
                for _ in bodies:
                    (delivery,) = await take(queue, 1)
                    seen.append(delivery.message.index)
                    await delivery.ack()
        assert seen == list(range(20))
