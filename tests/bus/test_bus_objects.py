"""Named bytes: whole or not at all, without leftovers, through kills of the server."""

from __future__ import annotations

import hashlib
import os
import random
import tracemalloc
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import anyio
import pytest
from bus_trouble import kill, served, until
from bus_worlds import World, nats_world

from bus import BusError, NotFound, Undecodable, objects
from bus.objects import PIECE

Worlds = Callable[..., AbstractAsyncContextManager[World]]


async def pieces(w: World) -> list[str]:
    """Return the tails of all stored pieces."""
    bus = w.bus
    body = {"subjects_filter": bus.names.subject("blob.data.>")}
    info = await bus.connection.api(f"STREAM.INFO.{bus.names.stream('BLOB')}", body)
    return sorted(map(bus.names.tail, info["state"].get("subjects") or ()))


async def test_named_blobs_hold_bytes_and_files(world: Worlds, tmp_path: Path) -> None:
    async with world() as w, w.peer("tester", "two") as other:
        assert await w.bus.blobs.info("weights.3") is None
        path, content = tmp_path / "in", random.Random(1).randbytes(3 * PIECE + 17)
        path.write_bytes(content)
        info = await w.bus.blobs.put("weights.3", path)
        assert (info.size, info.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert await other.blobs.info("weights.3") == info
        assert await other.blobs.get("weights.3") == content
        assert await other.blobs.save("weights.3", tmp_path / "out") == info
        assert (tmp_path / "out").read_bytes() == content
        assert await w.bus.blobs.put("empty", b"") != info
        assert await other.blobs.get("empty") == b""
        assert await w.bus.blobs.put("view", memoryview(content)[5:9])
        assert [await other.blobs.remove(name) for name in ("weights.3", "weights.3")] == [True, False]
        assert await other.blobs.get("view") == content[5:9]


async def test_a_replaced_blob_is_new_and_the_old_one_goes(nats_url: str) -> None:
    async with nats_world(nats_url) as w:
        first = await w.bus.blobs.put("x", b"a" * 3 * PIECE)
        second = await w.bus.blobs.put("x", b"b" * 2 * PIECE)
        assert second.id != first.id
        assert await w.bus.blobs.get("x") == b"b" * 2 * PIECE
        assert await pieces(w) == [f"blob.data.{second.id}.{number}" for number in (0, 1)]
        await w.bus.blobs.remove("x")
        assert await pieces(w) == []


async def test_blobs_that_cannot_be_used_raise(nats_url: str, tmp_path: Path) -> None:
    async with nats_world(nats_url) as w:
        with pytest.raises(NotFound, match="no blob nothing"):
            await w.bus.blobs.get("nothing")
        with pytest.raises(BusError, match="characters"):
            await w.bus.blobs.put("no spaces", b"")
        with pytest.raises(FileNotFoundError):
            await w.bus.blobs.put("x", tmp_path / "nowhere")
        assert await w.bus.blobs.info("x") is None
        info = await w.bus.blobs.put("x", b"a" * 2 * PIECE)
        await w.inject("BLOB", f"blob.data.{info.id}.1", b"a" * (PIECE - 1) + b"b")
        with pytest.raises(Undecodable, match="damaged"):
            await w.bus.blobs.save("x", tmp_path / "out")
        await w.bus.purge("BLOB", tail=f"blob.data.{info.id}.1")
        with pytest.raises(Undecodable, match="piece 1 of 2"):
            await w.bus.blobs.get("x")
        assert os.listdir(tmp_path) == []


async def test_a_cancelled_put_changes_nothing_and_its_pieces_go_later(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with nats_world(nats_url) as w:
        bus = w.bus
        kept = await bus.blobs.put("x", b"old")
        async with anyio.create_task_group() as group:
            group.start_soon(bus.blobs.put, "x", b"n" * (24 << 20))
            await until(lambda: bus.statistics()["publish_stored"] > 4, "some pieces")
            group.cancel_scope.cancel()
        assert await bus.blobs.get("x") == b"old"
        orphans = len(await pieces(w)) - 1
        assert orphans > 0
        other = await bus.blobs.put("y", b"new")  # another writer may be alive
        assert len(await pieces(w)) == orphans + 2
        monkeypatch.setattr(objects, "ORPHAN_SECONDS", -1.0)
        await bus.blobs.put("z", b"")
        assert await pieces(w) == sorted(f"blob.data.{one.id}.0" for one in (kept, other))


async def test_memory_does_not_grow_with_the_size(nats_url: str, tmp_path: Path) -> None:
    """A window of 16 MB, twice where the socket keeps it: less than the file."""
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
    content = os.urandom(PIECE) * 20
    async with served(tmp_path) as (handle, bus):

        async def kill_when(begun: Callable[[], bool]) -> None:
            await until(begun, "the first pieces", 30)
            await kill(handle)

        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(kill_when, lambda: bus.statistics()["publish_stored"] >= 8)
                await bus.blobs.put("x", content)
            async with anyio.create_task_group() as group:
                figures = bus.connection.client.stats
                enough = figures["in_bytes"] + 8 * PIECE
                group.start_soon(kill_when, lambda: figures["in_bytes"] >= enough)
                assert await bus.blobs.get("x") == content
        assert bus.statistics()["connection_reconnects"] == 2


async def test_a_reader_gets_the_old_bytes_or_the_new_ones(nats_url: str) -> None:
    """Sixteen times, a name is replaced while another client reads it."""
    async with nats_world(nats_url) as w, w.peer("tester", "two") as other:
        versions = [bytes([number]) * (2 * PIECE + number) for number in range(16)]
        await w.bus.blobs.put("x", versions[0])
        read: list[bytes] = []

        async def write() -> None:
            for version in versions[1:]:
                await w.bus.blobs.put("x", version)

        async with anyio.create_task_group() as group:
            group.start_soon(write)
            while not read or read[-1] != versions[-1]:
                try:
                    read.append(await other.blobs.get("x"))
                except BusError as error:
                    assert "changes faster" in str(error)  # noqa: PT017 (the other outcome)
        assert set(read) <= set(versions)
