"""The real vLLM takes versions of mixtures, published under the names of their checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from learner_fakes import sample
from scenes import vllm_experts
from scenes.tiny_models import move_weights, write_model

from engine.config import (
    Config,
    LearnerConfig,
    ModelConfig,
    RoleTraining,
    RunConfig,
    SamplingConfig,
    ServerConfig,
)
from engine.inference.launch import environment
from engine.inference.process import serve
from engine.inference.segments import SegmentBuilder
from engine.inference.vllm import VllmClient, open_session
from engine.lineage import Version
from engine.training.samples import CreditedSample
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
    from engine.training.router_replay import routers

    folder = write_model(tmp_path / "model", architecture, vocabulary=128)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = Config(
        run=RunConfig(name="e2e"),
        model=ModelConfig(path=str(folder), max_model_len=256),
        server=ServerConfig(
            args={"no-async-scheduling": True},
            environment={"PYTHONPATH": str(vllm_experts.install(tmp_path / "plugin"))},
        ),
        learner=LearnerConfig(router_replay=True),
    )
    async with (
        open_session() as session,
        serve(config, folder, index=0, log_path=tmp_path / "vllm.log", session=session) as process,
    ):
        client = VllmClient(process.url, session)
        for step in (1, 2):
            move_weights(model, step)
            for _, router in routers(model):  # near a tie, where roundings would decide
                router.weight.data *= 0.02
            release = store.publish(tmp_path / "weights", Version(0, step), dict(published(model)))
            policy = announcement(model, Version(0, step), release, range(3, 67))
            updated = await update(
                client, policy, cache="recompute", tolerance=1e-3, load_seconds=60.0, loader=FileLoader()
            )
            assert (updated.attempts, updated.canary_error < 2e-4) == (1, True)
            completion = await client.generate([5, 6, 7], SamplingConfig(max_tokens=4), deadline=60.0)
            assert [span.version for span in completion.spans] == [policy.version]
        plays = [await _play(client, turns) for turns in (1, 2, 2)]
    _replay(model, plays)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_other_architectures_take_two_updates(tmp_path: Path) -> None:
    """In vLLM's engines alone: the way over HTTP is the same for all, and vLLM is imported once for four.

    A server's canary would also refuse DeepSeek-V3 on CPUs (``OTHER_NUMBERS`` in engine_work.py).
    """
    config = Config(run=RunConfig(name="e2e"), model=ModelConfig(path="x"))
    here, names = Path(__file__).parent, ["qwen3", "gemma3_text", "glm4_moe", "deepseek_v3"]
    paths = os.pathsep.join([str(here.parent), str(here.parent.parent)])
    done = subprocess.run(
        [sys.executable, str(here / "engine_work.py"), str(tmp_path), *names],
        env={**environment(config), "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=880, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found) == names
    for name, versions in found.items():
        assert len(versions) == 2
        for one in versions:
            assert one["error"] < 2e-4 < 0.01 < one["moved"], (name, versions)


async def _play(client: VllmClient, turns: int) -> CreditedSample:
    """A play after a prompt that all share, with the experts of each token, as the agent has it."""
    builder = SegmentBuilder()
    builder.prompt(range(70))
    for turn in range(turns):
        builder.prompt([5, turn])
        builder.completion(
            await client.generate(
                builder.context, SamplingConfig(max_tokens=6), deadline=60.0, experts_from=builder.routed
            )
        )
    return sample(f"play-{turns}", segments=builder.segments())


@torch.no_grad()
def _replay(model: torch.nn.Module, plays: list[CreditedSample]) -> None:
    """The server's experts are the model's own; with other routers they give its log-probs all the same."""
    from engine.training.batch import collate, policy_rows
    from engine.training.router_replay import RouterReplay, routers, routes_of

    rows = policy_rows(plays, {"agent": RoleTraining()}, 3, routes=routes_of(model))
    micro, replay = collate(rows, padding=0), RouterReplay()
    replay.add(model)

    def error(micro: dict[str, torch.Tensor]) -> float:
        with replay.replaying(micro, torch.device("cpu")), replay.counting():
            logits = model(input_ids=micro["input_ids"], attention_mask=micro["attention_mask"]).logits
        logps = torch.log_softmax(logits[:, :-1], -1).gather(-1, micro["input_ids"][:, 1:, None])[..., 0]
        return float((logps - micro["behaviour"])[micro["mask"]].abs().max())

    assert error(micro) < 1e-3
    assert replay.counts.tolist() == [0.0, 2 * sum(len(row.tokens) - 1 for row in rows)]
    torch.manual_seed(1)
    for _, router in routers(model):
        router.weight += 0.2 * router.weight.std() * torch.randn(router.weight.shape)
    replayed, own = error(micro), error(micro | {"experts": torch.full_like(micro["experts"], -1)})
    assert replay.counts[0] > 0
    assert replayed < own / 3
