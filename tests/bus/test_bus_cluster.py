"""Three servers on loopback, each stream on all of them: leaders die under load, and nobody notices much."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import pytest
from brokers import Broker, broker
from bus_examples import example, request

from bus import BusError, NatsBus, connect, provision
from bus.access import ADMIN
from bus.messages import EpisodeFailed, EpisodeRequest, SampleReady
from bus.subjects import BUCKETS, CONSUMERS, STREAMS

RUN = "clustered"
BATCH = 20
MORE = 1_000
ACK_SECONDS = 10.0
PROGRESS_SECONDS = 40.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("cluster"), RUN, servers=3, tls=True) as running:
        yield running


@dataclass
class Load:
    """What clients were promised and what they got, by message id."""

    acked: dict[str, int] = field(default_factory=dict)
    seen: list[tuple[int, str]] = field(default_factory=list)
    worked: Counter[str] = field(default_factory=Counter)
    asked: set[str] = field(default_factory=set)
    news: anyio.Event = field(default_factory=anyio.Event)
    longest_gap: float = 0.0

    def tell(self) -> None:
        self.news.set()
        self.news = anyio.Event()

    async def until(self, what: str, reached: Callable[[], bool]) -> None:
        with anyio.move_on_after(PROGRESS_SECONDS) as scope:
            while not reached():
                await self.news.wait()
        assert not scope.cancelled_caught, f"no {what} within {PROGRESS_SECONDS:g} s: {self.figures()}"

    def figures(self) -> dict[str, int]:
        return {"acked": len(self.acked), "seen": len(self.seen), "worked": len(self.worked)}

    async def publish(self, bus: NatsBus, stop: anyio.Event) -> None:
        last = time.monotonic()
        while not stop.is_set():
            number = len(self.acked)
            samples = [example(SampleReady, sample=f"s{number + index}") for index in range(BATCH)]
            task = request(number)
            sequences = await bus.publish_all([*samples, task])
            self.asked.add(task.episode)
            self.acked.update(zip((sample.sample for sample in samples), sequences, strict=False))
            now = time.monotonic()
            self.longest_gap, last = max(self.longest_gap, now - last), now
            self.tell()

    async def follow(self, bus: NatsBus) -> None:
        async with bus.follow("SAMPLE") as records:
            async for record in records:
                assert isinstance(record.message, SampleReady)
                self.seen.append((record.sequence, record.message.sample))
                self.tell()

    async def work(self, bus: NatsBus) -> None:
        async with bus.consume("agent", limit=8) as deliveries:
            async for delivery in deliveries:
                assert isinstance(delivery.message, EpisodeRequest)
                await bus.publish(example(EpisodeFailed, episode=delivery.message.episode))
                self.worked[delivery.message.episode] += 1
                await delivery.ack()
                self.tell()


async def leader(bus: NatsBus, stream: str) -> str:
    info = await bus.connection.api(f"STREAM.INFO.{bus.names.stream(stream)}", seconds=30.0)
    return str(info["cluster"]["leader"])


async def three_current(bus: NatsBus, stream: str) -> None:
    """Return when all three servers hold the stream again."""
    with anyio.fail_after(PROGRESS_SECONDS):
        while True:
            info = await bus.connection.api(f"STREAM.INFO.{bus.names.stream(stream)}", seconds=30.0)
            followers = info["cluster"].get("replicas", [])
            if len([one for one in followers if one["current"] and not one.get("offline")]) == 2:
                return
            await anyio.sleep(0.1)


async def emptied(bus: NatsBus, stream: str) -> None:
    """Return when nothing is left in a work queue: an acknowledgement that died with a leader is said again
    when the work comes back.
    """
    with anyio.fail_after(PROGRESS_SECONDS):
        while (await bus.stream_info(stream)).messages:  # noqa: ASYNC110 (the server does not tell)
            await anyio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_leaders_are_killed_under_load(cluster: Broker) -> None:
    quick = [replace(consumer, ack_seconds=ACK_SECONDS) for consumer in CONSUMERS.values()]
    await provision(cluster.url, run=RUN, store_gb=1, replicas=3, consumers=quick, **cluster.login())
    load, stop = Load(), anyio.Event()
    async with AsyncExitStack() as stack:
        admin, scorer, learner, agent = [
            await stack.enter_async_context(
                connect(cluster.url, run=RUN, role=role, instance=role, **cluster.login(role))
            )
            for role in (ADMIN, "scorer", "learner", "agent")
        ]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.publish, scorer, stop)
            tasks.start_soon(load.follow, learner)
            tasks.start_soon(load.work, agent)
            await load.until("load", lambda: len(load.acked) >= MORE)
            for stream in ("SAMPLE", "TASK"):
                victim = await leader(admin, stream)
                before = len(load.acked), len(load.seen), len(load.worked)
                cluster.kill(victim)
                await load.until(
                    f"progress without the leader of {stream}",
                    lambda then=before: (
                        len(load.acked) >= then[0] + MORE
                        and len(load.seen) >= then[1] + MORE
                        and len(load.worked) >= then[2] + MORE // BATCH
                    ),
                )
                assert await leader(admin, stream) != victim
                cluster.start(victim)
                await three_current(admin, stream)
            stop.set()
            await load.until("end of the work", lambda: set(load.worked) >= load.asked)
            await load.until("end of the stream", lambda: len(load.seen) >= len(load.acked))
            await emptied(admin, "TASK")
            tasks.cancel_scope.cancel()
        await _check(load, admin)


async def _check(load: Load, admin: NatsBus) -> None:
    """Everything acknowledged is stored once, where it was said to be, and was read once and in order."""
    stored = [
        (record.sequence, record.message.sample)
        async for record in admin.replay("SAMPLE")
        if isinstance(record.message, SampleReady)
    ]
    ids = Counter(sample for _, sample in stored)
    assert not set(load.acked) - set(ids), "lost"
    assert not [sample for sample, times in ids.items() if times > 1], "stored twice"
    assert {sample: sequence for sequence, sample in stored} == load.acked
    assert load.seen == stored
    results = Counter(
        [
            record.message.episode
            async for record in admin.replay("EVENT", tails=["event.agent.failed"])
            if isinstance(record.message, EpisodeFailed)
        ]
    )
    assert set(results) == load.asked
    assert max(results.values()) == 1
    assert load.longest_gap < PROGRESS_SECONDS


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_streams_lie_on_three_servers_and_can_be_moved_to_one(cluster: Broker) -> None:
    for replicas, expected in ((3, 3), (1, 1), (3, 3), (None, 3)):
        await provision(cluster.url, run=RUN, store_gb=1, replicas=replicas, **cluster.login())
        async with connect(cluster.url, run=RUN, role=ADMIN, instance="a", **cluster.login()) as admin:
            names = [admin.names.stream(kind) for kind in STREAMS]
            names += [admin.names.bucket(kind) for kind in BUCKETS]
            for name in names:
                info = await admin.connection.api(f"STREAM.INFO.{name}")
                assert info["config"]["num_replicas"] == expected, name


async def test_one_server_cannot_hold_three_replicas(tmp_path: Path) -> None:
    with (
        broker(tmp_path, "lonely") as single,
        pytest.raises(BusError, match="too few servers for the 3") as caught,
    ):
        await provision(single.url, run="lonely", store_gb=1, replicas=3, **single.login())
    assert "fewer replicas" in caught.value.remedy
