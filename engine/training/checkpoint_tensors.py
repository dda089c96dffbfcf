"""The tensors of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Capsule:
    """``model``: the weights by name, shared ones once. ``extra``: the states of the optimiser and of the
    random number generators, tensors and plain values only.
    """

    model: dict[str, torch.Tensor]
    extra: dict[str, Any]
