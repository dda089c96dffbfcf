"""The memory of a learner's device, reckoned with fake tensors: a training step without its data.

One rank is built as the trainer builds it (accelerate's sharding, TRL's fused head, checkpointed layers,
AdamW) in a process group that sends nothing, and torch's tracker of allocations follows a step. Layers are
alike, so a few of them tell what all of them take. The device's context, buffers of NCCL and fragmentation
are not in it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from engine.config import LearnerConfig
from engine.training import sharding

GIB = 1 << 30
_LAYERS = (3, 4)


def learner_gib(settings: Any, learner: LearnerConfig, *, row: int, devices: int | None = None) -> float:
    """Return the GiB of one of the learner's devices at their peak, for micro-batches of one ``row``.

    ``settings`` is the configuration of the model, a transformers' ``PreTrainedConfig``.
    """
    few, more = (peak(settings, learner, row, devices or len(learner.devices) or 1, n) for n in _LAYERS)
    each = (more - few) / (_LAYERS[1] - _LAYERS[0])
    return float(few + each * (settings.num_hidden_layers - _LAYERS[0])) / GIB


def peak(settings: Any, learner: LearnerConfig, row: int, devices: int, layers: int) -> int:
    """Return the bytes of a micro-batch that adds to gradients, with ``layers`` layers of the model."""
    short = copy.deepcopy(settings)
    short.num_hidden_layers = layers
    if getattr(short, "layer_types", None):
        short.layer_types = short.layer_types[:layers]
    with _alone(devices) as mesh, FakeTensorMode(), MemTracker() as tracker:
        model = _build(short, learner, mesh, frozen=False)
        reference = _build(short, learner, mesh, frozen=True) if learner.kl else None
        optimizer = torch.optim.AdamW(model.parameters())
        tracker.track_external(optimizer)
        _step(model, reference, learner, 16, sharded=devices > 1)
        optimizer.step()
        tracker.reset_mod_stats()
        _step(model, reference, learner, row, sharded=devices > 1)
        snapshot = tracker.get_tracker_snapshot("peak")
    return sum(sum(kinds.values()) - kinds["Total"] for kinds in map(_plain, snapshot.values()))


def _plain(kinds: dict[Any, int]) -> dict[str, int]:
    return {str(getattr(kind, "value", kind)): size for kind, size in kinds.items()}


def _build(settings: Any, learner: LearnerConfig, mesh: DeviceMesh, *, frozen: bool) -> Any:
    model = AutoModelForCausalLM.from_config(
        settings, dtype=torch.float32, attn_implementation=learner.attention
    )
    add_fused_lm_head(model, outputs=("log_probs",) if frozen else ("log_probs", "entropy"))
    if learner.gradient_checkpointing and not frozen:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if mesh.size() == 1:
        return model
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="bf16" if learner.precision == "bf16" else "no",
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        is_fsdp2=True,
        is_main_process=True,
    )
    sharding.set_precision(accelerator)
    if frozen:  # the tracker has to hook each parameter that it meets
        return sharding.shard_reference(model, accelerator).requires_grad_(True)
    return fsdp2_prepare_model(accelerator, model)


def _step(model: Any, reference: Any, learner: LearnerConfig, length: int, *, sharded: bool) -> None:
    ids = torch.zeros(1, length, dtype=torch.long)
    inputs = {"input_ids": ids, "labels": ids, "fused_lm_head": True}
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=learner.precision == "bf16")
    with contextlib.nullcontext() if sharded else autocast:
        if reference is not None:
            with torch.no_grad():
                reference(**inputs)
        found = model.train()(**inputs)
    (found.log_probs.sum() + found.entropy.sum()).backward()


@contextlib.contextmanager
def _alone(devices: int) -> Iterator[DeviceMesh]:
    """Be the first of ``devices`` ranks that never answer."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        yield init_device_mesh("cpu", (devices,), mesh_dim_names=("ranks",))
    finally:
        dist.destroy_process_group()
