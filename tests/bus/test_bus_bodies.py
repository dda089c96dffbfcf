"""Bodies of large messages follow the retention of the stream that refers to them; a full stream says so."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from bus_examples import example, summary, ticket
from bus_trouble import until
from bus_worlds import TOKEN, World, nats_world, take
from hypothesis import given
from hypothesis import strategies as st

from bus import BusError, BusUnavailable, Limits, NatsBus, codec, connect, provision, serve
from bus.blob import Opened, fresh_id, put_pieces
from bus.blobstore import MemoryStore, NatsStore, Store
from bus.connection import Connection, open_connection
from bus.errors import Forgotten, NotFound
from bus.messages import DesignRejected, SampleReady
from bus.subjects import STREAMS, Names, Stream, stream_config

Worlds = Callable[..., AbstractAsyncContextManager[World]]
LARGE = int(1.9 * (1 << 20))
SMALL = 4096
provisioning = sys.modules["bus.provision"]


def fact(number: int, size: int = LARGE) -> DesignRejected:
    return example(DesignRejected, design=f"d{number}", source=f"{number:04d}" * (size // 4))


async def test_large_facts_make_room_for_newer_ones(nats_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """A store of 0.1 GB: what a run says for hours is many times what may lie there."""
    async with nats_world(nats_url, store_gb=0.1) as w, w.peer("tester", "two") as other:
        with anyio.fail_after(60):
            for number in range(20):
                await w.bus.publish(fact(number))
        assert w.bus.statistics()["publish_full"] == 0
        await other.publish(summary(99))
        async with other.follow("EVENT") as source:
            records = await take(source, 3)
            while records[-1].sequence < 21:
                records += await take(source, 1)
        kept = len(records) - 1
        assert [record.sequence for record in records] == list(range(21 - kept, 22))
        assert 5 <= kept <= 10  # 18 % of the store
        assert other.statistics()["blob_forgotten"] == 20 - kept
        assert (await other.stream_info("DLQ")).messages == 0
        assert sum("EVENT is forgotten" in text for text in caplog.messages) == 1
        assert await w.bus.get("EVENT", 20) == fact(19)


async def test_a_fact_without_its_body_is_one_that_was_forgotten(world: Worlds) -> None:
    async with world(inline=SMALL) as w:
        await w.bus.publish_all([fact(1, 3 * SMALL), summary(2)])
        (piece,) = await w.blobs()
        await w.write_blob(piece, None)
        async with w.bus.follow("EVENT") as source:
            assert (await take(source, 1))[0].message == summary(2)
        assert [record.message async for record in w.bus.replay("EVENT")] == [summary(2)]
        assert await w.bus.last(fact(1).tail) is None
        with pytest.raises(NotFound) as caught:
            await w.bus.get("EVENT", 1)
        assert isinstance(caught.value, Forgotten)
        assert (await w.bus.stream_info("DLQ")).messages == 0
        figures = w.bus.statistics()
        assert (figures["blob_forgotten"], figures["blob_unusable"]) == (4, 0)


async def test_a_body_that_nobody_needs_is_removed_once(
    world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is: what never lay in a stream of bodies is not purged from it. What is gone stays gone."""
    dropped: list[str] = []
    for kind in (NatsStore, MemoryStore):
        monkeypatch.setattr(kind, "drop", noting(kind.drop, dropped))
    async with world(inline=SMALL) as w, w.peer("tester", "two") as other:
        await w.bus.publish(msgspec.structs.replace(ticket(1), skill="x" * 3 * SMALL))
        async with other.consume("designer", limit=1) as source:
            dropped.clear()
            (delivery,) = await take(source, 1)
            await delivery.ack()
        await until(lambda: other.statistics()["blob_removed"] > 0, "the body is removed")
        await until(lambda: other.statistics()["blob_checks_waiting"] == 0, "nothing waits")
        assert other.statistics()["blob_removed"] == 1
        assert [tail.split(".")[:2] for tail in dropped] == [["body", "data"], ["body", "claim"]]
        assert await w.blobs() == []


def noting(drop: Callable[[Any, str], Awaitable[None]], dropped: list[str]) -> object:
    async def noted(self: Store, pattern: str) -> None:
        dropped.append(pattern)
        await drop(self, pattern)

    return noted


async def test_a_fact_that_would_push_itself_out_is_refused(nats_url: str) -> None:
    async with nats_world(nats_url, store_gb=0.1) as w:
        with pytest.raises(BusError, match="too large for EVENTBODY"):
            await w.bus.publish(fact(1, 10 << 20))
        assert await w.blobs() == []


def old_shares() -> list[Stream]:
    """The streams of builds that kept all bodies in BLOB."""
    shares = {"TASK": 0.03, "EVENT": 0.32, "DESIGN": 0.12, "SAMPLE": 0.32, "BLOB": 0.1, "DLQ": 0.06}
    return [replace(STREAMS[kind], share=share) for kind, share in shares.items()]


