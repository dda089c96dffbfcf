"""LoRA adapters, by peft: which layers get them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

from engine import config
from engine.training.parameters import ADAPTER, kept


def peft_config(lora: config.LoraConfig) -> Any:
    """Return peft's settings for ``lora``, None when it is off (rank 0)."""
    if not lora.rank:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft divides it by the rank
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )


def tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the adapters' tensors under the names of PEFT's files."""
    for name, tensor in kept(model).items():
        yield name.replace(f".{ADAPTER}.", "."), tensor


def settings(model: Any) -> dict[str, Any]:
    """Return PEFT's settings of the adapters as JSON has them, without where the base model lies here."""
    found = model.peft_config[ADAPTER].to_dict()
    found |= {"base_model_name_or_path": None, "inference_mode": True}
    plain: dict[str, Any] = json.loads(json.dumps(found, default=_plain, sort_keys=True))
    return plain


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else getattr(value, "value", str(value))
