"""Tiny random models of many architectures, as folders that transformers wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_COMMON = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {"head_dim": 32, "num_experts": 4, "moe_intermediate_size": 32, **_EXPERTS},
    "mixtral": {"num_local_experts": 4, "router_jitter_noise": 0.1, **_EXPERTS},
    "olmoe": {"num_experts": 4, **_EXPERTS},
    "granitemoe": {"num_local_experts": 4, **_EXPERTS},
    "glm4_moe": {
        "head_dim": 32, "n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
        **_EXPERTS,
    },
    "deepseek_v3": {
        "n_routed_experts": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2,
        "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 32, **_EXPERTS,
    },
    "gpt2": {},
}  # fmt: skip
ARCHITECTURES = tuple(name for name in _SETTINGS if name != "gpt2")
MIXTURES = ARCHITECTURES[3:]


def write_model(directory: Path, architecture: str, *, vocabulary: int = 64, **settings: Any) -> Path:
    """Write a random model, with the word tokenizer of the learner's tests; return ``directory``."""
    import torch
    from learner_fakes import make_policy
    from transformers import AutoConfig, AutoModelForCausalLM

    make_policy(directory)  # its tokenizer stays
    (directory / "model.safetensors").unlink()
    common = _COMMON if architecture != "gpt2" else {"n_embd": 64, "n_layer": 2, "n_head": 2}
    shape = {**common, "vocab_size": vocabulary, **_SETTINGS[architecture], **settings}
    tokens = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **shape, **tokens))
    model.save_pretrained(directory)
    return directory


def move_weights(model: Any, step: int) -> None:
    """Change a twentieth of each parameter, and at least one of its values, by 0.3: drawn by ``step``."""
    import torch

    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            chosen = torch.rand(parameter.shape, generator=generator) < 0.05
            chosen.view(-1)[0] = True
            parameter[chosen] += 0.3 if step % 2 else -0.3
