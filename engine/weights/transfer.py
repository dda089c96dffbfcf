"""The weight-transfer engine that runs inside vLLM's workers and loads published files.

Nothing of the running model is touched before the file has proved itself (digest, names, shapes), so a
bad push leaves the old weights serving. A load that fails later leaves the model in pieces and says so;
the server must then be restarted (``engine.weights.update``).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from engine.weights import store
from engine.weights.plugin import REFUSED

logger = init_logger("vllm.spade_file")

TORN = "torn"
_TIED_HEAD = "lm_head.weight"


@dataclass
class FileInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The file path needs no rendezvous."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """One published version: where it lies, its digest and its size in bytes.

    ``check_only`` proves the file and loads nothing: every worker must agree before the first one changes.
    """

    uri: str
    sha256: str
    size: int
    check_only: bool = False


class FileWeightTransferEngine(WeightTransferEngine[FileInit, FileUpdate]):  # type: ignore[misc]
    """Loads a safetensors file with checkpoint names into the model, layer by layer."""

    init_info_cls = FileInit
    update_info_cls = FileUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loading = False
        self._checked = ""
        self._expected: dict[str, tuple[int, ...]] | None = None

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Do nothing: there is no channel to open."""

    def start_weight_update(self) -> None:
        """Open a session. The model is left alone until a file has passed its checks."""
        self._loading = False
        self._checked = ""

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Check the file (once), then load it unless told to check only.

        Raises RuntimeError: with ``REFUSED`` the old weights are intact, with ``TORN`` the model is
        unusable. vLLM passes the message on, not the class.
        """
        if self._checked != update_info.sha256:
            try:
                path = store.fetch(update_info.uri, update_info.sha256, update_info.size)
                self._check_names(path)
            except (store.WeightFault, OSError) as error:
                raise RuntimeError(f"{REFUSED} the push: {error}") from error
            self._checked = update_info.sha256
        if not update_info.check_only:
            self._load(store.local_path(update_info.uri))

    def finish_weight_update(self) -> None:
        """Finish layerwise processing and repack layers that share a weight (see ``repack_tied``)."""
        if not self._loading:
            return
        self._finalize()
        self._loading = False

    def shutdown(self) -> None:
        """Do nothing: there is no channel to close."""

    def _load(self, path: Path) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._loading = True
        try:
            initialize_layerwise_reload(self.model)
            with safe_open(path, framework="pt", device="cpu") as file, disable_mtp_completeness_check():
                self.model.load_weights((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
        except BaseException as error:
            self._loading = False
            raise RuntimeError(f"{TORN}: loading {path} failed half-way: {error!r}") from error

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        try:
            finalize_layerwise_reload(self.model, self.model_config)
            repack_tied(self.model)
        except BaseException as error:
            raise RuntimeError(f"{TORN}: finishing the load failed: {error!r}") from error

    def _check_names(self, path: Path) -> None:
        if self._expected is None:
            self._expected = checkpoint_shapes(Path(self.model_config.model))
        if not self._expected:
            logger.warning("no safetensors beside the served model: names of pushed weights go unchecked")
            return
        tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
        compare_shapes(self._expected, file_shapes(path), tied=tied, where=str(path))


def repack_tied(model: torch.nn.Module) -> int:
    """Rebuild what layers derived from a weight they share with an earlier layer.

    On CPU a layer keeps a packed copy of its weight; layerwise reloading rebuilds it only for the layer
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


def file_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors in a safetensors file."""
    with safe_open(path, framework="pt", device="cpu") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape over all safetensors files of a model directory (empty when there are none)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        shapes.update(file_shapes(path))
    return shapes


def compare_shapes(
    expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], *, tied: bool, where: str
) -> None:
    """Raise store.WeightFault unless both hold the same names and shapes (a tied head may be absent)."""
    free = {_TIED_HEAD} if tied else set()
    missing = sorted(expected.keys() - found.keys() - free)
    surplus = sorted(found.keys() - expected.keys() - free)
    changed = sorted(name for name in expected.keys() & found.keys() if expected[name] != found[name])
    if missing or surplus or changed:
        raise store.WeightFault(
            f"weights do not fit the served model: missing {missing[:5]}, unknown {surplus[:5]}, "
            f"other shape {changed[:5]} ({len(missing)}, {len(surplus)}, {len(changed)} in all)",
            where=where,
        )
