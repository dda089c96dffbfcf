"""A checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from engine.config import LoraConfig
from engine.errors import ConfigError, SpadeError
from engine.training import lora as adapters
from engine.training.checkpoint import Checkpoint, newest, places, read
from engine.training.parameters import kept, put
from engine.training.retention import read_best
from engine.weights.store import as_published

Kind = Literal["float32", "bfloat16", "float16"]
SHARD = "4GB"
_BESIDE = ("generation_config.json",)
_FOR_A_RESTART = ("supervised.jsonl",)
"""Files that only a run that starts from the folder needs."""


def choose(directory: Path, which: str) -> Checkpoint:
    """Return a checkpoint under ``directory``: ``last``, ``best``, or that of a step.

    Raises ConfigError when there is none, SpadeError when it is damaged.
    """
    known = places(directory)
    if not known:
        raise ConfigError(
            "There is no checkpoint yet", where=str(directory), remedy="Let the run take a step."
        )
    if which == "last":
        found = newest(directory)
        assert found is not None
        return found
    if which == "best":
        best = read_best(directory)
        if best is None:
            raise ConfigError(
                "No checkpoint is known to be the best",
                where=str(directory),
                remedy="Set learner.best_by before the run, or take --checkpoint last.",
            )
        return load(directory / best.checkpoint)
    steps = {int(path.name.split("-")[1]): path for path in reversed(known)}  # of several, the latest fence's
    if not which.isdigit() or int(which) not in steps:
        raise ConfigError(
            f"There is no checkpoint {which!r}",
            where=str(directory),
            remedy=f"Take last, best, or one of the steps {', '.join(map(str, sorted(steps)))}.",
        )
    return load(steps[int(which)])


def load(place: Path) -> Checkpoint:
    """Return the checkpoint in ``place``. Raises SpadeError when it is none or damaged."""
    try:
        return read(place)
    except (OSError, ValueError) as error:
        raise SpadeError(
            f"This is no usable checkpoint: {error}",
            where=str(place),
            remedy="Name a directory under RUN/learner/checkpoints.",
        ) from error


def export(
    checkpoint: Checkpoint, base: Path, target: Path, *, lora: LoraConfig, dtype: Kind, card: str = ""
) -> None:
    """Write the model of ``checkpoint``, which started from the folder ``base``, into the folder ``target``.

    With a ``card``, its README.md, the folder is for others to use; without one a run starts from it.

    Weights are safetensors of at most ``SHARD`` each, with adapters added to them. Configuration, generation
    configuration, tokenizer and chat template are those of ``base``. The folder appears when it is complete.
    Raises SpadeError when ``target`` is not empty, or the checkpoint does not fit ``base``.
    """
    if target.exists() and any(target.iterdir()):
        raise ConfigError("The folder is not empty", where=str(target), remedy="Name another one.")
    transformers_logging.disable_progress_bar()
    model = _model(checkpoint, base, lora)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = as_published(name, tensor.data, getattr(torch, dtype))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ConfigError(
            f"The folder cannot be written: {error.strerror}", where=str(target), remedy="Name another one."
        ) from error
    try:
        model.generation_config = GenerationConfig()  # transformers refuses to write some that it reads
        model.save_pretrained(scratch, max_shard_size=SHARD)
        write_beside(base, scratch)
        if card:
            (scratch / "README.md").write_text(card, encoding="utf-8")
        else:
            _copy(_FOR_A_RESTART, base, scratch)
        for path in (scratch, *scratch.iterdir()):
            path.chmod(0o755 if path.is_dir() else 0o644)
        scratch.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_beside(base: Path, target: Path) -> None:
    """Write what an export has beside weights and configuration: the files of ``base``, as they are there.

    Raises OSError or ValueError for a tokenizer that cannot be read or written.
    """
    AutoTokenizer.from_pretrained(base, local_files_only=True).save_pretrained(target)
    _copy(_BESIDE, base, target)


def _copy(names: Iterable[str], base: Path, target: Path) -> None:
    for name in names:
        if (base / name).is_file():
            shutil.copyfile(base / name, target / name)


def _model(checkpoint: Checkpoint, base: Path, lora: LoraConfig) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    settings = adapters.peft_config(lora)
    if settings is None:
        put(kept(model), checkpoint.tensors().model)
        return model
    from peft import get_peft_model

    adapted = get_peft_model(model, settings)
    put(kept(adapted), checkpoint.tensors().model)
    return adapted.merge_and_unload()
