"""Pitfalls of streams, consumers and buckets, by their number in docs/bus-pitfalls.md."""

from __future__ import annotations

import itertools
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest
from bus_examples import summary, ticket
from bus_trouble import RUN, consumers_of, kill, rejected, served
from bus_worlds import TOKEN, nats_world, nothing_comes, take
from scenes.memory_bus import overlap

from bus import Bus, BusUnavailable, connect, provision, state
from bus.connection import ApiError
from bus.follow import Follower
from bus.pull import Delivered
from bus.subjects import CONSUMERS, SECOND, STREAMS


async def test_pitfall_15_only_provisioning_changes_a_consumer(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with another idea of its consumer binds to the one there is; an update keeps its state."""
    async with nats_world(nats_url) as w:
        bus = w.bus
        other = replace(CONSUMERS["designer"], ack_seconds=7.0, tails="task.designer.other.>")
        monkeypatch.setitem(CONSUMERS, "designer", other)
        before = await consumer_info(bus, "designer")
        await bus.publish_all(map(ticket, range(3)))
        async with bus.consume("designer", limit=2) as source:
            held = await take(source, 2)
            assert (await consumer_info(bus, "designer"))["config"] == before["config"]
            await held[0].ack()
            monkeypatch.setitem(CONSUMERS, "designer", replace(other, tails="task.designer.>"))
            await provision(nats_url, run=bus.run, token=TOKEN, store_gb=0.25)
            after = await consumer_info(bus, "designer")
            assert after["config"]["ack_wait"] == 7 * SECOND
            assert after["created"] == before["created"]
            assert after["num_ack_pending"] >= 1
            await held[1].ack()
            (last,) = await take(source, 1)
            assert (last.message, last.attempt) == (ticket(2), 1)
            await last.ack()


async def consumer_info(bus: Bus, name: str) -> dict[str, Any]:
    return await bus.connection.api(f"CONSUMER.INFO.{bus.names.stream('TASK')}.{name}")


async def test_pitfall_16_filters_and_subjects_never_overlap(nats_url: str) -> None:
    """Neither do ours, nor would a server take what does."""
    for first, second in itertools.combinations(CONSUMERS.values(), 2):
        assert not overlap(first.tails, second.tails)
    for one, two in itertools.combinations(STREAMS.values(), 2):
        assert not overlap(f"{one.head}.>", f"{two.head}.>")
    async with nats_world(nats_url) as w:
        bus = w.bus
        stream = bus.names.stream("TASK")

        async def refused(verb: str, body: dict[str, Any]) -> int:
            with pytest.raises(ApiError) as caught:
                await bus.connection.api(verb, body)
            return caught.value.code

        config = {"name": "more", "durable_name": "more", "ack_policy": "explicit"}
        for filters, policy, code in (
            ("task.agent.x.>", "all", 10100),
            ("task.nobody.>", "new", 10101),
        ):
            body = {**config, "filter_subject": bus.names.subject(filters), "deliver_policy": policy}
            verb = f"CONSUMER.DURABLE.CREATE.{stream}.more"
            assert await refused(verb, {"stream_name": stream, "config": body}) == code
        more = {"name": f"MORE_{bus.run}", "subjects": [bus.names.subject("event.scorer.>")]}
        assert await refused(f"STREAM.CREATE.{more['name']}", more) == 10065
        await bus.publish(ticket(1))
        async with bus.consume("designer", limit=1) as source:
            await (await take(source, 1))[0].ack()


async def test_pitfall_22_a_value_written_after_a_restart_is_seen_at_once(tmp_path: Path) -> None:
    """Nobody waits for a watcher to notice: values are read, facts are followed."""
    async with (
        served(tmp_path) as (handle, bus),
        connect(handle.url, run=RUN, role="y", instance="2", token=handle.token) as other,
        other.follow("EVENT") as source,
    ):
        await bus.state_put("weights", b"1")
        assert await nothing_comes(source, 0.05)
        await kill(handle)
        start = anyio.current_time()
        revision = await bus.state_put("weights", b"2")
        assert await other.state_get("weights") == (revision, b"2")
        await bus.publish(summary(1))
        assert (await take(source, 1, 5))[0].message == summary(1)
        assert anyio.current_time() - start < 3.0
        assert not await consumers_of(bus, "STATE")


async def test_pitfall_23_a_lease_that_expired_has_a_new_holder_soon(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder vanishes without a word; no marker of its end stands in the way of the next one."""
    async with nats_world(nats_url) as w, w.peer("tester", "two") as other:
        bus = w.bus
        config = (await bus.connection.api(f"STREAM.INFO.{bus.names.stream('LEASE')}"))["config"]
        assert not config.get("subject_delete_marker_ttl")
        for name in ("_renew", "_release"):
            monkeypatch.setattr(state.KeyValueStore, name, nothing)
        async with bus.lease("leader.x", ttl=1.0) as first:
            pass
        monkeypatch.undo()
        start = anyio.current_time()
        async with other.lease("leader.x", ttl=1.0, wait=5.0) as second:
            assert 0.5 < anyio.current_time() - start < 2.0
            assert second.revision > first.revision


async def nothing(*_: Any) -> None:
    return None


async def test_a_lease_of_a_life_that_has_ended_is_free_for_the_next_one(nats_url: str) -> None:
    """It is told by who saw the end; without a word it would stay for its time."""
    async with nats_world(nats_url) as w:

        def joined(*life: str) -> Any:
            return connect(
                nats_url, run=w.bus.run, role="learner", instance="learner-0", token=TOKEN, life=life
            )

        async with (
            joined("a", "") as one,
            joined("b", "") as other,
            joined("c", "a") as next_one,
            one.lease("leader.x", ttl=30.0) as first,
        ):
            with pytest.raises(BusUnavailable):
                async with other.lease("leader.x", ttl=30.0, wait=0.2):
                    pass
            async with next_one.lease("leader.x", ttl=30.0, wait=2.0) as second:
                assert second.revision > first.revision


async def test_pitfall_24_an_end_that_nobody_announces_is_noticed(tmp_path: Path) -> None:
    """The server says nothing when a right expires: its holder looks at its own clock."""
    async with served(tmp_path) as (handle, bus), bus.lease("leader.x", ttl=1.0) as lease:
        os.kill(handle.pid, signal.SIGSTOP)
        try:
            with anyio.fail_after(2.0):
                await lease.lost.wait()
        finally:
            os.kill(handle.pid, signal.SIGCONT)


async def test_pitfall_27_reading_much_leaves_no_consumer_behind(nats_url: str) -> None:
    async with nats_world(nats_url) as w:
        bus = w.bus
        await bus.publish_all(rejected(number, 500_000) for number in range(20))
        for _ in range(5):
            assert len([record async for record in bus.replay("EVENT")]) == 20
            assert (await bus.get("EVENT", 20)) == rejected(19, 500_000)
        assert await consumers_of(bus, "EVENT") == []
        async with bus.follow("EVENT") as source:
            await take(source, 20)
        with anyio.fail_after(5):
            while await consumers_of(bus, "EVENT"):  # noqa: ASYNC110 (only the server knows)
                await anyio.sleep(0.01)


async def test_pitfall_27_a_blob_is_fetched_once_and_without_pauses(nats_url: str) -> None:
    """Each piece travels once, in one answer; five times as much is five times as much, and no more."""
    async with nats_world(nats_url) as w, w.peer("tester", "two") as other:
        content = os.urandom(15 << 20)
        fetched: dict[int, tuple[float, float]] = {}
        for size in (3 << 20, 15 << 20):
            await w.bus.blobs.put("weights", content[:size])
            before = dict(other.connection.client.stats)
            assert await other.blobs.get("weights") == content[:size]
            after = other.connection.client.stats
            fetched[size] = tuple(after[name] - before[name] for name in ("in_bytes", "in_msgs"))
        for size, (count, messages) in fetched.items():
            assert size <= count < 1.05 * size
            assert size >> 20 <= messages < (size >> 20) + 8
        assert await consumers_of(w.bus, "BLOB") == []


async def test_pitfall_28_a_deleted_follower_goes_on_where_it_was(nats_url: str) -> None:
    async with nats_world(nats_url) as w:
        bus = w.bus
        await bus.publish_all(map(summary, range(3)))
        async with bus.follow("EVENT") as source:
            assert [record.sequence for record in await take(source, 3)] == [1, 2, 3]
            for name in await consumers_of(bus, "EVENT"):
                await bus.connection.api(f"CONSUMER.DELETE.{bus.names.stream('EVENT')}.{name}")
            start = anyio.current_time()
            await bus.publish(summary(3))
            assert (await take(source, 1, 5))[0].sequence == 4
            assert anyio.current_time() - start < 1.9


async def test_pitfall_28_a_hole_in_what_is_delivered_is_read_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delivery is lost on its way: no gap, no duplicate, no change of order, and no wait for silence."""
    async with nats_world(nats_url) as w:
        lost: list[int] = []
        real = Follower._on_message

        def lose(self: Follower, message: Any, delivered: Delivered) -> None:
            if delivered.stream_sequence == (5, 40, 0)[len(lost)] and self.counts["restarts"] == len(lost):
                lost.append(delivered.stream_sequence)
                return
            real(self, message, delivered)

        monkeypatch.setattr(Follower, "_on_message", lose)
        await w.bus.publish_all(map(summary, range(100)))
        start = anyio.current_time()
        async with w.bus.follow("EVENT") as source:
            assert [record.sequence for record in await take(source, 100, 5)] == list(range(1, 101))
            assert w.bus.statistics()["follow_event_restarts"] == 2
        assert lost == [5, 40]
        assert anyio.current_time() - start < 1.9


def test_every_pitfall_has_a_rule_and_a_test() -> None:
    """The table in the documentation and the tests with numbers know the same 32."""
    table = (Path(__file__).parents[2] / "docs" / "bus-pitfalls.md").read_text()
    documented = {
        int(row[1]): row[2] for row in re.finditer(r"^\| (\d+) \|.*\| (\w+) \|$", table, re.MULTILINE)
    }
    tested: dict[int, set[str]] = {}
    for path in Path(__file__).parent.glob("test_bus_pitfalls_*.py"):
        for number in re.findall(r"def test_pitfall_(\d\d)_", path.read_text()):
            tested.setdefault(int(number), set()).add(path.stem.removeprefix("test_bus_pitfalls_"))
    assert sorted(documented) == sorted(tested) == list(range(1, 33))
    assert {number: {name} for number, name in documented.items()} == tested
