"""DeepSpeed's ZeRO, stages 1 and 2: every rank has all weights, and a part of the optimiser.

The parameters of a group lie one after the other in a flat float32 copy, of which each rank has one stretch,
with the moments for it. A checkpoint keeps both by parameter and whole, as one process has them, so that it
can be resumed on any number of ranks, with DeepSpeed or without.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from engine.errors import ConfigError
from engine.training.parameters import require_fitting, settings_of

_WHERE = "learner.launch"


def launched() -> bool:
    """Whether the launcher of this process asks for DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"


def prepare() -> None:
    """Look whether DeepSpeed is there, before accelerate starts it. Raises ConfigError."""
    if find_spec("deepspeed") is None:
        raise ConfigError(
            "learner.launch asks for DeepSpeed, which is not installed",
            where=_WHERE,
            remedy="Install it (pip install deepspeed), or launch with torchrun.",
        )
    if not torch.cuda.is_available():
        # It would be compiled at the start, and is for inference.
        import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False


def require_stage(plugin: Any) -> None:
    """Look whether the stage of accelerate's DeepSpeed ``plugin`` works here. Raises ConfigError."""
    stage = int(plugin.zero_stage)
    if stage not in (1, 2):
        raise ConfigError(
            f"learner.launch asks for ZeRO stage {stage}, "
            + ("whose weights no rank has whole" if stage > 2 else "which shards nothing"),
            where=_WHERE,
            remedy="Take --zero_stage 2, or "
            + ("FSDP2 (docs/learner.md)." if stage > 2 else "launch with torchrun."),
        )


def require_agreement(plugin: Any) -> None:
    """Look whether the launch and the recipe contradict each other. Raises ConfigError."""
    mismatches = plugin.hf_ds_config.mismatches
    if mismatches:
        raise ConfigError(
            "learner.launch and the recipe contradict each other (ds: the launch, hf: the recipe): "
            + "; ".join(one.removeprefix("- ") for one in mismatches),
            where=_WHERE,
            remedy="Give both the same value (--mixed_precision is learner.precision), or 'auto' in "
            "DeepSpeed's file.",
        )
    if int(plugin.zero_stage) == 1 and plugin.get_value("data_types.grad_accum_dtype"):
        raise ConfigError(
            "DeepSpeed's file sets data_types.grad_accum_dtype, which takes another optimiser in stage 1",
            where=_WHERE,
            remedy="Leave it out, or take stage 2.",
        )


@torch.no_grad()
def masters(model: torch.nn.Module, optimizer: Any, *, keep: bool) -> dict[str, torch.Tensor]:
    """Return the float32 weights behind those of ``model`` that are computed with in less, whole, on the CPU
    (collective; empty tensors on a rank that does not ``keep`` them).
    """
    names = _names(model)
    return {
        names[parameter]: _gathered(parameter, flat, keep=keep)
        for parameters, flat in _groups(optimizer)
        for parameter in parameters
        if parameter.dtype != flat.dtype
    }


@torch.no_grad()
def optimizer_state(model: torch.nn.Module, optimizer: Any, *, keep: bool) -> dict[str, Any] | None:
    """Return the state of ``optimizer`` as :func:`parameters.optimizer_state` does (collective); None for one
    whose moments are not stored one number a weight (8 bits), which cannot be cut by parameter.
    """
    names, base = _names(model), _base(optimizer)
    groups, state = [], {}
    for (parameters, flat), group in zip(_groups(optimizer), base.param_groups, strict=True):
        groups.append({**settings_of(group), "params": [names[parameter] for parameter in parameters]})
        values = base.state.get(flat, {})
        if any(_is_moment(key, value) and value.shape != flat.shape for key, value in values.items()):
            return None
        for parameter in parameters if values else []:
            state[names[parameter]] = {
                # each its own count of steps: what is shared in a file is shared by those who load it
                key: _gathered(parameter, value, keep=keep) if _is_moment(key, value) else deepcopy(value)
                for key, value in values.items()
            }
    return {"kind": type(base).__name__, "groups": groups, "state": state}


@torch.no_grad()
def restore(
    model: torch.nn.Module,
    optimizer: Any,
    weights: Mapping[str, torch.Tensor],
    saved: Mapping[str, Any] | None,
) -> None:
    """Put back what a checkpoint has: ``weights`` by name into the float32 copy, and the state of the
    optimiser, which stays as it is without one. Raises SpadeError for that of another.
    """
    names, base = _names(model), _base(optimizer)
    groups = _groups(optimizer)
    for parameters, flat in groups:
        for parameter in parameters:
            _cut(weights[names[parameter]], parameter, into=flat)
    if saved is None:
        return
    order = [names[parameter] for parameters, _ in groups for parameter in parameters]
    require_fitting(saved, type(base).__name__, order)
    state = {}
    for index, (parameters, flat) in enumerate(groups):
        known = saved["state"].get(names[parameters[0]], {})
        values = {key: torch.zeros_like(flat) if _is_moment(key, one) else one for key, one in known.items()}
        for parameter in parameters if values else []:
            for key, value in saved["state"][names[parameter]].items():
                if _is_moment(key, value):
                    _cut(value, parameter, into=values[key])
        if values:
            state[index] = values
    settings = [{**settings_of(group), "params": [index]} for index, group in enumerate(base.param_groups)]
    base.load_state_dict({"state": state, "param_groups": settings})


def _base(optimizer: Any) -> Any:
    """Return torch's optimiser within DeepSpeed's within accelerate's; its parameters are the stretches."""
    return optimizer.optimizer.optimizer


def _groups(optimizer: Any) -> list[tuple[list[torch.nn.Parameter], torch.Tensor]]:
    """Return the parameters of each group, and this rank's stretch of them."""
    zero = optimizer.optimizer
    return list(zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True))


def _names(model: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    return {parameter: name for name, parameter in model.named_parameters()}


def _is_moment(key: str, value: Any) -> bool:
    return key != "step" and isinstance(value, torch.Tensor)


def _gathered(parameter: Any, stretch: torch.Tensor, *, keep: bool) -> torch.Tensor:
    """Return what the stretches of all ranks have for ``parameter`` (collective)."""
    found = torch.zeros(parameter.numel(), dtype=stretch.dtype, device=parameter.device)
    if parameter._hp_mapping is not None:
        here, there = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
        found.narrow(0, here.start, here.numel).copy_(stretch.narrow(0, there.start, there.numel))
    dist.all_reduce(found)  # every number lies on one rank
    return found.view_as(parameter).cpu() if keep else found.new_empty(0)


def _cut(value: torch.Tensor, parameter: Any, *, into: torch.Tensor) -> None:
    """Copy this rank's part of ``value``, which is for ``parameter``, into its stretch."""
    if parameter._hp_mapping is not None:
        here, there = parameter._hp_mapping.lp_fragment_address, parameter._hp_mapping.hp_fragment_address
        part = value.reshape(-1).narrow(0, here.start, here.numel)
        into.narrow(0, there.start, there.numel).copy_(part)
