"""The real vLLM takes versions of mixtures, published under the names of their checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenes.tiny_models import write_model

from engine.config import Config, ModelConfig, RunConfig, SamplingConfig
from engine.inference.process import serve
from engine.inference.vllm import VllmClient, open_session
from engine.lineage import Version
from engine.weights import store
from engine.weights.loaders import FileLoader
from engine.weights.update import update

torch = pytest.importorskip("torch")

from tiny_llama import announcement  # noqa: E402


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "olmoe"])
async def test_a_mixture_of_experts_takes_two_updates(architecture: str, tmp_path: Path) -> None:
    """On CPUs vLLM packs experts after the first load only."""
    from transformers import AutoModelForCausalLM

    from engine.training.parameters import published

    folder = write_model(tmp_path / "model", architecture, vocabulary=128)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = Config(run=RunConfig(name="e2e"), model=ModelConfig(path=str(folder), max_model_len=256))
    async with (
        open_session() as session,
        serve(config, folder, index=0, log_path=tmp_path / "vllm.log", session=session) as process,
    ):
        client = VllmClient(process.url, session)
        for step in (1, 2):
            generator = torch.Generator().manual_seed(step)
            with torch.no_grad():
                for parameter in model.parameters():
                    chosen = torch.rand(parameter.shape, generator=generator) < 0.05
                    chosen.view(-1)[0] = True
                    parameter[chosen] += 0.3 if step % 2 else -0.3
            release = store.publish(tmp_path / "weights", Version(0, step), dict(published(model)))
            policy = announcement(model, Version(0, step), release, range(3, 67))
            updated = await update(
                client, policy, cache="recompute", tolerance=1e-3, load_seconds=60.0, loader=FileLoader()
            )
            assert (updated.attempts, updated.canary_error < 2e-4) == (1, True)
            completion = await client.generate([5, 6, 7], SamplingConfig(max_tokens=4), deadline=60.0)
            assert [span.version for span in completion.spans] == [policy.version]
