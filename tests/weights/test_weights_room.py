"""Weights that travel by the bus have room there, or the run says so before it needs it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import anyio
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from scenes.memory_bus import MemoryBus

from bus import NatsBus, connect, provision, serve
from engine.config import BusConfig, Config, ModelConfig, RunConfig, ServerConfig
from engine.errors import ConfigError, SpadeError
from engine.lineage import Version
from engine.weights import bus_capacity
from engine.weights.publisher import Publisher

STORE_GB = 0.1  # a tenth of it is for what has a name: 10.7 MB
SHARE = 0.1
GB = 1 << 30


@asynccontextmanager
async def on_bus(directory: Path) -> AsyncIterator[NatsBus]:
    async with serve(directory, run="room", store_gb=STORE_GB) as handle:
        join = {"run": "room", "token": handle.token}
        await provision(handle.url, **join, store_gb=STORE_GB)
        async with connect(handle.url, role="learner", instance="0", **join) as bus:
            yield bus


def weights(step: int, megabytes: int) -> dict[str, torch.Tensor]:
    return {"layer": torch.full((megabytes << 18,), float(step))}


@pytest.mark.parametrize("deltas", [False, True])
async def test_as_many_versions_as_are_kept_are_enough_room(tmp_path: Path, deltas: bool) -> None:
    """Of the versions that were announced, what servers may be on their way to stays during an upload."""
    async with on_bus(tmp_path / "bus") as bus:
        publisher = Publisher(tmp_path / "learner", bus=True, keep=3, deltas=deltas, keyframe_every=2)
        announced: list[tuple[str, ...]] = []
        for step in range(7):
            release = publisher.release(Version(0, step), weights(step, 2 if deltas else 3))
            with anyio.fail_after(20):
                await publisher.upload(bus.blobs, release)
            for names in [*announced[-2:], release.names]:
                assert None not in [await bus.blobs.info(name) for name in names]
            announced.append(release.names)
            await publisher.tidy(bus.blobs)
        assert bus.statistics()["publish_full"] == 0
        if not deltas:
            assert await bus.blobs.info(announced[0][0]) is None


async def test_with_deltas_one_chain_takes_up_to_one_file_more(tmp_path: Path) -> None:
    """The last version of a long chain needs all of it, and whole files may follow one another."""
    bus = MemoryBus(run="room", role="learner", instance="0")
    publisher = Publisher(tmp_path, bus=True, keep=3, deltas=True)
    draw = torch.Generator().manual_seed(0)
    values, sizes = torch.randn(1 << 19, generator=draw).bfloat16(), []
    for step, changed in enumerate([1.0, 0.3, 0.3, 1.0, 1.0]):
        others = torch.randn(values.shape, generator=draw).bfloat16()
        values = torch.where(torch.rand(values.shape, generator=draw) < changed, others, values)
        release = publisher.release(Version(0, step), {"layer": values})
        await publisher.upload(bus.blobs, release)
        sizes.append((await bus.stream_info("BLOB")).bytes)
        await publisher.tidy(bus.blobs)
    assert (
        bus_capacity.needed(release.size, 3) < max(sizes) <= bus_capacity.needed(release.size, 3, deltas=True)
    )
    with pytest.raises(ConfigError, match=r"3 versions of .* GB each and their deltas"):
        bus_capacity.require(release.size, 3, bus_capacity.needed(release.size, 3), deltas=True)


async def test_versions_that_do_not_fit_are_refused_before_the_first_is_put(tmp_path: Path) -> None:
    async with on_bus(tmp_path / "bus") as bus:
        publisher = Publisher(tmp_path / "learner", bus=True, keep=3)
        release = publisher.release(Version(0, 0), weights(0, 4))
        with pytest.raises(ConfigError, match=r"3 versions of 0\.00391 GB each") as caught:
            await publisher.upload(bus.blobs, release)
        assert (await bus.stream_info("BLOB")).messages == 0
        assert "Make bus.store_gb 1.2 times as large" in str(caught.value)


async def test_an_upload_that_finds_no_room_ends_and_says_which(tmp_path: Path) -> None:
    async with on_bus(tmp_path / "bus") as bus:
        await bus.blobs.put("somebody.elses", bytes(9 << 20))
        publisher = Publisher(tmp_path / "learner", bus=True, keep=3, seconds=0.5)
        release = publisher.release(Version(2, 7), weights(0, 3))
        with (
            anyio.fail_after(20),
            anyio.CancelScope(shield=True),
            pytest.raises(SpadeError, match=r"weights\.whole\.2-7 \(\d+ bytes\).* within 0.5 s.* BLOB full"),
        ):
            await publisher.upload(bus.blobs, release)


def recipe(
    path: Path,
    *,
    weights: Literal["file", "bus"] = "bus",
    store_gb: float = STORE_GB,
    dtype: Literal["float32", "bfloat16"] = "float32",
    deltas: bool = False,
    keyframe_every: int = 8,
) -> Config:
    model = ModelConfig(path=str(path), dtype=dtype)
    server = ServerConfig(weights=weights, deltas=deltas, keyframe_every=keyframe_every)
    return Config(run=RunConfig(name="room"), model=model, server=server, bus=BusConfig(store_gb=store_gb))


def test_a_run_whose_weights_do_not_fit_does_not_start(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(1 << 20, dtype=torch.bfloat16), "b": torch.zeros(7, dtype=torch.int64)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert bus_capacity.published_bytes(tmp_path, "float32") == (4 << 20) + 56
    assert bus_capacity.published_bytes(tmp_path, "bfloat16") == bus_capacity.published_bytes(
        tmp_path, "auto"
    )
    assert bus_capacity.published_bytes(tmp_path, "auto") == (2 << 20) + 56
    with pytest.raises(ConfigError) as caught:
        bus_capacity.check(recipe(tmp_path), tmp_path)
    enough = re.search(r"bus.store_gb to ([0-9.]+)", str(caught.value))
    assert enough is not None
    bus_capacity.check(recipe(tmp_path, store_gb=float(enough[1])), tmp_path)
    bus_capacity.check(recipe(tmp_path, dtype="bfloat16"), tmp_path)
    bus_capacity.check(recipe(tmp_path, weights="file"), tmp_path)


def test_deltas_are_looked_at_before_the_start(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3 << 18)}, tmp_path / "model.safetensors")
    bus_capacity.check(recipe(tmp_path), tmp_path)
    bus_capacity.check(recipe(tmp_path, deltas=True, keyframe_every=1), tmp_path)
    with pytest.raises(ConfigError, match=r"bus\.store_gb to 0\.12 or more"):
        bus_capacity.check(recipe(tmp_path, deltas=True), tmp_path)
    bus_capacity.check(recipe(tmp_path, deltas=True, store_gb=0.12), tmp_path)


@given(st.integers(1, 1 << 40), st.integers(2, 20), st.booleans(), st.floats(0.1, 1.0))
def test_what_the_error_asks_for_is_enough_and_not_much_more(
    size: int, keep: int, deltas: bool, part: float
) -> None:
    """A store that is ``part`` of what would do, of which weights have less than their share."""
    wanted = bus_capacity.needed(size, keep, deltas=deltas)
    bound = part * wanted * 0.999
    store_gb = bound / (0.8 * SHARE) / GB
    with pytest.raises(ConfigError) as caught:
        bus_capacity.require(size, keep, bound, deltas=deltas, store_gb=store_gb)
    told = re.search(r"bus.store_gb to (\S+) or", str(caught.value))
    assert told is not None
    enough = float(told[1]) / store_gb * bound
    bus_capacity.require(size, keep, enough, deltas=deltas, store_gb=float(told[1]))
    assert enough <= wanted * 1.11 + GB * 1e-4
    with pytest.raises(ConfigError) as caught:
        bus_capacity.require(size, keep, bound, deltas=deltas)
    told = re.search(r"bus.store_gb (\S+) times as large", str(caught.value))
    assert told is not None
    assert wanted <= float(told[1]) * bound <= wanted * 1.11
