"""The optional supervised mix: texts that came with the starting model, a few of them in every step."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np

from engine.errors import ConfigError
from engine.training.batch import Example

FILE = "supervised.jsonl"


def load(directory: Path) -> tuple[Example, ...]:
    """Read ``supervised.jsonl`` of a model directory: ``{"tokens": [...], "mask": [...]}`` a line.

    The first token is never learned (nothing predicts it). Raises ConfigError when the file is missing,
    holds no usable example, or a line is not of that form.
    """
    path = directory / FILE
    remedy = "Set learner.supervised_mix = 0, or build the model with the warm start, which writes the file."
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError("The supervised mix has no examples", where=str(path), remedy=remedy) from error
    examples = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            tokens = np.asarray(record["tokens"], dtype=np.int32)
            mask = np.asarray(record["mask"], dtype=np.bool_)
            fits = tokens.ndim == 1 and tokens.shape == mask.shape
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError("Not a supervised example", where=f"{path}:{number}", remedy=remedy) from error
        if not fits:
            raise ConfigError("Tokens and mask differ in shape", where=f"{path}:{number}", remedy=remedy)
        if mask[1:].any():
            mask = mask.copy()
            mask[0] = False
            examples.append(Example(tokens, mask))
    if not examples:
        raise ConfigError("The supervised mix has no examples", where=str(path), remedy=remedy)
    return tuple(examples)


def draw(examples: tuple[Example, ...], count: int, *, seed: int, step: int) -> list[Example]:
    """Return ``count`` examples (all of them when there are fewer) that depend on seed and step only."""
    chooser = random.Random(f"supervised:{seed}:{step}")
    return chooser.sample(examples, min(count, len(examples)))
