"""Adapters: what is published is what they compute, the reference is the start, a resume brings them back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_fakes import VOCABULARY, random_samples

from engine.config import LearnerConfig, LoraConfig, OptimizerConfig, RoleTraining
from engine.errors import ConfigError, SpadeError
from engine.training.batch import Batch, build, policy_rows

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
TOKENS = tuple(range(3, 40, 3))


def batch(seed: int) -> Batch:
    rows = policy_rows(random_samples(6, seed=seed), {"agent": RoleTraining()}, 6, {"agent": 0.6})
    return build(rows, micro_batch_tokens=100, padding=VOCABULARY - 2)


def learner(**settings: Any) -> LearnerConfig:
    settings = {"lora": LoraConfig(rank=4, alpha=8.0), **settings}
    return LearnerConfig(optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.0), **settings)


def load(policy: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()


def test_the_published_weights_are_the_start_with_the_adapters_added(start: Callable[..., Any], policy: Path):
    model = load(policy)
    names = {name for name, _ in model.named_parameters()}
    original = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with start(learner(kl=0.1)) as running:
        first = running.step(batch(1))
        second = running.step(batch(2))
        published = {name: tensor.clone() for name, tensor in running.call(running.trainer.weights).items()}
        canary = running.call(lambda: running.trainer.canary(TOKENS))
        trained = {n for n, p in running.trainer.model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in trained)
    assert published.keys() == names
    changed = {name for name in names if not torch.equal(published[name], original[name])}
    assert changed == {name for name in names if "proj" in name}
    model.load_state_dict(published, strict=False)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([TOKENS])).logits[0, :-1]
    expected = torch.log_softmax(logits, -1).gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    np.testing.assert_allclose(canary, expected.numpy(), atol=1e-5)
    assert abs(first["kl"]) < 1e-6, "the reference is the model without adapters"
    assert second["kl"] > 1e-4


@pytest.mark.slow
def test_a_resume_brings_the_adapters_back(start: Callable[..., Any], tmp_path: Path):
    with start(learner()) as running:
        running.step(batch(1))
        capsule = running.capture(tmp_path / "kept")
        running.step(batch(2))
        expected = {name: t.clone() for name, t in running.call(running.trainer.weights).items()}
    assert all(".lora_" in name for name in capsule.model), "a checkpoint has the adapters alone"
    with start(learner()) as running:
        running.call(lambda: running.trainer.restore(capsule, 1))
        running.step(batch(2))
        found = running.call(running.trainer.weights)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    with start(learner(lora=LoraConfig())) as running, pytest.raises(SpadeError, match="another model"):
        running.call(lambda: running.trainer.restore(capsule, 1))


def test_only_the_named_modules_get_adapters(start: Callable[..., Any], tmp_path: Path):
    with start(learner(lora=LoraConfig(rank=2, targets=("q_proj",)))) as running:
        running.step(batch(1))
        names = running.capture(tmp_path / "kept").model
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in names} == {"q_proj"}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.parametrize(("target", "said"), [("nothing", "nothing"), ("embed_tokens", "head as well")])
def test_layers_that_cannot_have_adapters_are_faults_of_the_recipe(
    start: Callable[..., Any], target: str, said: str
):
    with (
        pytest.raises(ConfigError, match=said) as refused,
        start(learner(lora=LoraConfig(rank=2, targets=(target,)))),
    ):
        pass
    assert "Name linear layers" in str(refused.value)
