"""The small policy that the rollout benchmark serves: nano's shape and tokenizer, random weights."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from bus.messages import PolicyPublished
from engine import seeds
from engine.bench import weights_model
from engine.lineage import Version
from engine.seeds.corpus import examples
from engine.weights.publisher import Publisher

SHAPE = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6}
_TEXTS, _VOCABULARY = 300, 1024


def build(directory: Path, *, context: int) -> Path:
    """Write a Llama of nano's shape with random weights and a tokenizer of the seed programs; return where.

    What it says makes no sense, but costs the same as sense. ``context`` is its longest in tokens.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine.training.tokenizer import train

    stream = examples(seeds.families(), seed=1, design_share=0.3, hinted_share=0.4)
    texts = [text for one in itertools.islice(stream, _TEXTS) for text in one.contents]
    tokenizer = train(texts, vocabulary=_VOCABULARY, context=context)
    torch.manual_seed(3)
    shape = LlamaConfig(
        **SHAPE,
        head_dim=SHAPE["hidden_size"] // SHAPE["num_attention_heads"],
        vocab_size=len(tokenizer),
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.05,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(shape).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def publish(model: Path, directory: Path) -> PolicyPublished:
    """Write the weights of ``model`` where a server fetches them and return their announcement as version 0:
    a token whose weights were never pushed carries no version, and the pool does not take it.
    """
    import torch

    trained = weights_model.Trained(model)
    version = Version(0, 0)
    release = Publisher(directory, deltas=False).release(version, trained.tensors(), dtype=torch.float32)
    return PolicyPublished(
        version=version.pack(),
        step=0,
        uri=release.uri,
        sha256=release.sha256,
        size=release.size,
        canary_tokens=np.asarray(weights_model.CANARY, "<i4").tobytes(),
        canary_logprobs=trained.canary(),
    )
