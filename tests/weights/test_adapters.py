"""Adapter-only updates on the real vLLM: each version under its own name, proved, old ones forgotten."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import numpy as np
import pytest
import pytest_asyncio

from bus.messages import PolicyPublished
from engine.config import Config, Model, Run, Sampling, Server
from engine.inference.process import serve
from engine.inference.vllm import VllmClient, open_session
from engine.lineage import Version
from engine.weights.adapters import FILE_NAME, AdapterPath, adapter_name
from engine.weights.store import file_digest
from engine.weights.update import Updated, UpdateRefused, update

torch = pytest.importorskip("torch")

from weight_files import tied_model  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

CANARY = list(range(3, 67))
RANK, ALPHA = 4, 8


@dataclass
class World:
    client: VllmClient
    model: torch.nn.Module
    directory: Path
    path: AdapterPath

    def publish(self, step: int) -> tuple[PolicyPublished, torch.nn.Module]:
        """Write an adapter; return its announcement and the model with the adapter merged in."""
        from safetensors.torch import save_file

        generator = torch.Generator().manual_seed(step)
        merged, tensors = copy.deepcopy(self.model), {}
        for index, layer in enumerate(merged.model.layers):
            for name in ("q_proj", "v_proj"):
                target = getattr(layer.self_attn, name).weight
                down = torch.randn(RANK, target.shape[1], generator=generator)
                up = 0.05 * torch.randn(target.shape[0], RANK, generator=generator)
                with torch.no_grad():
                    target += ALPHA / RANK * up @ down
                prefix = f"base_model.model.model.layers.{index}.self_attn.{name}"
                tensors |= {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
        home = self.directory / str(step)
        home.mkdir()
        save_file(tensors, home / FILE_NAME)
        settings = {
            "peft_type": "LORA",
            "r": RANK,
            "lora_alpha": ALPHA,
            "target_modules": ["q_proj", "v_proj"],
        }
        (home / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "x"}))
        policy = PolicyPublished(
            version=Version(0, step).pack(),
            step=step,
            uri=home.as_uri(),
            sha256=file_digest(home / FILE_NAME),
            size=(home / FILE_NAME).stat().st_size,
            canary_tokens=np.asarray(CANARY, "<i4").tobytes(),
            canary_logprobs=logprobs(merged, CANARY).astype("<f4").tobytes(),
        )
        return policy, merged

    async def push(self, policy: PolicyPublished) -> Updated:
        return await update(
            self.client, policy, cache="keep", tolerance=1e-3, load_seconds=60.0, path=self.path
        )


def logprobs(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    chosen = torch.tensor(tokens[1:])[:, None]
    return torch.log_softmax(logits, -1).gather(1, chosen)[:, 0].numpy()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    directory = tmp_path_factory.mktemp("adapters")
    model = tied_model(directory / "model")
    config = Config(
        run=Run(name="e2e"),
        model=Model(path=str(directory / "model"), max_model_len=512),
        server=Server(
            args={"enable-lora": True, "max-lora-rank": 8, "max-loras": 2},
            environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
        ),
    )
    log_path = directory / "vllm.log"
    async with (
        open_session() as session,
        serve(config, directory / "model", index=0, log_path=log_path, session=session) as process,
    ):
        yield World(VllmClient(process.url, session), model, directory, AdapterPath())


async def test_each_version_has_a_name_and_running_requests_keep_theirs(world: World) -> None:
    first, merged = world.publish(1)
    updated = await world.push(first)
    assert (updated.paused, updated.attempts) == (0.0, 1)
    assert updated.canary_error < 1e-4
    found = []

    async def run() -> None:
        found.append(
            await world.client.generate(
                [5, 6, 7], Sampling(max_tokens=300), deadline=60.0, adapter=adapter_name(first.version)
            )
        )

    second, other = world.publish(2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        await world.push(second)
    (completion,) = found
    assert [span.version for span in completion.spans] == [first.version]
    expected = logprobs(merged, [5, 6, 7, *completion.tokens])[2:]
    assert np.max(np.abs(expected - np.asarray(completion.logprobs))) < 1e-3
    new = await world.client.generate(
        [5, 6, 7], Sampling(max_tokens=8), deadline=60.0, adapter=adapter_name(second.version)
    )
    assert np.max(np.abs(logprobs(other, [5, 6, 7, *new.tokens])[2:] - np.asarray(new.logprobs))) < 1e-3


async def test_a_repetition_only_proves_and_old_adapters_are_forgotten(world: World) -> None:
    policies = [world.publish(step)[0] for step in (11, 12, 13)]
    for policy in policies:
        await world.push(policy)
        await world.push(policy)
    names = [adapter_name(policy.version) for policy in policies]
    assert await world.client.adapters() == names[-2:]


async def test_a_damaged_adapter_is_refused_and_the_old_one_serves_on(world: World) -> None:
    good, _ = world.publish(21)
    await world.push(good)
    bad, _ = world.publish(22)
    file = world.directory / "22" / FILE_NAME
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UpdateRefused, match="SHA-256"):
        await world.push(bad)
    assert adapter_name(bad.version) not in await world.client.adapters()
    assert (await world.push(good)).canary_error < 1e-4
