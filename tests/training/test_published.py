"""Published tensors have the names, shapes and bits of the file that transformers would write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_fakes import VOCABULARY, random_samples, sample, segment
from safetensors.torch import load_file
from scenes.tiny_models import ARCHITECTURES, MIXTURES, write_model

from engine.config import LearnerConfig, LoraConfig, OptimizerConfig, RoleTraining
from engine.errors import ConfigError
from engine.running.model_check import check, check_here, require_same_names
from engine.training.batch import Batch, build, policy_rows
from engine.training.parameters import published, without_memory
from engine.weights import store
from engine.weights.store import TensorInfo

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, weight_decay=0.0)


def batch(samples: list[Any]) -> Batch:
    rows = policy_rows(samples, {"agent": RoleTraining()}, len(samples))
    return build(rows, micro_batch_tokens=200, padding=VOCABULARY - 2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_two_updates_equal_the_file_of_save_pretrained(
    architecture: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", architecture)
    check_here(model, LearnerConfig())
    before: dict[str, torch.Tensor] = {}
    with start(LearnerConfig(optimizer=OPTIMIZER), model=model) as running:
        for step in (1, 2):
            running.step(batch(random_samples(4, seed=step)))
            weights = running.call(running.trainer.weights)
            running.call(lambda step=step: running.trainer.model.save_pretrained(tmp_path / str(step)))
            file = load_file(tmp_path / str(step) / "model.safetensors")
            assert weights.keys() == file.keys()
            assert all(torch.equal(weights[name], tensor) for name, tensor in file.items())
            assert before.keys() <= file.keys()
            assert not any(
                torch.equal(file[name], tensor) for name, tensor in before.items() if "_proj" in name
            )
            before = {name: tensor.clone() for name, tensor in file.items() if "self_attn" in name}
    store.compare(
        store.checkpoint(model),
        {name: TensorInfo("F32", tuple(tensor.shape)) for name, tensor in weights.items()},
        tied=store.tied(model),
        where="push",
    )


@pytest.mark.parametrize("architecture", MIXTURES)
def test_names_in_memory_are_not_those_of_the_files(architecture: str, tmp_path: Path) -> None:
    """The fault that the names are undone for: a mixture's module has other names or shapes."""
    from transformers import AutoModelForCausalLM

    model = write_model(tmp_path, architecture)
    shapes = {name: tuple(one.shape) for name, one in published(without_memory(model))}
    assert shapes == {name: info.shape for name, info in store.checkpoint(model).items()}
    memory = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if architecture != "granitemoe":  # its files are fused as well
        with pytest.raises(ConfigError, match="would publish other tensors"):
            require_same_names(model, {name: tuple(one.shape) for name, one in memory.named_parameters()})
    assert [name for name, _ in published(memory, keep=False)] == []


@pytest.mark.parametrize("fault", ["a tensor more", "a tensor less", "another shape"])
def test_files_of_another_model_are_refused_at_the_start(fault: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = write_model(tmp_path, "qwen3_moe")
    file = load_file(model / "model.safetensors")
    if fault == "a tensor more":
        file["model.layers.0.mlp.experts.9.up_proj.weight"] = torch.zeros(2)
    else:
        removed = file.pop("model.norm.weight")
        if fault == "another shape":
            file["model.norm.weight"] = removed[:3].clone()
    save_file(file, model / "model.safetensors", metadata={"format": "pt"})
    words = {"a tensor more": "missing", "a tensor less": "unknown", "another shape": "other shape"}
    with pytest.raises(ConfigError, match=rf"{words[fault]} \['model"):
        check_here(model, LearnerConfig())


def test_files_beside_the_model_and_layers_of_prediction_heads_do_not_count(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = write_model(tmp_path, "mixtral")
    save_file({"layers.0.attention.wq.weight": torch.zeros(2)}, model / "consolidated.safetensors")
    file = load_file(model / "model.safetensors")
    file["model.layers.2.eh_proj.weight"] = torch.zeros(2)  # one layer beyond the last
    save_file(file, model / "model.safetensors", metadata={"format": "pt"})
    check_here(model, LearnerConfig())


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"])
def test_adapters_on_experts_are_refused_and_on_attention_merged(
    architecture: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = write_model(tmp_path / "model", architecture)
    with pytest.raises(ConfigError, match="no linear layers") as caught:
        check_here(model, LearnerConfig(lora=LoraConfig(rank=4)))
    targets = tuple(json.loads(caught.value.remedy.partition("targets = ")[2].rstrip(".")))
    learner = LearnerConfig(optimizer=OPTIMIZER, lora=LoraConfig(rank=4, alpha=8.0, targets=targets))
    check_here(model, learner)
    tokens = tuple(range(3, 40))
    with start(learner, model=model) as running:
        for step in (1, 2):
            running.step(batch(random_samples(4, seed=step)))
        weights = running.call(running.trainer.weights)
        canary = running.call(lambda: running.trainer.canary(tokens))
    assert weights.keys() == store.checkpoint(model).keys()
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain.save_pretrained(tmp_path / "merged")
    from safetensors.torch import save_file

    file = tmp_path / "merged" / "model.safetensors"
    save_file({name: one.contiguous() for name, one in weights.items()}, file, metadata={"format": "pt"})
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = merged(input_ids=torch.tensor([tokens])).logits[0, :-1]
    found = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]
    np.testing.assert_allclose(found.numpy(), canary, atol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {"attention_dropout": 0.1}),
        ("qwen3_moe", {"attention_dropout": 0.2}),
        ("mixtral", {"router_jitter_noise": 0.3}),
        ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    ],
)
def test_fresh_samples_have_ratio_one_whatever_dropout_the_model_names(
    architecture: str, settings: dict[str, float], start: Callable[..., Any], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", architecture, **settings)
    known = json.loads((model / "config.json").read_text())
    assert all(known[name] == value for name, value in settings.items())
    with start(LearnerConfig(optimizer=OPTIMIZER), model=model) as running:
        fresh = running.call(lambda: fresh_samples(running.trainer.model))
        found = running.step(batch(fresh))
    assert found["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert found["ratio_deviation"] < 1e-5
    assert found["behaviour_kl"] < 1e-8


def fresh_samples(model: Any) -> list[Any]:
    """Samples whose log-probs are those of a server with exactly these weights."""
    draw, found = np.random.default_rng(9), []
    model.eval()
    for index in range(4):
        ids = draw.integers(0, 60, size=40).tolist()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        logps = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[1:, None])[:, 0].tolist()
        mask = [0] * 8 + [1] * 32
        told = [one * keep for one, keep in zip([0.0, *logps], mask, strict=True)]
        found.append(sample(f"a{index}", advantage=1.0, segments=[segment(ids, mask, told)]))
    model.train()
    return found


@pytest.mark.slow
def test_the_check_runs_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a module of the working directory cannot enter."""
    model = write_model(tmp_path / "model", "qwen3_moe")
    (tmp_path / "grp.py").write_text("raise SystemExit('a file of the user')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no linear layers") as caught:
        check(model, LearnerConfig(lora=LoraConfig(rank=2)))
    assert caught.value.remedy
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="The model cannot be used"):
        check(model, LearnerConfig())
