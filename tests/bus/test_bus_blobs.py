"""Bodies that are too large for a message, and named blobs: over NATS, on its own thread and in memory."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import msgspec
import pytest
from bus_examples import example, request, summary, ticket
from bus_worlds import World, nats_world, nothing_comes, take

from bus import NotFound, Undecodable, codec, connect, provision, serve
from bus.blob import CHUNK, Opened, fresh_id, put_pieces
from bus.claims import INLINE, Claims
from bus.errors import BusError
from bus.holding import Holding
from bus.messages import DeadLetter, DesignRejected, DesignTicket, EpisodeRequest, HeldDesign, SampleReady

Worlds = Callable[..., AbstractAsyncContextManager[World]]
SMALL = 4096


def rejected(number: int, size: int = 3 * SMALL) -> DesignRejected:
    return example(DesignRejected, design=f"d{number}", source=f"{number}" * size)


def work(number: int, size: int = 3 * SMALL) -> EpisodeRequest:
    return msgspec.structs.replace(request(number), source="s" * size)


def sample(number: int) -> SampleReady:
    return example(SampleReady, sample=f"s{number}", role="agent", group="g" * 3 * SMALL)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at released blobs after a shorter moment than usual."""
    monkeypatch.setattr("bus.claims._CHECK_SECONDS", (0.03, 0.2, 2.0))


async def gone(w: World, pattern: str = "", seconds: float = 8.0) -> None:
    """Wait until nothing is left in ``pattern``; over NATS an acknowledgement is looked at after a moment."""
    left: list[str] = []
    with anyio.move_on_after(seconds):
        while left := await w.blobs(pattern):  # noqa: ASYNC110 (the broker has no event for it)
            await anyio.sleep(0.05)
        return
    raise AssertionError(f"still there: {left}")


async def test_a_large_message_is_read_like_any_other(world: Worlds) -> None:
    async with world(inline=SMALL) as w:
        large = rejected(2, int(2.5 * CHUNK))
        messages = [summary(1), large, summary(3), rejected(4)]
        assert await w.bus.publish_all(messages) == [1, 2, 3, 4]
        assert (await w.bus.stream_info("EVENT")).bytes < SMALL
        assert len(await w.blobs("eventbody.data.>")) == len(await w.blobs()) == 4
        async with w.bus.follow("EVENT") as source:
            records = await take(source, 4)
        assert [record.message for record in records] == messages
        assert [record.blob > 0 for record in records] == [False, True, False, True]
        assert records[1].envelope.kind == "design_rejected.v1"
        assert [record.message async for record in w.bus.replay("EVENT", start=2)] == messages[1:]
        assert await w.bus.get("EVENT", 2) == large
        record = await w.bus.last(large.tail)
        assert record is not None
        assert record.message == rejected(4)
        assert w.bus.statistics()["blob_put"] == 2


async def test_what_the_server_would_not_take_travels_by_default(plain_world: Worlds) -> None:
    async with plain_world() as w:
        large, just_small = rejected(1, 9 << 20), rejected(2, INLINE - 2000)
        assert await w.bus.publish_all([large, just_small]) == [1, 2]
        assert await w.bus.get("EVENT", 1) == large
        assert await w.bus.get("EVENT", 2) == just_small
        assert w.bus.statistics()["blob_put"] == 1


async def test_finished_work_takes_its_blob_with_it(world: Worlds) -> None:
    async with world(inline=SMALL) as w:
        await w.bus.publish_all([work(1), work(2), request(3)])
        async with w.bus.consume("agent", limit=3) as source:
            first, second, third = await take(source, 3)
            assert [first.message, second.message, third.message] == [work(1), work(2), request(3)]
            await first.nak()
            (first,) = await take(source, 1)
            assert first.message == work(1)
            await first.ack()
            await third.ack()
            with anyio.fail_after(8):
                while len(await w.blobs("body.data.>")) > 1:  # noqa: ASYNC110
                    await anyio.sleep(0.05)
            await second.ack()
            await gone(w)
        assert (await w.bus.stream_info("TASK")).messages == 0


async def test_a_purge_takes_the_blobs_of_what_it_removes(plain_world: Worlds) -> None:
    async with plain_world(inline=SMALL) as w:
        await w.bus.publish_all(map(sample, range(4)))
        assert len(await w.blobs("body.data.>")) == 4
        assert await w.bus.purge("SAMPLE", below=3) == 2
        assert len(await w.blobs("body.data.>")) == 2
        assert [record.message async for record in w.bus.replay("SAMPLE", start=3)] == [sample(2), sample(3)]
        assert await w.bus.purge("SAMPLE", tail=sample(3).tail) == 1
        assert len(await w.blobs("body.claim.>")) == 1
        assert await w.bus.get("SAMPLE", 3) == sample(2)
        assert await w.bus.purge("SAMPLE") == 1
        assert await w.blobs() == []


