"""Servers that are given adapters: what the role loads, what the pool names, what a token's version is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from adapter_files import AdapterLearner
from scenes.fake_vllm import fake_vllm, logprob, until
from server_stage import Nursery, Stage, on_stage, owned

import roles.server.role as server_role
from bus.messages import ServerLost, ServerServing
from engine.config import (
    LearnerConfig,
    LoraConfig,
    SamplingConfig,
)
from engine.inference import adapters
from engine.inference.completion import Completion
from engine.inference.pool import InferencePool
from engine.weights.adapters import AdapterLoader

__all__ = ["owned"]
SAMPLING = SamplingConfig(max_tokens=8)


class AdapterStage(Stage):
    """A learner, a server role and a pool on one bus."""

    def __init__(self, directory: Path, *urls: str, way: str = "file", lag: int = 2) -> None:
        learner = LearnerConfig(lora=LoraConfig(rank=4, publish="adapter"))
        super().__init__(directory, urls, learner=learner, weights=way)
        self.learner = AdapterLearner(directory / "adapters", self.bus, way=way)
        self.pool = InferencePool(max_concurrency=8, request_seconds=10.0, max_lag=lag, adapters="t")

    async def publish(self, step: int, *, servers: int = 1) -> None:
        """Publish a version, and return when so many servers have it and the pool knows."""
        await self.bus.publish(await self.learner.publish(step))
        await self.until(
            lambda facts: len([f for f in facts if getattr(f, "version", None) == step]) >= servers
        )
        await until(lambda: list(self.pool.versions().values()).count(step) >= servers)

    async def generate(self, key: str = "e") -> Completion:
        completion = await self.pool.generate([3, 4], sampling=SAMPLING, key=key, stop_token_ids=())
        for span in completion.spans:
            expected = [logprob(token, str(span.version)) for token in completion.tokens]
            assert completion.logprobs[span.start : span.stop] == expected[span.start : span.stop]
        return completion

    async def version(self, key: str = "e") -> list[int]:
        return [span.version for span in (await self.generate(key)).spans]


@asynccontextmanager
async def playing(stage: AdapterStage) -> AsyncIterator[AdapterStage]:
    """The role, the pool and the record run; leave by draining the role."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage.pool.watch, stage.bus)
        async with on_stage(stage):
            yield stage
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("way", ["file", "bus"])
async def test_each_version_is_sampled_by_its_own_adapter(tmp_path: Path, way: str) -> None:
    async with fake_vllm() as fake, playing(AdapterStage(tmp_path, fake.url, way=way)) as stage:
        for step in range(6):
            await stage.publish(step)
            assert await stage.version() == [step]
        assert fake.named == [adapters.name("t", step) for step in range(6)]
        assert {"pause", "update_weights", "start_weight_update"}.isdisjoint(fake.order)
        assert fake.version == "default", "the weights beneath stay"


async def test_a_request_in_flight_ends_by_the_adapter_that_began_it(tmp_path: Path) -> None:
    async with fake_vllm(pace=0.05) as fake, playing(AdapterStage(tmp_path, fake.url, lag=9)) as stage:
        await stage.publish(1)
        found: list[list[int]] = []

        async def one() -> None:
            found.append(await stage.version("slow"))

        async with anyio.create_task_group() as tasks:
            fake.tokens = 30
            body = len(fake.bodies)
            tasks.start_soon(one)
            await until(lambda: len(fake.bodies) > body)
            for step in (2, 3):
                fake.tokens = 4
                await stage.publish(step)
                assert await stage.version("quick") == [step]
        assert found == [[1]]


async def test_traffic_never_stands_still_and_every_token_is_what_its_version_says(tmp_path: Path) -> None:
    async with fake_vllm(pace=0.002) as one, fake_vllm(pace=0.002) as two:
        async with playing(AdapterStage(tmp_path, one.url, two.url)) as stage:
            await stage.publish(0, servers=2)
            versions: set[int] = set()
            ended = anyio.Event()

            async def play(key: str) -> None:
                while not ended.is_set():
                    versions.update(await stage.version(key))

            async with anyio.create_task_group() as tasks:
                for index in range(8):
                    tasks.start_soon(play, f"e{index}")
                for step in range(1, 9):
                    await stage.publish(step, servers=2)
                await until(lambda: 8 in versions)
                ended.set()
            assert stage.pool.statistics()["failures"] == 0
            assert not [fact for fact in stage.facts if isinstance(fact, ServerLost)]
        for fake in (one, two):
            assert len(fake.named) == len(set(fake.named)) == 9
            assert not fake.calls["/pause"]


async def test_a_server_that_restarts_has_the_newest_adapter_before_it_is_asked(
    tmp_path: Path, owned: Callable[..., Nursery], monkeypatch: pytest.MonkeyPatch
) -> None:
    nursery = owned()
    put_away: list[str] = []
    monkeypatch.setattr(AdapterLoader, "ended", lambda _, client: put_away.append(client.url))
    async with playing(AdapterStage(tmp_path)) as stage:
        await stage.publish(1)
        await stage.publish(2)
        assert await stage.version() == [2]
        nursery.end()
        await stage.until(lambda facts: len([f for f in facts if isinstance(f, ServerServing)]) == 3)
        assert await stage.version() == [2]
        assert nursery.fakes[1].named == [adapters.name("t", 2)]
        asked = [body.get("model") for body in nursery.fakes[1].bodies if "sampling_params" in body]
        assert set(asked) == {adapters.name("t", 2)}
        assert put_away == [nursery.fakes[0].url], "the copies of its first life"


async def test_a_server_that_lost_its_adapters_behind_our_back_is_proved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roles.server.lifecycle.PROBE_SECONDS", 0.05)
    monkeypatch.setattr(server_role, "LONGEST_BACKOFF", 0.01)
    async with fake_vllm() as fake, playing(AdapterStage(tmp_path, fake.url)) as stage:
        await stage.publish(1)
        fake.adapters.clear()
        assert await stage.version() == [1], "it waits for the proof instead of the base model's tokens"
        assert [type(fact) for fact in stage.facts] == [ServerServing, ServerLost, ServerServing]


async def test_another_role_takes_over_without_a_load(tmp_path: Path) -> None:
    async with fake_vllm() as fake:
        stage = AdapterStage(tmp_path, fake.url)
        async with playing(stage):
            await stage.publish(1)
        stage.facts.clear()
        stage.begin()
        async with playing(stage):
            await stage.until(lambda facts: any(isinstance(f, ServerServing) for f in facts[2:]))
            assert await stage.version() == [1]
            assert fake.named == [adapters.name("t", 1)]
            await stage.publish(2)
            assert await stage.version() == [2]
