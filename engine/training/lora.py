"""LoRA adapters, by peft: which layers get them."""

from __future__ import annotations

from typing import Any

from engine.config import Lora


def peft_config(lora: Lora) -> Any:
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