async def test_a_replaced_message_gives_its_blob_up_at_the_next_look(plain_world: Worlds) -> None:
    async with plain_world(inline=SMALL) as w:
        held = example(HeldDesign, design="d1", cohort=1, attempt=1, skill="a" * 3 * SMALL)
        await w.bus.publish(held)
        await w.inject("DESIGN", held.tail, codec.encode(held, run="r", role="x", instance="1"))
        await w.aside.claims.sweep()
        assert await w.blobs() == []


async def test_one_result_has_one_blob(plain_world: Worlds) -> None:
    async with plain_world(inline=SMALL) as w, w.peer("tester", "two") as other:
        for message in (rejected(1), sample(1)):
            assert [await bus.publish(message) for bus in (w.bus, other, w.bus)] == [1, 1, 1]
        assert len(await w.blobs("eventbody.>")) == 1
        assert len(await w.blobs("body.data.>")) == 1
        assert len(await w.blobs("body.claim.>")) == 1
        assert await other.get("SAMPLE", 1) == sample(1)
        assert await other.get("EVENT", 1) == rejected(1)


@pytest.mark.parametrize("damage", ["missing", "damaged"])
async def test_a_lost_body_is_a_dead_letter(plain_world: Worlds, damage: str) -> None:
    async with plain_world(inline=SMALL) as w:
        await w.bus.publish_all([rejected(1), summary(2), work(3), request(4)])
        for tail in [tail for tail in await w.blobs() if ".data." in tail]:
            value = await w.store(tail).value(tail)
            # A fact whose body is missing is no letter: its stream forgets.
            missing = damage == "missing" and not tail.startswith("event")
            await w.write_blob(tail, None if missing else value[:-1] + b"?")
        damaged = "damaged: its SHA-256 differs"
        why = {"EVENT": damaged, "TASK": "is missing" if damage == "missing" else damaged}
        async with w.bus.follow("EVENT") as source:
            assert (await take(source, 1))[0].message == summary(2)
        async with w.bus.consume("agent", limit=1) as source:
            (delivery,) = await take(source, 1)
            assert delivery.message == request(4)
            await delivery.ack()
        letters = [record.message async for record in w.bus.replay("DLQ")]
        assert [(one.source, one.sequence, one.subject) for one in letters] == [
            ("EVENT", 1, rejected(1).tail),
            ("TASK", 1, work(3).tail),
        ]
        assert all(why[letter.source] in letter.reason for letter in letters)
        assert all(codec.claim_in(letter.frame) is not None for letter in letters)
        with pytest.raises(Undecodable, match=damaged):
            await w.bus.get("EVENT", 1)
        assert [record.message async for record in w.bus.replay("EVENT")] == [summary(2)]
        assert (await w.bus.stream_info("TASK")).messages == 0
        assert w.bus.statistics()["blob_unusable"] >= 3


async def test_a_dead_letter_keeps_the_body_until_it_is_gone_itself(plain_world: Worlds) -> None:
    async with plain_world(inline=SMALL) as w:
        await w.bus.publish(work(1))
        async with w.bus.consume("agent", limit=1) as source:
            (delivery,) = await take(source, 1)
            await delivery.term("no use")
            assert delivery.message == work(1)
            await gone(w, "body.claim.*.task.*")
        (record,) = [record async for record in w.bus.replay("DLQ")]
        assert isinstance(record.message, DeadLetter)
        envelope, claim = codec.decode(record.message.frame)
        assert isinstance(claim, codec.Claim)
        assert await w.aside.claims.fetch(claim) == work(1)
        assert envelope.id == work(1).key
        await w.bus.purge("DLQ")
        assert await w.blobs() == []


async def test_a_reference_that_lies_costs_no_memory(plain_world: Worlds) -> None:
    async with plain_world() as w:
        envelope = codec.decode(codec.encode(summary(1), run="r", role="x", instance="1"))[0]
        lies = [
            codec.BlobRef("a" * 20, 1 << 62, bytes(32), CHUNK),
            codec.BlobRef("a" * 20, 1 << 27, bytes(32), 1),
            codec.BlobRef("a" * 20, 10, bytes(32), 0),
            codec.BlobRef("a" * 20, -1, bytes(32), CHUNK),
            codec.BlobRef("a.>", 10, bytes(32), CHUNK),
            codec.BlobRef("a" * 20, 10, b"", CHUNK),
        ]
        for number, ref in enumerate(lies):
            await w.inject("EVENT", f"event.odd.{number}", codec.encode_claim(envelope, ref))
        await w.bus.publish(summary(1))
        async with w.bus.follow("EVENT") as source, w.bus.follow("DLQ") as letters:
            assert (await take(source, 1))[0].message == summary(1)
            reasons = [record.message.reason for record in await take(letters, len(lies))]
        assert sum("too large" in reason for reason in reasons) == 2
        assert sum("no sense" in reason for reason in reasons) == 4


