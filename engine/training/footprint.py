"""The memory of a learner's device in closed form, from the sizes of the model alone. No torch.

``tests/scenes/device_memory.py`` follows the allocations of a step; the tests compare the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from engine.config import LearnerConfig

GIB = 1 << 30
MOMENTS = {"adamw": 8.0, "adamw_8bit": 2.0, "paged_adamw_8bit": 2.0}  # bytes of a trained parameter
_TILE = 4096 * 32768 * 4  # of the fused head: positions, words, float32
Size = Annotated[int, msgspec.Meta(gt=0)]
KINDS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a decoder under transformers' names; a mixture of experts has ``num_experts``."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    vocab_size: Size
    model_type: str = "qwen3"
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    tie_word_embeddings: bool = False
    moe_intermediate_size: int = 0
    num_experts: int = 0
    num_experts_per_tok: int = 0

    @property
    def query(self) -> int:
        """Width of the queries of all heads."""
        return self.num_attention_heads * (self.head_dim or self.hidden_size // self.num_attention_heads)

    @property
    def keys(self) -> int:
        """Width of the keys of all heads, and of the values."""
        return self.query * (self.num_key_value_heads or self.num_attention_heads) // self.num_attention_heads

    @property
    def embedding(self) -> int:
        """Parameters outside the layers."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def expert(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        attention = 2 * self.hidden_size * (self.query + self.keys)
        if self.num_experts:
            return attention + self.num_experts * (self.expert + self.hidden_size)
        return attention + 3 * self.hidden_size * self.intermediate_size

    @property
    def parameters(self) -> int:
        """All parameters but those of norms and biases."""
        return self.num_hidden_layers * self.layer + self.embedding

    @property
    def active(self) -> int:
        """Parameters that compute a position: the head, and of the experts those that are chosen."""
        idle = self.num_experts - self.num_experts_per_tok if self.num_experts else 0
        return self.num_hidden_layers * (self.layer - idle * self.expert) + self.vocab_size * self.hidden_size

    @property
    def routed(self) -> int:
        """Bytes of the experts that a token is routed to."""
        return self.num_hidden_layers * self.num_experts_per_tok * (1 if self.num_experts <= 256 else 2)

    def adapted(self, rank: int) -> int:
        """Parameters of adapters of ``rank`` on every linear layer; fused experts have none."""
        attention = 3 * self.hidden_size + 2 * self.query + 2 * self.keys + self.hidden_size
        others = 0 if self.num_experts else 3 * (self.hidden_size + self.intermediate_size)
        return rank * self.num_hidden_layers * (attention + others)


class Footprint(NamedTuple):
    """Bytes of one device at the peak of a step."""

    weights: float
    gradients: float
    optimiser: float
    reference: float
    activations: float

    @property
    def gib(self) -> float:
        """All of it in GiB."""
        return sum(self) / GIB


def read(config_file: Path) -> Shape | None:
    """Return the shape in a model's ``config.json``, None for an architecture with other formulas.

    Raises OSError, msgspec.MsgspecError.
    """
    settings = msgspec.json.decode(config_file.read_bytes(), type=dict[str, Any])
    if settings.get("model_type") not in KINDS or settings.get("quantization_config"):
        return None
    return msgspec.convert(settings, Shape, strict=False)


def learner(shape: Shape, settings: LearnerConfig, *, row: int, devices: int) -> Footprint:
    """Return what one of the learner's ``devices`` holds at its peak, for micro-batches of ``row`` tokens.

    The weights are sharded over them (FSDP2). The multiples in the activations are bytes of a value, fitted
    to the tracker of allocations: the peak lies in the backward pass of a layer, or of the head.
    """
    size, rank = shape.parameters, settings.lora.rank
    trained = shape.adapted(rank) if rank else size
    reference = size if settings.kl and not rank else 0
    wide = 1 if settings.precision == "bf16" else 2
    d, words = shape.hidden_size, shape.vocab_size * shape.hidden_size
    chosen = shape.num_experts_per_tok
    inner = chosen * shape.moe_intermediate_size if chosen else shape.intermediate_size
    layer = wide * row * (51 * d + 14 * (shape.query + shape.keys) + 12 * inner + 10.5 * chosen * d)
    if settings.attention == "eager":
        layer += wide * 10 * shape.num_attention_heads * row**2
    head = 8 * words + 7.25 * _TILE + wide * row * 20 * d
    kept = row * (wide * 2 * d + 12 * shape.num_experts) if settings.gradient_checkpointing else 0.62 * layer
    layer -= 0 if settings.gradient_checkpointing else kept
    if devices == 1:  # autocast leaves what runs between layers in float32
        kept += row * 2 * d * (2 - wide)
        layer += row * 12 * d + 4 * words
        head -= 2 * words
    else:
        layer += 8 * shape.layer + (4 * words if shape.tie_word_embeddings else 0)
    gathered = 2 * words if reference and devices > 1 else 0
    return Footprint(
        weights=4 * size / devices,
        gradients=4 * trained / devices,
        optimiser=MOMENTS[settings.optimizer.kind] * trained / devices,
        reference=reference * (4 if devices == 1 else 2) / devices,
        activations=shape.num_hidden_layers * kept + max(layer, head) + gathered,
    )
