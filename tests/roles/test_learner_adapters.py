"""The learner role that publishes adapters: what it announces, and what a restart makes of the names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
import structlog
from learner_fakes import make_policy, random_samples, round_of
from scenes.memory_bus import MemoryBus

from bus.concurrency import flat_task_group
from bus.messages import PolicyPublished
from engine.config import (
    Config,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ServerConfig,
)
from engine.context import RoleContext
from engine.inference import adapters
from engine.lineage import Version
from engine.weights import store
from roles.learner.role import LearnerRole as LearnerRole

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Killed(Exception):
    """Stands for the end of the process."""


@asynccontextmanager
async def running(bus: MemoryBus, config: Config, directory: Path, instance: str) -> AsyncIterator[None]:
    context = RoleContext(
        config=config,
        bus=bus.peer("learner", instance),
        directory=directory,
        instance=instance,
        log=structlog.get_logger(),
    )
    with anyio.fail_after(40):
        async with flat_task_group() as tasks:
            tasks.start_soon(LearnerRole(context).run)
            yield
            context.draining.set()


async def until_published(bus: MemoryBus, count: int) -> None:
    async with bus.follow("EVENT") as records:
        async for record in records:
            count -= isinstance(record.message, PolicyPublished)
            if not count:
                return


async def test_adapters_are_announced_and_a_restart_gives_them_other_names(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    bus = MemoryBus(run="test", role="scorer", instance="0")
    config = Config(
        run=RunConfig(name="test"),
        model=ModelConfig(path=str(make_policy(tmp_path / "policy")), max_model_len=128),
        learner=LearnerConfig(
            lora=LoraConfig(rank=4, alpha=8.0, publish="adapter"),
            optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.0),
            step_seconds=30.0,
            checkpoint_every=100,
        ),
        server=ServerConfig(weights="bus"),
    )
    await bus.publish_all(round_of(0, random_samples(4, seed=0, round_=0)))
    with pytest.raises(Killed):  # noqa: PT012
        async with running(bus, config, tmp_path, "0"):
            await until_published(bus, 2)
            raise Killed
    async with running(bus, config, tmp_path, "1"):
        await until_published(bus, 4)
    published = [
        record.message async for record in bus.replay("EVENT") if isinstance(record.message, PolicyPublished)
    ]
    versions = [Version.unpack(policy.version) for policy in published]
    assert versions == [Version(0, 0), Version(0, 1), Version(1, 0), Version(1, 1)]
    names = [adapters.name("test", policy.version) for policy in published]
    assert len(set(names)) == 4, "what is trained again has a name of its own"
    for policy, version in zip(published, versions, strict=True):
        assert policy.uri == f"bus:weights.whole.{version.fence}-{version.step}"
        assert policy.size < 100_000, "the adapter alone"
    newest = tmp_path / "adapters" / f"{versions[-1].fence}-{versions[-1].step}" / "adapter_model.safetensors"
    await bus.blobs.save(published[-1].uri.removeprefix("bus:"), tmp_path / "fetched")
    assert store.file_digest(tmp_path / "fetched") == store.file_digest(newest) == published[-1].sha256
    assert all(".lora_" in name for name in load_file(newest))
