"""A stream of samples that gets full before a checkpoint is due: the learner writes one early (I8)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from learner_fakes import round_of, sample, segment
from learner_stub import StubWorld, without_model
from structlog.testing import capture_logs

from bus import Bus, connect, provision, serve
from engine.config import RoleTraining
from engine.training.checkpoint import places
from engine.training.samples import CreditedSample

__all__ = ["without_model"]
pytestmark = [pytest.mark.usefixtures("without_model"), pytest.mark.timeout(120)]
RUN = "test"


@asynccontextmanager
async def small(directory: Path, store_gb: float, *roles: str) -> AsyncIterator[list[Bus]]:
    """A server with a store of ``store_gb``, and a client for each of ``roles``."""
    async with serve(directory / "bus", run=RUN, store_gb=store_gb) as server:
        await provision(server.url, run=RUN, token=server.token, store_gb=store_gb)
        clients = [
            connect(server.url, run=RUN, role=role, instance=str(index), token=server.token)
            for index, role in enumerate(roles)
        ]
        async with clients[0] as first, clients[1] as second, clients[2] as third:
            yield [first, second, third]


def large(round_: int, index: int, positions: int) -> CreditedSample:
    """About nine bytes a position."""
    part = segment([1] * positions, [0, 0] + [1] * (positions - 2))
    return sample(f"{round_}-{index}", round_=round_, segments=[part])


async def play(bus: Bus, rounds: int, samples: int, positions: int) -> None:
    for round_ in range(rounds):
        *messages, closed = round_of(
            round_, [large(round_, index, positions) for index in range(samples)], final=round_ == rounds - 1
        )
        await bus.publish_all(messages)
        await bus.publish(closed)


@pytest.mark.parametrize(
    ("stream", "store_gb", "samples", "positions", "rounds"),
    [
        pytest.param("SAMPLE", 0.0106, 4, 20_000, 12, id="samples"),
        pytest.param("SAMPLE", 0.0352, 2, 160_000, 16, id="large samples", marks=pytest.mark.slow),
    ],
)
async def test_the_learner_makes_room_before_its_checkpoint_is_due(
    tmp_path: Path, stream: str, store_gb: float, samples: int, positions: int, rounds: int
):
    """More than the stream holds; the learner dies on the way, and comes back when the stream is full."""
    async with small(tmp_path, store_gb, "scorer", "learner", "learner") as (scorer, first, second):
        world = StubWorld(tmp_path, scorer, checkpoint_every=1000, agent=RoleTraining(max_staleness=1000))
        with capture_logs() as logs, anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(play, scorer, rounds, samples, positions)
                await world.interrupted(
                    world.role(bus=first), lambda: world.until(lambda batch: batch.round == 1)
                )
                await full(scorer, stream)
                async with world.running(world.role(bus=second)):
                    last = await world.until(lambda batch: batch.final)
        early = [entry for entry in logs if entry["event"] == "learner.checkpoint_early"]
        assert last.step == rounds
        assert stream in {entry["stream"] for entry in early}
        assert 2 <= len(early) < 2 * rounds, "two lives"
        assert places(tmp_path / "learner" / "checkpoints")


async def full(bus: Bus, stream: str) -> None:
    """Wait until nothing more gets in."""
    before = -1
    while True:
        info = await bus.stream_info(stream)
        if info.bytes == before and info.messages:
            return
        before = info.bytes
        await anyio.sleep(0.5)


async def test_a_roomy_stream_changes_nothing(tmp_path: Path):
    world = StubWorld(tmp_path, checkpoint_every=1000)
    with capture_logs() as logs:
        async with world.running(world.role()):
            await play(world.bus, 3, 2, 2_000)
            await world.until(lambda batch: batch.final)
    assert not [entry for entry in logs if entry["event"] == "learner.checkpoint_early"]
    assert len(places(tmp_path / "learner" / "checkpoints")) == 1
