"""Each shipped recipe fits on the card that it names, at its longest row."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine import recipe

ROOT = Path(__file__).parents[2]
# The device's context, NCCL's buffers and fragmentation: 4 GiB of a card's 79 (80 GB) or 140 (141 GB).
USABLE = {"80": 75.0, "141": 136.0}
_SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "tied": True},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36},
    "Qwen3-30B": {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    },
}  # fmt: skip
RECIPES = ("qwen3-4b-games", "qwen3-4b-tools", "qwen3-8b-games", "qwen3-30b-a3b-games")


def settings_of(name: str) -> Any:
    """The configuration of a published Qwen3 model."""
    from transformers import AutoConfig

    shape = dict(_SHAPES[name])
    common = {"vocab_size": 151936, "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8}
    kind = "qwen3_moe" if "num_experts" in shape else "qwen3"
    tied = shape.pop("tied", False)
    return AutoConfig.for_model(kind, **{**common, **shape}, tie_word_embeddings=tied)


@cache
def measured(name: str) -> float:
    from engine.training.memory import learner_gib

    config = recipe.load(ROOT / "configs" / f"{name}.toml").config
    model = next(size for size in _SHAPES if size in config.model.path)
    return learner_gib(settings_of(model), config.learner, row=config.model.max_model_len)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECIPES)
def test_a_learners_device_holds_the_longest_row(name: str) -> None:
    text = (ROOT / "configs" / f"{name}.toml").read_text()
    card = re.search(r"eight GPUs of (80|141) GB", text)
    assert card is not None, "the recipe names its card"
    rows = (ROOT / "docs" / "full-scale.md").read_text()
    row = re.search(rf"\| `{name}` \|[^|]*\|[^|]*\| ([\d.]+) \|", rows)
    assert row is not None
    found = measured(name)
    assert found < USABLE[card[1]]
    assert found == pytest.approx(float(row[1]), rel=0.03), "the table of the page"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_a_reference_that_is_sharded_adds_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """By layers: TRL's own way gathers all of it at once."""
    from msgspec.structs import replace
    from torch.distributed.fsdp import fully_shard

    from engine.config import LearnerConfig
    from engine.training import memory

    shape = settings_of("Qwen3-4B")
    shape.vocab_size = 4096
    learner = LearnerConfig(precision="bf16", attention="sdpa", gradient_checkpointing=True, kl=0.005)
    sharded, none = (memory.peak(shape, one, 256, 4, 6) for one in (learner, replace(learner, kl=0.0)))

    def at_once(model: Any, accelerator: Any) -> Any:
        return fully_shard(model, mesh=accelerator.torch_device_mesh)

    monkeypatch.setattr(memory.sharding, "shard_reference", at_once)
    whole = memory.peak(shape, learner, 256, 4, 6)
    weights = 6 * 100.9e6  # parameters of six layers
    assert sharded - none < 2 * weights, "its part of two bytes a parameter and a gathered layer"
    assert whole - none > 4 * weights, "four bytes a parameter gathered"
