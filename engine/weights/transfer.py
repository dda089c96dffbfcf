"""The weight-transfer engine that runs inside vLLM's workers and loads published files.

Nothing of the running model is touched before the weights have proved themselves (digests, names, shapes),
so a bad push leaves the old ones serving. They are read and proved in a thread, while the model goes on
sampling: vLLM's loop stands still only for the load. A load that fails half-way leaves the model in pieces
and says so; the server must then be restarted (``engine.weights.update``).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger

from bus.messages import WeightDelta
from engine import malloc
from engine.weights import store
from engine.weights.plugin import REFUSED
from engine.weights.weight_buffer import Image

logger = init_logger("vllm.spade_file")

TORN = "torn"
_TIED_HEAD = "lm_head.weight"


@dataclass
class FileInit(WeightTransferInitInfo):  # type: ignore[misc]
    """The file path needs no rendezvous."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """How to reach one version: see ``engine.weights.update_plan.Route``.

    ``check_only`` begins to read and prove and returns at once (``state`` tells the outcome): every worker
    must agree before the first one changes. ``hold`` keeps the bytes in memory as the base of a later delta.
    """

    uri: str
    sha256: str
    size: int
    check_only: bool = False
    start: str = ""
    deltas: list[dict[str, Any]] = field(default_factory=list)
    hold: bool = False

    @property
    def chain(self) -> list[WeightDelta]:
        """The deltas as values."""
        return [WeightDelta(**delta) for delta in self.deltas]


class FileWeightTransferEngine(WeightTransferEngine[FileInit, FileUpdate]):  # type: ignore[misc]
    """Loads whole files and deltas with checkpoint names into the model, layer by layer.

    Memory: nothing between updates, or with ``hold`` the size of a whole file in each worker.
    """

    init_info_cls = FileInit
    update_info_cls = FileUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loading = False
        self._image = Image()
        self._file: Any = None
        self._expected: dict[str, tuple[int, ...]] | None = None
        self._wanted: FileUpdate | None = None
        self._status, self._reason = "idle", ""
        self._thread: threading.Thread | None = None
        self._seconds = {"prove": 0.0, "load": 0.0}

    def init_transfer_engine(self, init_info: FileInit) -> None:
        """Do nothing: there is no channel to open."""

    def start_weight_update(self) -> None:
        """Open a session. The model is left alone until weights have passed their checks."""
        self._loading = False

    def state(self) -> str:
        """Return, as JSON: ``held`` (SHA-256 of what deltas may start from), ``wanted`` and ``status`` of the
        last check (idle, busy, ready, refused), its ``reason``, the seconds of the last proof and load.
        """
        busy = self._status == "busy"
        return json.dumps(
            {
                "held": "" if busy else self._image.digest,
                "wanted": "" if self._wanted is None else self._wanted.sha256,
                "status": self._status,
                "reason": self._reason,
                "prove_seconds": self._seconds["prove"],
                "load_seconds": self._seconds["load"],
            }
        )

    def receive_weights(self, update_info: FileUpdate) -> None:
        """Begin to check, or load what has been checked (checking it first where nobody asked for that).

        Raises RuntimeError: with ``REFUSED`` the old weights are intact, with ``TORN`` the model is unusable.
        vLLM passes the message on, not the class.
        """
        if update_info.check_only:
            self._begin(update_info)
            return
        if not self._proved(update_info):
            self._begin(update_info)
        self._wait()
        if self._status != "ready":
            raise RuntimeError(f"{REFUSED} the push: {self._reason}")
        self._load(update_info)

    def finish_weight_update(self) -> None:
        """Finish layerwise processing and repack layers that share a weight (see ``repack_tied``)."""
        if not self._loading:
            return
        began = perf_counter()
        self._finalize()
        self._loading = False
        self._seconds["load"] += perf_counter() - began

    def shutdown(self) -> None:
        """Wait for a check that runs; there is no channel to close."""
        self._wait()

    def _proved(self, update: FileUpdate) -> bool:
        return self._wanted is not None and replace(self._wanted, check_only=False) == update

    def _begin(self, update: FileUpdate) -> None:
        before = self._thread
        self._wanted, self._status, self._reason = update, "busy", ""
        self._thread = threading.Thread(
            target=self._prove, args=(update, before), name="spade-weights", daemon=True
        )
        self._thread.start()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _prove(self, update: FileUpdate, before: threading.Thread | None) -> None:
        """Read and check in a thread; one that was begun earlier ends first, for there is one image."""
        if before is not None:
            before.join()
        began, status, reason = perf_counter(), "ready", ""
        try:
            self._check(update)
        except Exception as error:
            status, reason = "refused", str(error) or repr(error)
        malloc.release()  # here rather than after the load: the model goes on sampling
        self._seconds["prove"] = perf_counter() - began
        if self._wanted is update:
            self._status, self._reason = status, reason

    def _check(self, update: FileUpdate) -> None:
        if not update.hold and not update.deltas:
            self._image = Image()
            path = store.fetch(update.uri, update.sha256, update.size)
            # Open from now on: the file may be removed before it is loaded, as newer ones come.
            self._file = safe_open(path, framework="pt", device="cpu")
            self._check_names(shapes(self._file), str(path))
            return
        self._file = None
        if update.uri and self._image.digest != update.sha256:
            self._image.read(update.uri, update.start or update.sha256, update.size)
        if update.deltas and self._image.digest != update.sha256:
            self._image.apply(update.chain)
        if self._image.digest != update.sha256:
            raise store.WeightFault(
                f"weights with SHA-256 {self._image.digest or '(none)'} are held, {update.sha256} is wanted"
            )
        self._check_names(self._image.layout.shapes, update.uri or update.sha256)

    def _load(self, update: FileUpdate) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        began = perf_counter()
        self._loading = True
        try:
            initialize_layerwise_reload(self.model)
            with disable_mtp_completeness_check():
                self.model.load_weights(self._tensors(update))
        except BaseException as error:
            self._loading = False
            raise RuntimeError(f"{TORN}: loading {update.sha256} failed half-way: {error!r}") from error
        self._seconds["load"] = perf_counter() - began
        if not update.hold:
            # Another load has to be proved again.
            self._image, self._file, self._wanted = Image(), None, None

    def _tensors(self, update: FileUpdate) -> Iterator[tuple[str, torch.Tensor]]:
        if self._image.digest == update.sha256:
            yield from self._image.tensors()
            return
        assert self._file is not None
        for name in self._file.keys():  # noqa: SIM118
            yield name, self._file.get_tensor(name)

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        try:
            finalize_layerwise_reload(self.model, self.model_config)
            repack_tied(self.model)
        except BaseException as error:
            raise RuntimeError(f"{TORN}: finishing the load failed: {error!r}") from error

    def _check_names(self, found: dict[str, tuple[int, ...]], where: str) -> None:
        if self._expected is None:
            self._expected = checkpoint_shapes(Path(self.model_config.model))
        if not self._expected:
            logger.warning("no safetensors beside the served model: names of pushed weights go unchecked")
            return
        tied = bool(getattr(self.model_config.hf_config, "tie_word_embeddings", False))
        compare_shapes(self._expected, found, tied=tied, where=where)


class WeightsExtension:
    """What we add to vLLM's workers (``--worker-extension-cls``), for ``/collective_rpc``."""

    weight_transfer_engine: Any

    def spade_weights_state(self) -> str:
        """Return the state of this worker's engine as JSON (``FileWeightTransferEngine.state``)."""
        engine = self.weight_transfer_engine
        return str(engine.state()) if isinstance(engine, FileWeightTransferEngine) else "{}"


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


def shapes(file: Any) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors in an open safetensors file."""
    return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def checkpoint_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape over all safetensors files of a model directory (empty when there are none)."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt", device="cpu") as file:
            found.update(shapes(file))
    return found


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