async def fill_as_before(bus: NatsBus, count: int, blobs: int) -> None:
    """Say facts, some of them large, as those builds did."""
    store = bus.claims.stores["BLOB"]
    for number in range(blobs):
        message = fact(number, 1 << 19)
        opened = Opened("EVENT", message.tail)
        ref = await put_pieces(store, fresh_id(), codec.encode_body(message), opened)
        envelope = codec.envelope_of(codec.encode(message, run=bus.run, role="x", instance="1"))
        frame = codec.encode_claim(envelope, ref)
        subject = bus.names.subject(message.tail)
        stored = await bus.publisher.send(
            bus.names.stream("EVENT"), subject, frame, {}, message_id=message.key
        )
        await bus.claims.confirm(ref, "EVENT", stored.seq)
    await bus.publish_all(
        [replace_source(number, secrets.token_hex(1 << 17)) for number in range(blobs, blobs + count)]
    )


def replace_source(number: int, source: str) -> DesignRejected:
    return example(DesignRejected, design=f"d{number}", source=source)


async def bounds(connection: Connection, names: Names) -> dict[str, int]:
    found = {}
    for kind in STREAMS:
        info = await connection.api(f"STREAM.INFO.{names.stream(kind)}")
        found[kind] = int(info["config"]["max_bytes"])
    return found


async def test_an_older_store_is_brought_up_to_date_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its EVENT is full, larger than it should be, and a part of its BLOB belongs to facts."""
    size, names = 0.06, Names("old")
    async with serve(tmp_path, run="old", store_gb=size) as handle:
        join = {"run": "old", "token": handle.token}
        async with open_connection(handle.url, name="old", token=handle.token) as connection:
            for stream in old_shares():
                store = int(size * (1 << 30))
                config = stream_config(names, stream, task_slots=8, store_bytes=store)
                await connection.api(f"STREAM.CREATE.{names.stream(stream.kind)}", config)
            async with connect(handle.url, role="x", instance="1", **join) as bus:
                await fill_as_before(bus, 150, 8)
                await bus.claims.sweep()  # what is not there yet has nothing to look at
                before = await bus.stream_info("EVENT")
                assert before.first > 9  # it has forgotten some
                old = [(one.sequence, one.message) async for one in bus.replay("EVENT")]
                legacy = await bus.claims.stores["BLOB"].tails("blob.data.>")

                await provision(handle.url, **join, store_gb=size)
                first = await bounds(connection, names)
                await provision(handle.url, **join, store_gb=size)
                assert await bounds(connection, names) == first
                assert await bus.stream_info("EVENT") == before
                assert [(one.sequence, one.message) async for one in bus.replay("EVENT")] == old
                assert await bus.claims.stores["BLOB"].tails("blob.data.>") == legacy
                assert sum(first.values()) <= size * (1 << 30)
                assert first["EVENTBODY"] > 0.1 * size * (1 << 30)
                with anyio.fail_after(20):
                    for number in range(900, 910):
                        await bus.publish(fact(number))
                    await bus.publish(example(SampleReady, group="g" * (2 << 20)))
                assert await bus.get("EVENT", before.last + 10) == fact(909)
    assert any("smaller than they should be" in text for text in caplog.messages)


async def test_bodies_of_facts_in_an_older_store_give_way_to_what_is_named(nats_url: str) -> None:
    """All of them are still claimed: the oldest go, until half of BLOB is free, and are forgotten."""
    async with nats_world(nats_url, store_gb=0.1) as w:
        bus = w.aside
        assert isinstance(bus, NatsBus)
        await fill_as_before(bus, 1, 16)
        assert len(await w.blobs("blob.data.>")) == 16
        await bus.claims.sweep()
        left = len(await w.blobs("blob.data.>"))
        assert 8 <= left <= 10
        found = [record.message.design async for record in bus.replay("EVENT")]
        assert found == [f"d{number}" for number in range(16 - left, 17)]
        await bus.blobs.put("weights", bytes(4 << 20))


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=9),
    st.integers(0, 3000),
)
def test_bounds_hold_what_is_there_and_fit_the_store(pairs: list[tuple[int, int]], store: int) -> None:
    wanted = {str(number): pair[0] for number, pair in enumerate(pairs)}
    least = {str(number): pair[1] for number, pair in enumerate(pairs)}
    store = max(store, sum(wanted.values()))
    try:
        found = provisioning.fit(wanted, least, store, dict.fromkeys(wanted, 0))
    except BusError:
        assert sum(least.values()) >= store
        return
    assert sum(found.values()) <= store
    # What is rounded is less than a byte a stream.
    assert all(found[name] >= least[name] - 1 for name in least)
    if all(least[name] <= wanted[name] for name in least):
        assert found == wanted
    elif all(found.values()) and 0.99 * store <= sum(found.values()):
        assert provisioning.fit(wanted, least, store, found) in (found, wanted)


async def test_a_full_stream_is_named_once_with_what_to_do(
    nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "spade.bus")
    run = f"full-{secrets.token_hex(4)}"
    await provision(nats_url, run=run, token=TOKEN, store_gb=0.01)
    join = {"run": run, "role": "x", "instance": "1", "token": TOKEN}
    async with connect(nats_url, **join, limits=Limits(full_seconds=1.0)) as bus:
        with pytest.raises(
            BusUnavailable, match=r"room in stream BODY_.* within 1 s. .*learner's checkpoints"
        ):
            await bus.publish(example(SampleReady, group="g" * (3 << 20)))
        await until(lambda: bus.statistics()["publish_full"] > 1, "a second refusal")
    told = [text for text in caplog.messages if "is full" in text]
    assert len(told) == 1
    assert f"stream BODY_{run} is full (maximum bytes exceeded; its part is 16 % of bus.store_gb)" in told[0]
    assert "raise bus.store_gb" in told[0]
