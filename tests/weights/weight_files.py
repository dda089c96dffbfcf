"""Small weights as files, and what an optimiser does to them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from bus.messages import WeightDelta
from engine.weights import delta
from engine.weights.store import file_digest

Tensors = dict[str, torch.Tensor]


def weights(seed: int = 0, *, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """Return random tensors of three layers, a tied head's embedding and an integer buffer."""
    generator = torch.Generator().manual_seed(seed)

    def one(*shape: int) -> torch.Tensor:
        return (0.05 * torch.randn(shape, generator=generator)).to(dtype)

    layers = {f"model.layers.{index}.mlp.weight": one(120, 100) for index in range(3)}
    return {
        "model.embed_tokens.weight": one(128, 100),
        **layers,
        "model.norm.weight": one(100),
        "steps": _count(),
    }


def _count() -> torch.Tensor:
    return torch.arange(5, dtype=torch.int64)


def nudged(tensors: Tensors, *, every: int = 20, seed: int = 1) -> Tensors:
    """Return a copy in which about one element in ``every`` of each tensor moves to a neighbouring value."""
    generator = np.random.default_rng(seed)
    result = {}
    for name, tensor in tensors.items():
        raw = tensor.clone().contiguous()
        bits = raw.view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[raw.element_size()])
        count = max(1, len(bits) // every)
        places = torch.from_numpy(generator.choice(len(bits), count, replace=False))
        bits[places] += torch.from_numpy(generator.choice([-1, 1], count)).to(bits.dtype)
        result[name] = raw
    return result


def save(path: Path, tensors: Tensors) -> tuple[Path, str]:
    """Write a whole file; return its path and digest."""
    save_file(tensors, path)
    return path, file_digest(path)


def raw(path: Path) -> np.ndarray:
    """Return the bytes of a file."""
    return np.fromfile(path, np.uint8)


def link(directory: Path, base: Path, new: Path, name: str = "delta") -> WeightDelta:
    """Write the delta between two whole files and describe it."""
    path = directory / f"{name}.safetensors"
    digests = file_digest(base), file_digest(new)
    assert delta.write(path, raw(base), raw(new), digests=digests, version=1)
    return described(path, *digests)


def described(path: Path, base: str, whole: str) -> WeightDelta:
    """Describe a delta file as it is now."""
    return WeightDelta(
        base=base, whole=whole, uri=path.as_uri(), sha256=file_digest(path), size=path.stat().st_size
    )


def tied_model(directory: Path) -> torch.nn.Module:
    """Write and return a random Llama of two layers whose head is its embedding."""
    from tiny_llama import tiny

    return tiny(directory, tied=True)
