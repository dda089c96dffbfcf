"""Checks, before a run starts, that its model can be trained, published and exported.

Runs as ``python -m engine.running.model_check MODEL LEARNER`` (the ``[learner]`` table as JSON) in its own
process, which ends with status 2 and prints the fault as JSON: torch stays out of the caller.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from engine.config import LearnerConfig
from engine.errors import ConfigError, SpadeError
from engine.weights import store

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECONDS = 300.0
_FAULT = 2
_REMEDY = "Take another model, or save this one again with transformers (save_pretrained)."


class _ModelFault(msgspec.Struct):
    what: str
    where: str
    remedy: str


def check(model: Path, learner: LearnerConfig) -> None:
    """Check the model in ``model`` in a child process. Raises ConfigError with what does not work."""
    command = [sys.executable, "-P", "-m", "engine.running.model_check", str(model)]
    try:
        result = subprocess.run(
            [*command, msgspec.json.encode(learner).decode()],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SpadeError(
            f"The check of the model took more than {_SECONDS:.0f} s", where=str(model)
        ) from error
    if result.returncode == _FAULT:
        fault = msgspec.json.decode(result.stdout.splitlines()[-1], type=_ModelFault)
        raise ConfigError(fault.what, where=fault.where, remedy=fault.remedy)
    if result.returncode:
        last = (result.stderr.strip() or "no message").splitlines()[-1]
        raise ConfigError(f"The model cannot be loaded: {last}", where=str(model), remedy=_REMEDY)


def check_here(model: Path, learner: LearnerConfig) -> None:
    """Check the model in ``model`` in this process. Raises ConfigError."""
    from engine.training import lora as adapters
    from engine.training.export import write_beside
    from engine.training.parameters import published, without_memory
    from engine.training.router_replay import routes_of

    try:
        policy = without_memory(model)
        require_same_names(model, {name: tuple(tensor.shape) for name, tensor in published(policy)})
        if learner.router_replay:
            routes_of(policy)
        adapters.check(model, learner.lora)
        with tempfile.TemporaryDirectory() as scratch:
            write_beside(model, Path(scratch))
    except (OSError, ValueError) as error:
        text = " ".join(str(error).split())[:500]
        raise ConfigError(f"The model cannot be used: {text}", where=str(model), remedy=_REMEDY) from error


def require_same_names(model: Path, published: Mapping[str, tuple[int, ...]]) -> None:
    """Compare names and shapes of ``published`` with the files of ``model``. Raises ConfigError."""
    found = {name: store.TensorInfo("", shape) for name, shape in published.items()}
    try:
        store.compare(store.checkpoint(model), found, tied=store.tied(model), where=str(model))
    except store.WeightFault as fault:
        raise ConfigError(
            f"The learner would publish other tensors than the files of the model have: {fault.what}",
            where=str(model),
            remedy=_REMEDY,
        ) from fault


def main(model: str, learner: str) -> int:
    """Check, print the fault, return the exit status."""
    try:
        check_here(Path(model), msgspec.json.decode(learner, type=LearnerConfig))
    except SpadeError as fault:
        print(msgspec.json.encode(_ModelFault(fault.what, fault.where, fault.remedy)).decode())
        return _FAULT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