async def test_orphans_are_removed_and_unclaimed_messages_adopted(plain_world: Worlds) -> None:
    async with plain_world(inline=SMALL) as w:
        stores = w.aside.claims.stores
        store = stores["BODY"]
        patient, strict = (
            Claims(stores.values(), background=False, orphan_seconds=age) for age in (60.0, 0.0)
        )
        lost = await put_pieces(store, fresh_id(), b"x" * 100, Opened("SAMPLE", "sample.nobody"))
        message = sample(1)
        kept = await put_pieces(store, fresh_id(), codec.encode_body(message), Opened("SAMPLE", message.tail))
        envelope = codec.decode(codec.encode(message, run="r", role="x", instance="1"))[0]
        await w.inject("SAMPLE", message.tail, codec.encode_claim(envelope, kept))
        await patient.sweep()
        assert len(await w.blobs("body.data.>")) == 2
        await strict.sweep()
        await strict.sweep()
        assert await w.blobs(f"body.data.{lost.id}.>") == []
        assert await w.blobs("body.claim.>") == [f"body.claim.{kept.id}.sample.1"]
        assert await w.bus.get("SAMPLE", 1) == message


async def test_a_claim_that_appears_during_the_look_saves_the_body(
    plain_world: Worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a dead letter takes the body over while somebody else looks at it."""
    async with plain_world(inline=SMALL) as w:
        await w.bus.publish(work(1))
        (claim,) = await w.blobs("body.claim.>")
        store = w.store(claim)

        async def taken_over(stream: str, sequence: int) -> bool:
            await store.note(claim.replace(f".{stream.lower()}.{sequence}", ".dlq.1"))
            return False

        monkeypatch.setattr(Holding, "holds", lambda self, *asked: taken_over(*asked))
        await w.aside.claims.sweep()
        assert len(await w.blobs("body.data.>")) == 1
        monkeypatch.undo()
        await w.aside.claims.sweep()
        assert len(await w.blobs("body.data.>")) == 1
        await w.bus.purge("TASK")
        await w.aside.claims.sweep()
        assert await w.blobs() == []


async def test_a_cancelled_reader_gets_the_delivery_again(world: Worlds) -> None:
    async with world(inline=SMALL) as w:
        await w.bus.publish_all([work(number, 2 * CHUNK) for number in range(3)])
        seen: list[int] = []
        async with w.bus.consume("agent", limit=3) as source:
            with anyio.fail_after(20):
                while len(seen) < 3:
                    with anyio.move_on_after(random.uniform(0.0, 0.01)):
                        delivery = await anext(source)
                        assert delivery.attempt == 1
                        seen.append(delivery.message.index)
                        await delivery.ack()
        assert sorted(seen) == [0, 1, 2]


async def test_messages_have_a_largest_size(plain_world: Worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bus.claims.LARGEST", 1 << 20)
    async with plain_world() as w:
        with pytest.raises(BusError, match="exceeds 1048576 bytes"):
            await w.bus.publish(rejected(1, 2 << 20))
        assert await w.blobs() == []


# Named blobs.


async def test_named_blobs_hold_bytes_and_files(world: Worlds, tmp_path: Path) -> None:
    async with world() as w, w.peer("tester", "two") as other:
        assert await w.bus.blobs.info("weights.3") is None
        path, content = tmp_path / "in", random.Random(1).randbytes(3 * CHUNK + 17)
        path.write_bytes(content)
        info = await w.bus.blobs.put("weights.3", path)
        assert (info.name, info.size) == ("weights.3", len(content))
        assert info.sha256 == hashlib.sha256(content).hexdigest()
        assert await other.blobs.info("weights.3") == info
        assert await other.blobs.get("weights.3") == content
        assert await other.blobs.save("weights.3", tmp_path / "out") == info
        assert (tmp_path / "out").read_bytes() == content
        assert await w.bus.blobs.put("empty", b"") != info
        assert await other.blobs.get("empty") == b""
        assert await w.bus.blobs.put("view", memoryview(content)[5:9])
        assert await other.blobs.get("view") == content[5:9]
        assert [await other.blobs.remove(name) for name in ("weights.3", "weights.3")] == [True, False]
        await gone(w, f"blob.*.{info.id}.>")
        await w.aside.claims.sweep()
        assert await other.blobs.get("view") == content[5:9]


async def test_a_replaced_blob_is_new_and_the_old_one_goes(plain_world: Worlds) -> None:
    async with plain_world() as w:
        first = await w.bus.blobs.put("x", b"a" * 100)
        second = await w.bus.blobs.put("x", b"b" * 2 * CHUNK)
        assert second.id != first.id
        assert await w.bus.blobs.get("x") == b"b" * 2 * CHUNK
        await gone(w, f"blob.*.{first.id}.>")
        assert len(await w.blobs("blob.data.>")) == 2


async def test_blobs_that_cannot_be_used_say_so(plain_world: Worlds, tmp_path: Path) -> None:
    async with plain_world() as w:
        with pytest.raises(NotFound, match="no blob nothing"):
            await w.bus.blobs.get("nothing")
        with pytest.raises(BusError, match="characters"):
            await w.bus.blobs.put("no spaces", b"")
        with pytest.raises(FileNotFoundError):
            await w.bus.blobs.put("x", tmp_path / "nowhere")
        assert await w.bus.blobs.info("x") is None
        info = await w.bus.blobs.put("x", b"a" * 2 * CHUNK)
        await w.write_blob(f"blob.data.{info.id}.1", b"a" * (CHUNK - 1) + b"b")
        with pytest.raises(Undecodable, match="damaged"):
            await w.bus.blobs.save("x", tmp_path / "out")
        await w.write_blob(f"blob.data.{info.id}.1", None)
        with pytest.raises(Undecodable, match="piece 1 of 2"):
            await w.bus.blobs.get("x")
        assert os.listdir(tmp_path) == []


async def test_a_cancelled_put_changes_nothing(plain_world: Worlds) -> None:
    async with plain_world() as w:
        await w.bus.blobs.put("x", b"old")
        with anyio.move_on_after(0.002) as scope:
            await w.bus.blobs.put("x", b"n" * (30 << 20))
        assert scope.cancelled_caught
        assert await w.bus.blobs.get("x") == b"old"
        strict = Claims(w.aside.claims.stores.values(), background=False, orphan_seconds=0.0)
        await strict.sweep()
        assert len(await w.blobs("blob.data.>")) == 1


async def test_memory_does_not_grow_with_the_size(nats_url: str, tmp_path: Path) -> None:
    """A window of 16 MB, once more where the socket keeps it, and eight pieces: less than the file."""
    path = tmp_path / "in"
    path.write_bytes(bytes(80 << 20))
    async with nats_world(nats_url, store_gb=1.0) as w:
        tracemalloc.start()
        try:
            await w.bus.blobs.put("x", path)
            await w.bus.blobs.save("x", tmp_path / "out")
            highest = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert (tmp_path / "out").stat().st_size == 80 << 20
        assert highest < 48 << 20


async def test_blobs_move_through_kills_of_the_server(tmp_path: Path) -> None:
    content = os.urandom(CHUNK) * 40
    async with serve(tmp_path / "server", run="kills", store_gb=1.0) as handle:
        await provision(handle.url, run="kills", token=handle.token, store_gb=1.0)

        async def kill_when(name: str, figure: float) -> None:
            wanted = handle.restarts + 1
            while bus.statistics()[name] < figure:  # noqa: ASYNC110 (a figure has no event)
                await anyio.sleep(0.001)
            os.kill(handle.pid, signal.SIGKILL)
            while handle.restarts < wanted:  # noqa: ASYNC110
                await anyio.sleep(0.005)

        async with connect(handle.url, run="kills", role="x", instance="1", token=handle.token) as bus:
            with anyio.fail_after(30):
                async with anyio.create_task_group() as group:
                    group.start_soon(kill_when, "publish_stored", 10.0)
                    await bus.blobs.put("x", content)
                async with anyio.create_task_group() as group:
                    read = bus.statistics()["connection_in_bytes"]
                    group.start_soon(kill_when, "connection_in_bytes", read + 10 * CHUNK)
                    assert await bus.blobs.get("x") == content
            assert bus.statistics()["connection_reconnects"] == 2


async def test_work_waits_while_its_body_is_fetched(plain_world: Worlds) -> None:
    """Several readers of one consumer get each delivery once, bodies or not."""
    async with plain_world(inline=SMALL) as w:
        tickets: list[DesignTicket] = [ticket(number) for number in range(8)]
        large = [msgspec.structs.replace(one, skill="x" * 3 * SMALL) for one in tickets[::2]]
        await w.bus.publish_all([*large, *tickets[1::2]])
        seen: list[int] = []

        async def read() -> None:
            while True:
                delivery = await anext(source)
                seen.append(delivery.message.slot)
                await delivery.ack()
                if len(seen) == 8:
                    group.cancel_scope.cancel()

        async with w.bus.consume("designer", limit=8) as source:
            with anyio.fail_after(10):
                async with anyio.create_task_group() as group:
                    for _ in range(3):
                        group.start_soon(read)
            assert sorted(seen) == list(range(8))
            assert await nothing_comes(source)
