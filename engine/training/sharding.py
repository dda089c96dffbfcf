"""Weights sharded over ranks by FSDP2: the precision of the training, and the reference model.

accelerate's own choices for bf16 would round log-probs and reduce gradients in bf16, and TRL shards the
reference as one unit, whose forward pass gathers the whole model on each rank.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.fsdp import MixedPrecisionPolicy


def set_precision(accelerator: Any) -> None:
    """Compute in bf16, reduce gradients in float32, and leave what a module returns as it is.

    Call it before accelerate prepares a model. It changes nothing where nothing is sharded.
    """
    if accelerator.is_fsdp2 and accelerator.mixed_precision == "bf16":
        accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=None
        )


def shard_reference(model: torch.nn.Module, accelerator: Any) -> torch.nn.Module:
    """Shard a frozen model layer by layer, like the policy, in the precision in which it computes.

    Takes the place of TRL's ``prepare_fsdp``.
    """
    model.requires_grad_(False)
    if accelerator.mixed_precision == "bf16":
        for parameter in model.parameters():  # buffers stay: rotary frequencies need float32
            parameter.data = parameter.data.to(torch.bfloat16)
    sharded: torch.nn.Module = fsdp2_prepare_model(accelerator, model).eval()
    return sharded
