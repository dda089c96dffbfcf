"""The real vLLM with adapters: versions come during traffic, each token is what peft computes for its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import structlog
from scenes.memory_bus import MemoryBus
from tiny_llama import VOCABULARY, announcement, logprobs, tiny, torch

from bus.messages import PolicyPublished, ServerServing
from engine.config import (
    AgentConfig,
    Config,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    ServerConfig,
)
from engine.inference import adapters
from engine.inference.completion import Completion
from engine.inference.pool import InferencePool
from engine.inference.process import serve
from engine.inference.vllm import VllmClient, open_session
from engine.lineage import Version
from engine.weights.adapters import AdapterPublisher
from roles.base import RoleContext
from roles.server.role import ServerRole

peft = pytest.importorskip("peft")

from engine.training import lora  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

CANARY = tuple(range(3, 51))
NEAR = 1e-4
RUN = "adapted"
VERSIONS = 5
PLAYERS = 6


class Trained:
    """A random Llama and an adapter that changes from version to version, as peft computes it."""

    def __init__(self, directory: Path, table: LoraConfig) -> None:
        base = tiny(directory / "model")
        self.model = peft.get_peft_model(base, lora.peft_config(table)).eval()
        self.publisher = AdapterPublisher(directory / "adapters", lora.settings(self.model))
        self.history: dict[int, dict[str, Any]] = {}

    def publish(self, step: int) -> PolicyPublished:
        """Change every tensor of the adapter; version 0 has none to speak of, as at the start of a run."""
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                if ".lora_" in name:
                    tensor.copy_(0.15 * torch.randn(tensor.shape, generator=generator))
                    tensor.mul_(0.0 if step == 0 and ".lora_B." in name else 1.0)
        tensors = {name: tensor.clone() for name, tensor in lora.tensors(self.model)}
        version = Version(1, step)
        release = self.publisher.release(version, tensors)
        self.history[version.pack()] = peft.get_peft_model_state_dict(self.model)
        self.history[version.pack()] = {k: v.clone() for k, v in self.history[version.pack()].items()}
        return announcement(self.model, version, release, CANARY, vocabulary=VOCABULARY)

    def error(self, version: int, prompt: list[int], completion: Completion) -> float:
        """The largest distance of a completion's log-probs from those of ``version``."""
        peft.set_peft_model_state_dict(self.model, self.history[version])
        expected = logprobs(self.model, prompt + completion.tokens)[len(prompt) - 1 :]
        return float(np.max(np.abs(expected - np.asarray(completion.logprobs))))


async def test_versions_come_during_traffic_and_every_token_is_what_its_version_computes(
    tmp_path: Path,
) -> None:
    table = LoraConfig(rank=8, alpha=32.0, publish="adapter")
    config = Config(
        run=RunConfig(name=RUN),
        model=ModelConfig(path=str(tmp_path / "model"), max_model_len=512),
        agent=AgentConfig(sampling=SamplingConfig(max_tokens=60)),
        learner=LearnerConfig(lora=table),
        server=ServerConfig(max_concurrency=16),
    )
    trained = Trained(tmp_path, table)
    bus = MemoryBus(run=RUN, role="server", instance="server-0")
    pool = InferencePool(max_concurrency=16, request_seconds=60.0, max_lag=9, adapters=RUN)
    done: list[tuple[list[int], int, Completion]] = []  # prompt, newest version at the end, what came
    ended, names = anyio.Event(), set[str]()

    async def play(player: int) -> None:
        turn = 0
        while not ended.is_set():
            turn += 1
            prompt = [5, 6, 7, 10 + player, 10 + turn]
            found = await pool.generate(
                prompt,
                sampling=SamplingConfig(max_tokens=400 if player == 0 else 30),
                key=str(player),
                stop_token_ids=(),
            )
            done.append((prompt, max(pool.versions().values()), found))

    async def serving(step: int) -> None:
        version = Version(1, step).pack()
        await bus.publish(trained.publish(step))
        async with bus.follow("EVENT", tails=("event.server.serving",)) as records:
            async for record in records:
                if isinstance(record.message, ServerServing) and record.message.version == version:
                    assert record.message.canary_error < NEAR
                    return

    async with open_session() as session:
        process = serve(config, tmp_path / "model", index=0, log_path=tmp_path / "vllm.log", session=session)
        async with process as server, anyio.create_task_group() as tasks:
            adopted = msgspec.structs.replace(
                config, server=msgspec.structs.replace(config.server, urls=(server.url,))
            )
            context = RoleContext(
                config=adopted, bus=bus, directory=tmp_path, instance="server-0", log=structlog.get_logger()
            )
            tasks.start_soon(pool.watch, bus)
            tasks.start_soon(ServerRole(context).run)
            client = VllmClient(server.url, session)
            with anyio.fail_after(120):
                await serving(0)
                await pool.ready(30.0)
                async with anyio.create_task_group() as players:
                    for player in range(PLAYERS):
                        players.start_soon(play, player)
                    for step in range(1, VERSIONS):
                        before = len(done)
                        while len(done) < before + PLAYERS:  # noqa: ASYNC110 - a count has no event
                            await anyio.sleep(0.02)
                        await serving(step)
                        names.update(await client.adapters())
                    newest = Version(1, VERSIONS - 1).pack()
                    while newest not in {found.spans[0].version for _, _, found in done}:  # noqa: ASYNC110
                        await anyio.sleep(0.02)
                    ended.set()
            assert pool.statistics()["failures"] == 0
            context.draining.set()
            tasks.cancel_scope.cancel()
    assert names == {adapters.name(RUN, Version(1, step).pack()) for step in range(VERSIONS)}
    sampled = Counter(completion.spans[0].version for _, _, completion in done)
    assert set(sampled) == {Version(1, step).pack() for step in range(VERSIONS)}
    assert any(newest > completion.spans[-1].version for _, newest, completion in done), "none was in flight"
    worst = 0.0
    for prompt, _, completion in done:
        (span,) = completion.spans
        assert (span.start, span.stop) == (0, len(completion.tokens))
        worst = max(worst, trained.error(span.version, prompt, completion))
    assert worst < NEAR
    prompt, last = next((prompt, found) for prompt, _, found in done if found.spans[0].version == newest)
    assert trained.error(Version(1, 1).pack(), prompt, last) > 100 * NEAR, "the versions differ by far"
