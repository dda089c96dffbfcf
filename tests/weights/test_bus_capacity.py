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

from bus import Bus, connect, provision, serve
from engine.config import BusConfig, Config, ModelConfig, RunConfig, ServerConfig
from engine.errors import ConfigError, SpadeError
from engine.lineage import Version
from engine.weights import bus_capacity
from engine.weights.publisher import FilePublisher

STORE_GB = 0.1  # a tenth of it is for what has a name: 10.7 MB
SHARE = 0.1
GB = 1 << 30


@asynccontextmanager
async def on_bus(directory: Path) -> AsyncIterator[Bus]:
    async with serve(directory, run="room", store_gb=STORE_GB) as handle:
        join = {"run": "room", "token": handle.token}
        await provision(handle.url, **join, store_gb=STORE_GB)
        async with connect(handle.url, role="learner", instance="0", **join) as bus:
            yield bus


def weights(step: int, megabytes: int) -> dict[str, torch.Tensor]:
    return {"layer": torch.full((megabytes << 18,), float(step))}


async def test_as_many_versions_as_are_kept_are_enough_room(tmp_path: Path) -> None:
    """Of the versions that were announced, what servers may be on their way to stays during an upload."""
    async with on_bus(tmp_path / "bus") as bus:
        publisher = FilePublisher(tmp_path / "learner", bus=True, keep=3)
        announced: list[str] = []
        for step in range(7):
            release = publisher.release(Version(0, step), weights(step, 3))
            with anyio.fail_after(20):
                await publisher.upload(bus.blobs, release)
            for name in [*announced[-2:], release.name]:
                assert await bus.blobs.info(name) is not None
            announced.append(release.name)
            await publisher.tidy(bus.blobs)
        assert bus.statistics()["publish_full"] == 0
        assert await bus.blobs.info(announced[0]) is None


async def test_versions_that_do_not_fit_are_refused_before_the_first_is_put(tmp_path: Path) -> None:
    async with on_bus(tmp_path / "bus") as bus:
        publisher = FilePublisher(tmp_path / "learner", bus=True, keep=3)
        release = publisher.release(Version(0, 0), weights(0, 4))
        with pytest.raises(ConfigError, match=r"3 versions of 0\.00391 GB each") as caught:
            await publisher.upload(bus.blobs, release)
        assert (await bus.stream_info("BLOB")).messages == 0
        assert "Make bus.store_gb 1.2 times as large" in str(caught.value)


async def test_an_upload_that_finds_no_room_ends_and_says_which(tmp_path: Path) -> None:
    async with on_bus(tmp_path / "bus") as bus:
        await bus.blobs.put("somebody.elses", bytes(9 << 20))
        publisher = FilePublisher(tmp_path / "learner", bus=True, keep=3, seconds=0.5)
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
) -> Config:
    model = ModelConfig(path=str(path), dtype=dtype)
    server = ServerConfig(weights=weights)
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


@given(st.integers(1, 1 << 40), st.integers(2, 20), st.floats(0.1, 1.0))
def test_what_the_error_asks_for_is_enough_and_not_much_more(size: int, keep: int, part: float) -> None:
    """A store that is ``part`` of what would do, of which weights have less than their share."""
    wanted = bus_capacity.needed(size, keep)
    bound = part * wanted * 0.999
    store_gb = bound / (0.8 * SHARE) / GB
    with pytest.raises(ConfigError) as caught:
        bus_capacity.require(size, keep, bound, store_gb=store_gb)
    told = re.search(r"bus.store_gb to (\S+) or", str(caught.value))
    assert told is not None
    enough = float(told[1]) / store_gb * bound
    bus_capacity.require(size, keep, enough, store_gb=float(told[1]))
    assert enough <= wanted * 1.11 + GB * 1e-4
    with pytest.raises(ConfigError) as caught:
        bus_capacity.require(size, keep, bound)
    told = re.search(r"bus.store_gb (\S+) times as large", str(caught.value))
    assert told is not None
    assert wanted <= float(told[1]) * bound <= wanted * 1.11
