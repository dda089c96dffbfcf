"""A random Llama of 120,000 parameters, and what transformers computes with it. Without torch it skips."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bus.messages import PolicyPublished
from engine.lineage import Version

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCABULARY = 300


def tiny(directory: Path, *, tied: bool = False) -> transformers.LlamaForCausalLM:
    """Write and return a random Llama: d 64, 2 layers, 2 heads of 32; the same one each time."""
    torch.manual_seed(11)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    return model


def announcement(
    model: transformers.PreTrainedModel, version: Version, release: Any, canary: Sequence[int], **fields: Any
) -> PolicyPublished:
    """Return the fact that ``release`` holds ``version``, whose weights ``model`` has."""
    return PolicyPublished(
        version=version.pack(), step=version.step, uri=release.uri, sha256=release.sha256, size=release.size,
        canary_tokens=np.asarray(canary, "<i4").tobytes(),
        canary_logprobs=logprobs(model, list(canary)).astype("<f4").tobytes(), **fields,
    )  # fmt: skip


def logprobs(model: transformers.PreTrainedModel, tokens: list[int], temperature: float = 1.0) -> np.ndarray:
    """Log-probs of ``tokens[1:]`` at ``temperature``, (T - 1,)."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0, :-1].float() / temperature
    chosen = torch.tensor(tokens[1:])[:, None]
    return torch.log_softmax(logits, -1).gather(1, chosen)[:, 0].numpy()
