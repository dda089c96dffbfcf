"""The server role with weights on the bus: what cannot be fetched is tried again while the old ones serve."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
import structlog
from scenes.fake_vllm import FakeVllm, fake_vllm, policy, until
from scenes.memory_bus import MemoryBus

import roles.server.lifecycle as life
from bus import BusUnavailable
from bus.messages import PolicyPublished, ServerServing
from engine.config import AgentConfig, Config, ModelConfig, RunConfig, SamplingConfig, ServerConfig
from engine.errors import ConfigError
from roles.base import RoleContext
from roles.learner.role import LearnerRole
from roles.server.role import ServerRole as ServerRole


def config(url: str, **settings) -> Config:
    return Config(
        run=RunConfig(name="t"),
        model=ModelConfig(path="x"),
        server=ServerConfig(urls=(url,), start_seconds=5.0, canary_tolerance=1e-3, **settings),
        agent=AgentConfig(sampling=SamplingConfig(max_tokens=4)),
    )


class Stage:
    """The role, the learner's end of the bus, and what was announced."""

    def __init__(self, fake: FakeVllm, directory: Path, **settings) -> None:
        self.fake, self.bus = fake, MemoryBus(run="t", role="learner", instance="learner-0")
        self.context = RoleContext(
            config=config(fake.url, weights="bus", **settings),
            bus=self.bus.peer("server", "server-0"),
            directory=directory,
            instance="server-0",
            log=structlog.get_logger(),
        )
        self.role = ServerRole(self.context)
        self.cache = directory / "weights-cache" / "server-0"

    async def publish(self, version: int, *, there: bool = True) -> PolicyPublished:
        """Announce weights; ``there`` says whether they lie on the bus."""
        name = f"weights.whole.0-{version}"
        info = await self.bus.blobs.put(name, b"weights %d" % version)
        if not there:
            await self.bus.blobs.remove(name)
        made = msgspec.structs.replace(policy(version), uri=f"bus:{name}", sha256=info.sha256, size=info.size)
        await self.bus.publish(made)
        return made

    async def served(self, version: int) -> None:
        with anyio.fail_after(10):
            async with self.bus.follow("EVENT", tails=("event.server.serving",)) as records:
                async for record in records:
                    assert isinstance(record.message, ServerServing)
                    if record.message.version == version:
                        return


@asynccontextmanager
async def stage(tmp_path: Path, **settings) -> AsyncIterator[Stage]:
    async with fake_vllm() as fake:
        made = Stage(fake, tmp_path, **settings)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.role.run)
            yield made
            made.context.draining.set()


async def test_weights_are_fetched_into_the_cache_and_given_as_a_file(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await made.publish(1)
        await made.served(1)
        (file,) = made.cache.iterdir()
        assert file.read_bytes() == b"weights 1"
        info = made.fake.infos[-1]
        assert info == {"path": str(file)}
        for version in (2, 3, 4):
            await made.publish(version)
            await made.served(version)
        assert len(list(made.cache.iterdir())) == 2


async def test_a_fetch_that_fails_is_repeated_while_the_old_version_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "_FETCH_SECONDS", (0.01, 0.05))
    async with stage(tmp_path) as made:
        await made.publish(1)
        await made.served(1)
        blobs, calls = made.role._loader._blobs, 0
        original = blobs.save

        async def cut(name: str, path: Path):
            nonlocal calls
            calls += 1
            if calls < 4:
                raise BusUnavailable("the broker", 1.0)
            return await original(name, path)

        monkeypatch.setattr(blobs, "save", cut)
        pauses = made.fake.order.count("pause")
        await made.publish(2)
        await until(lambda: calls == 3)
        assert (made.fake.version, made.fake.order.count("pause")) == ("1", pauses)
        assert not made.fake.paused
        await made.served(2)
        assert calls == 4


async def test_a_newer_version_takes_the_place_of_one_that_cannot_be_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(tmp_path) as made:
        blobs = made.role._loader._blobs
        original = blobs.save
        tried: list[str] = []

        async def cut(name: str, path: Path):
            tried.append(name)
            if name.endswith("-1"):
                raise BusUnavailable("the broker", 1.0)
            return await original(name, path)

        monkeypatch.setattr(blobs, "save", cut)
        await made.publish(1)
        await until(lambda: bool(tried))
        await made.publish(2)
        await made.served(2)
        assert tried == ["weights.whole.0-1", "weights.whole.0-2"]


async def test_weights_that_are_gone_wait_for_the_next_version(tmp_path: Path) -> None:
    async with stage(tmp_path) as made:
        await made.publish(1)
        await made.served(1)
        await made.publish(2, there=False)
        await made.publish(3)
        await made.served(3)
        assert made.fake.version == "3"


@pytest.mark.parametrize("way", ["nccl"])
@pytest.mark.parametrize("role", [ServerRole, LearnerRole])
def test_device_paths_are_refused_on_the_cpu_build_before_anything_starts(way: str, role: type) -> None:
    from engine.inference import launch

    if not launch.on_cpu():
        pytest.skip("vLLM is built for GPUs")
    with pytest.raises(ConfigError, match="the installed vLLM is the CPU build"):
        role.check(config("http://127.0.0.1:1", weights=way))
    role.check(config("http://127.0.0.1:1", weights="bus"))
