"""Each shipped recipe fits on the card that it names, at its longest row."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from engine import recipe
from engine.config import LearnerConfig
from engine.running import capacity
from engine.training import footprint

ROOT = Path(__file__).parents[2]
RECIPES = ("qwen3-4b-games", "qwen3-4b-tools", "qwen3-8b-games", "qwen3-30b-a3b-games")


def settings_of(name: str) -> Any:
    """The configuration of a published Qwen3 model."""
    from transformers import AutoConfig

    shape = msgspec.to_builtins(capacity.SHAPES[name])
    return AutoConfig.for_model(shape.pop("model_type"), norm_topk_prob=True, **shape)


@cache
def measured(name: str) -> float:
    from scenes.device_memory import learner_gib

    config = recipe.load(ROOT / "configs" / f"{name}.toml").config
    model = next(size for size in capacity.SHAPES if size in config.model.path)
    return learner_gib(settings_of(model), config.learner, row=config.model.max_model_len)


def documented(name: str) -> float:
    rows = (ROOT / "docs" / "full-scale.md").read_text()
    row = re.search(rf"\| `{name}` \|[^|]*\|[^|]*\| ([\d.]+) \|", rows)
    assert row is not None
    return float(row[1])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", RECIPES)
def test_a_learners_device_holds_the_longest_row(name: str) -> None:
    assert measured(name) == pytest.approx(documented(name), rel=0.01), "the table of the page"


@pytest.mark.parametrize("name", RECIPES)
def test_the_closed_form_agrees_with_the_tracker_and_fits_the_named_card(name: str) -> None:
    config = recipe.load(ROOT / "configs" / f"{name}.toml").config
    shape = capacity.shape_of(config)
    assert shape is not None
    found = capacity.learner_of(config, shape).gib
    assert found == pytest.approx(documented(name), rel=0.02)
    assert found < capacity.CARDS[config.run.card].gib - capacity.RESERVE


# GiB of three layers by the tracker: row, devices, checkpointed, other sizes.
TRACKED = [
    ("Qwen3-4B", 8192, 4, True, {}, 9.73),
    ("Qwen3-4B", 8192, 4, False, {}, 14.11),
    ("Qwen3-4B", 32768, 1, True, {}, 23.41),
    ("Qwen3-4B", 32768, 4, True, {"intermediate_size": 4864, "vocab_size": 4096}, 9.75),
    ("Qwen3-4B", 32768, 4, True, {"num_attention_heads": 16}, 13.99),
    ("Qwen3-8B", 32768, 4, True, {}, 22.39),
    ("Qwen3-30B-A3B", 8192, 6, True, {}, 13.99),
]


@pytest.mark.parametrize(("name", "row", "devices", "checkpointed", "sizes", "gib"), TRACKED)
def test_the_closed_form_agrees_for_other_sizes(
    name: str, row: int, devices: int, checkpointed: bool, sizes: dict[str, int], gib: float
) -> None:
    shape = replace(capacity.SHAPES[name], num_hidden_layers=3, **sizes)
    learner = LearnerConfig(precision="bf16", attention="sdpa", gradient_checkpointing=checkpointed)
    assert footprint.learner(shape, learner, row=row, devices=devices).gib == pytest.approx(gib, rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_a_reference_that_is_sharded_adds_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """By layers: TRL's own way gathers all of it at once."""
    from scenes import device_memory as memory
    from torch.distributed.fsdp import fully_shard

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
