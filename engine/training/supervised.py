"""The optional supervised mix: a few texts in every batch.

They came with the starting model, or are the run's own accepted designs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np

from bus.messages import Segment
from engine.errors import ConfigError
from engine.training.batch import Example
from engine.training.samples import CreditedSample, arrays

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


class Accepted(msgspec.Struct, frozen=True, array_like=True):
    """A segment of an accepted design as a checkpoint keeps it: int32 tokens and uint8 mask, raw."""

    tokens: bytes
    mask: bytes


class DesignArchive:
    """The ``capacity`` newest segments of trained designs that were accepted and earned more than ``floor``.

    Pure: the same batches leave the same archive.
    """

    def __init__(self, *, capacity: int, floor: float, state: Iterable[Accepted] = ()) -> None:
        self._capacity, self._floor = capacity, floor
        self._kept = list(state)[-capacity:]

    def note(self, trained: Iterable[CreditedSample]) -> None:
        """Note the samples of a batch."""
        self._kept += [
            _accepted(segment)
            for sample in trained
            if sample.credit.accepted and sample.credit.reward > self._floor
            for segment in sample.segments
            if segment.sampled
        ]
        del self._kept[: -self._capacity]

    def examples(self) -> tuple[Example, ...]:
        """Return the designs as texts to learn: their sampled tokens, each after its prompt."""
        return tuple(_text(kept) for kept in self._kept)

    def state(self) -> tuple[Accepted, ...]:
        """Return the part that a checkpoint keeps."""
        return tuple(self._kept)


def _accepted(segment: Segment) -> Accepted:
    tokens, mask, _ = arrays(segment)
    return Accepted(tokens.astype("<i4").tobytes(), mask.astype("u1").tobytes())


def _text(kept: Accepted) -> Example:
    tokens, mask = np.frombuffer(kept.tokens, dtype="<i4"), np.frombuffer(kept.mask, dtype="u1")
    return Example(tokens, mask.astype(np.bool_))


def draw(examples: tuple[Example, ...], count: int, *, seed: int, step: int) -> list[Example]:
    """Return ``count`` examples (all of them when there are fewer) that depend on seed and step only."""
    chooser = random.Random(f"supervised:{seed}:{step}")
    return chooser.sample(examples, min(count, len(examples)))
