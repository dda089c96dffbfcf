"""The weight-transfer engine inside vLLM's workers: loads a published file into the running model.

The server role has checked digest, names and shapes before the pause. A load that fails leaves the model in
an unknown state; the server must then be restarted (``engine.weights.update``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from engine import malloc


@dataclass
class FileInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The file way needs no rendezvous."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """``path`` is a safetensors file with the names of the model's checkpoint, readable by every worker."""

    path: str


class FileWeightTransferEngine(WeightTransferEngine[FileInit, FileUpdate]):  # type: ignore[misc]
    """Loads whole files tensor by tensor. Keeps nothing in memory between updates."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loading = False

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Do nothing: there is no channel to open."""

    def start_weight_update(self) -> None:
        """Open a session. The model is unchanged until a file is loaded."""
        self._loading = False

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Load a file. Raises what vLLM's loader raises; the model is then unusable."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        with safe_open(update_info.path, framework="pt", device="cpu") as file:
            initialize_layerwise_reload(self.model)
            self._loading = True
            with disable_mtp_completeness_check():
                self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118

    def finish_weight_update(self) -> None:
        """Finish layerwise processing, and what vLLM leaves out of it on CPUs (``repack_*``)."""
        if not self._loading:
            return
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied(self.model)
        repack_experts(self.model)
        self._loading = False
        malloc.release()

    def shutdown(self) -> None:
        """Do nothing: there is no channel to close."""


def repack_tied(model: torch.nn.Module) -> int:
    """Rebuild what layers derived from a weight they share with an earlier layer.

    On a CPU a layer keeps a packed copy of its weight. Layerwise reloading rebuilds it only for the layer
    that received the weight, so a tied ``lm_head`` would go on producing the old logits. Returns the
    number of layers rebuilt.
    """
    seen: set[int] = set()
    rebuilt = 0
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        if id(weight) not in seen:
            seen.add(id(weight))
            continue
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(module)
            rebuilt += 1
    return rebuilt


def repack_experts(model: torch.nn.Module) -> int:
    """Pack the experts of mixtures for the CPU's kernel, which vLLM does after the first load only.

    Without it the kernel reads the new weights in the wrong layout. Returns the number of layers repacked.
    """
    from vllm.platforms import current_platform

    packed = 0
    for module in model.modules() if current_platform.is_cpu() else ():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if experts is not None and hasattr(module, "w13_weight"):
            experts.process_weights_after_loading(module)
            packed += 1
    return packed
