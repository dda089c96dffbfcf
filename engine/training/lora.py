"""LoRA adapters, by peft: which layers get them, and which cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine import config
from engine.errors import ConfigError
from engine.training.parameters import ADAPTER, kept

_REMEDY = "Name linear layers of the model in learner.lora.targets, or none for all of them but the head."
_ATTENTION = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "q_a_proj",
    "q_b_proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
)


def peft_config(lora: config.LoraConfig) -> Any:
    """Return peft's settings for ``lora``, None when it is off (rank 0)."""
    if not lora.rank:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft divides it by the rank
        target_modules=list(lora.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )


def check(directory: Path, lora: config.LoraConfig) -> None:
    """Check that ``lora`` fits the model in ``directory``, on a model without memory. Raises ConfigError."""
    if not lora.rank:
        return
    from peft import get_peft_model

    with torch.device("meta"):
        settings = AutoConfig.from_pretrained(directory, local_files_only=True)
        model = AutoModelForCausalLM.from_config(settings)
    with explained(lora):
        require_mergeable(get_peft_model(model, peft_config(lora)))


@contextmanager
def explained(lora: config.LoraConfig) -> Iterator[None]:
    """Raise ConfigError where peft or TRL raise ValueError because of ``lora``."""
    try:
        yield
    except ValueError as error:
        if not lora.rank:
            raise
        raise ConfigError(
            f"learner.lora.targets = {list(lora.targets)}: {error}", where="learner.lora", remedy=_REMEDY
        ) from error


def require_mergeable(model: Any) -> None:
    """Refuse adapters whose sum with the weights cannot be published. Raises ConfigError.

    Such are an adapter on an embedding that is the head as well (servers would add it to both), and one on
    anything but a plain layer: fused experts and routers.
    """
    if not hasattr(model, "peft_config"):
        return
    tied = model.config.get_text_config().tie_word_embeddings
    if tied and hasattr(model.get_input_embeddings(), "get_delta_weight"):
        raise ConfigError(
            "The model's embedding is its head as well, and an adapter would be added to one of them only",
            where="learner.lora.targets",
            remedy=_REMEDY,
        )
    plain = (torch.nn.Linear, torch.nn.Embedding)
    adapted = {name: one for name, one in model.named_modules() if hasattr(one, "get_delta_weight")}
    strange = [name for name, one in adapted.items() if not isinstance(one.get_base_layer(), plain)]
    if strange:
        known = {name.rpartition(".")[-1] for name, one in adapted.items() if name not in strange}
        usual = [name for name in _ATTENTION if name in known] or ["q_proj", "v_proj"]
        raise ConfigError(
            f"LoRA would adapt {strange[0].removeprefix('base_model.model.')} and {len(strange) - 1} more "
            "modules that are no linear layers (the experts or the router of a mixture)",
            where="learner.lora.targets",
            remedy=f"Name linear layers only: learner.lora.targets = {json.dumps(usual)}.",
        )


def tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the adapters' tensors under the names of PEFT's files."""
    for name, tensor in kept(model).items():
        yield name.replace(f".{ADAPTER}.", "."), tensor


def settings(model: Any) -> dict[str, Any]:
    """Return PEFT's settings of the adapters as JSON has them, without the local path of the base model."""
    found = model.peft_config[ADAPTER].to_dict()
    found |= {"base_model_name_or_path": None, "inference_mode": True}
    plain: dict[str, Any] = json.loads(json.dumps(found, default=_plain, sort_keys=True))
    return plain


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else getattr(value, "value", str(value))
