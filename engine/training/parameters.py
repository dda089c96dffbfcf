"""A model's tensors by name, on one device or sharded (FSDP2), with or without LoRA adapters.

In memory transformers may hold other tensors than a checkpoint: the experts of a mixture are fused, for one.
Checkpoints of the learner keep the names in memory; published weights have those of the model's files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from engine.errors import SpadeError
from engine.training.ranks import Ranks
from engine.weights.store import as_published, published_type

Named = tuple[str, torch.Tensor]
_PEFT = "base_model.model."
ADAPTER = "default"


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether a parameter of ``model`` lies on several ranks."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def has_adapters(model: torch.nn.Module) -> bool:
    """Return whether ``model`` was wrapped by peft."""
    return hasattr(model, "peft_config")


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers, each shared one once, detached, as they lie (views)."""
    once = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: tensor.detach() for name, tensor in model.state_dict().items() if name in once}


def kept(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what a checkpoint keeps: all of it, or with adapters only what is trained."""
    found = tensors(model)
    if not has_adapters(model):
        return found
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: tensor for name, tensor in found.items() if name in trained}


def published(model: Any, *, keep: bool = True) -> Iterator[Named]:
    """Yield the tensors that servers load: whole, under the names of the model's files, layer by layer.

    With adapters the weight of each adapted layer is ``W + scale * B A``; the model stays unchanged. Memory:
    one layer beside what the caller keeps. Collective when sharded; a rank that does not ``keep`` the
    tensors yields nothing.
    """
    for layer in _layers(merged(model)):
        whole_layer = {name: whole(tensor, keep=keep) for name, tensor in layer}
        if keep:
            yield from in_files(model, whole_layer).items()


def in_files(model: Any, layer: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the whole tensors of a layer of :func:`merged` as the model's files have them."""
    plain = model.get_base_model() if has_adapters(model) else model
    return dict(revert_weight_conversion(plain, layer))


def copied(
    named: Iterable[Named], ranks: Ranks, dtype: torch.dtype | None = None
) -> list[dict[str, torch.Tensor]]:
    """Return the layers as whole tensors: copies on the CPU of this rank's, the others without data.

    Each layer goes to the rank with the fewest bytes so far. Floating-point tensors become ``dtype`` before
    they are gathered. Memory: one tensor beside the copies. Collective when sharded.
    """
    loads = [0] * ranks.size
    layers = []
    for layer in _layers(named):
        writer = loads.index(min(loads))
        mine, copies = writer == ranks.rank, {}
        for name, tensor in layer:
            copy = torch.empty(tensor.shape, dtype=published_type(name, tensor.dtype, dtype), device="meta")
            loads[writer] += copy.nbytes
            if mine or isinstance(tensor, DTensor):
                found = whole(as_published(name, tensor, dtype), keep=mine)
                copy = found.to("cpu", copy=_same_memory(found, local(tensor))) if mine else copy
            copies[name] = copy
        layers.append(copies)
    return layers


def _layers(named: Iterable[Named]) -> Iterator[Iterator[Named]]:
    return (layer for _, layer in groupby(named, key=lambda one: layer_of(one[0])))


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def without_memory(directory: Path) -> Any:
    """Return the model in ``directory`` with tensors that have shapes only.

    Raises OSError, ValueError for one that transformers does not know.
    """
    with torch.device("meta"):
        settings = AutoConfig.from_pretrained(directory, local_files_only=True)
        return AutoModelForCausalLM.from_config(settings)


def layer_of(name: str) -> str:
    """Return the layer of a tensor: its name up to the first number, "" outside all layers."""
    parts = name.split(".")
    return next((".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()), "")


def merged(model: torch.nn.Module) -> Iterator[Named]:
    """Yield the tensors under the names of the model without adapters, those added to the weights."""
    if not has_adapters(model):
        yield from tensors(model).items()
        return
    found = tensors(model)
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "get_delta_weight")}
    for name, tensor in found.items():
        owner, _, leaf = name.rpartition(".base_layer.")
        if owner in layers:
            weight = tensor
            if leaf == "weight":
                with torch.no_grad():
                    weight = tensor + layers[owner].get_delta_weight(ADAPTER).to(tensor.dtype)
            yield f"{owner}.{leaf}".removeprefix(_PEFT), weight
        elif ".lora_" not in name:
            yield name.removeprefix(_PEFT), tensor


def whole(tensor: torch.Tensor, *, keep: bool = True) -> torch.Tensor:
    """Return the whole tensor: itself, or for a sharded one its gathered copy on the CPU.

    Collective when sharded; a rank that does not ``keep`` it gets an empty tensor.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    gathered = tensor.full_tensor()
    return gathered.cpu() if keep else gathered.new_empty(0)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: all of it unless it is sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def put(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> None:
    """Copy ``given`` into ``own``, each rank its part of a sharded tensor.

    Raises SpadeError for tensors of another model.
    """
    if own.keys() != given.keys() or any(own[name].shape != given[name].shape for name in own):
        raise SpadeError(
            "The checkpoint belongs to another model",
            remedy="Give the run another name, or go back to the model it was started with.",
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(placed_like(given[name], tensor))


def placed_like(value: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """Return ``value`` on the device of ``example``, sharded like it (each rank takes its part)."""
    if not isinstance(example, DTensor):
        return value
    local = value.to(example.device)
    return distribute_tensor(local, example.device_mesh, example.placements, src_data_rank=None)


def optimizer_state(model: torch.nn.Module, optimizer: Any) -> tuple[list[Named], dict[str, Any]]:
    """Return the state of ``optimizer`` by the names of the parameters: tensors as they lie, and the rest.

    Names of the tensors are ``PARAMETER/KEY``.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [
        {**settings_of(group), "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    moments: list[Named] = []
    state: dict[str, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        name = names[parameter]
        found = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        moments += [(f"{name}/{key}", value) for key, value in found.items()]
        state[name] = {key: value for key, value in values.items() if key not in found}
    return moments, {"kind": _kind(optimizer), "groups": groups, "state": state}


def restore_optimizer(model: torch.nn.Module, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Put back what :func:`optimizer_state` returned, with all tensors in ``saved["state"]``.

    Learning rate, betas and weight decay stay those of the recipe. Raises SpadeError for the state of another
    optimiser.
    """
    parameters = dict(model.named_parameters())
    names = {parameter: name for name, parameter in parameters.items()}
    order = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    require_same_optimizer(saved, _kind(optimizer), order)
    index = {name: number for number, name in enumerate(order)}
    state = {
        index[name]: {key: _placed(value, parameters[name]) for key, value in values.items()}
        for name, values in saved["state"].items()
    }
    groups = [
        {**settings_of(group), "params": [index[names[parameter]] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def require_same_optimizer(saved: Mapping[str, Any], kind: str, order: Sequence[str]) -> None:
    """Raise SpadeError unless ``saved`` belongs to a ``kind`` optimiser of the parameters in ``order``."""
    known = [name for group in saved["groups"] for name in group["params"]]
    if saved["kind"] != kind or known != list(order):
        raise SpadeError(
            f"The checkpoint holds the state of {saved['kind']}, this run has {kind}",
            remedy="Go back to the learner.optimizer and learner.lora that the run was started with.",
        )


def _placed(value: Any, parameter: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return placed_like(value, parameter)
    return value


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group of an optimiser without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def _kind(optimizer: Any) -> str:
    return type(getattr(optimizer, "optimizer", optimizer)).__name__
