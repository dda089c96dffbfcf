"""Batches: samples become rows and micro-batches, and every token gets its weight in the loss. Pure.

The loss of a step is, for each role, ``weight * sum over samples of (mean over the sample's trained
tokens) / B`` with one B for both roles (reference spec 6.3), so that ``advantage_scale`` equals the
reference's factor. B also counts plays and designs without variance: they reduce the step as in a
synchronous batch.

Several optimiser steps on one batch all take the whole batch, or each its own minibatch. Samples are not
divided, and weights are multiplied by the number of steps, so that each step has the size of a full one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bus.messages import Role
from engine.config import RoleTraining
from engine.training.samples import CreditedSample, Routes, arrays, trained_tokens

KINDS = ("agent", "designer", "supervised")
MicroBatch = dict[str, torch.Tensor]
"""Right-padded tensors of B rows: ``input_ids`` and ``attention_mask`` int64 (B, T); ``kind`` int64 (B,),
an index into ``KINDS``; ``temperature`` float64 (B,), the same in all rows; and, for the token at position
t + 1, ``mask`` bool, ``behaviour`` (log-probs),
``advantages`` and ``weights`` float32, all (B, T - 1). ``mask`` has holes where tokens were not sampled. When
several steps are taken on the batch, ``proximal`` holds the log-probs at its start, like ``behaviour``. With
router replay ``experts`` int16 (B, T, layers, top-k) are those to be replayed, -1 for the trainer's own."""


class Example(NamedTuple):
    """One supervised text: ``tokens`` int32 (T,), ``mask`` bool (T,) with True on what is learned."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]


class Row(NamedTuple):
    """One segment or one supervised example. ``weight`` is that of each masked token in the loss.

    Its log-probs are those of logits divided by ``temperature``.
    """

    name: str
    kind: int
    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    behaviour: NDArray[np.float32]
    advantage: float
    weight: float
    temperature: float = 1.0
    experts: NDArray[np.int16] | None = None


@dataclass(frozen=True)
class Batch:
    """The data of one version of the weights.

    ``tokens`` and ``padded`` count positions without and with padding, ``trained`` those with a policy loss.
    ``schedule`` holds, for each optimiser step, the indices of its micro-batches.
    """

    micro_batches: tuple[MicroBatch, ...]
    rows: int
    tokens: int
    padded: int
    trained: int
    schedule: tuple[tuple[int, ...], ...] = ((),)

    @property
    def passes(self) -> int:
        """Return how often the steps see each micro-batch."""
        return sum(map(len, self.schedule)) // max(1, len(self.micro_batches))

    @property
    def waste(self) -> float:
        """Return the share of computed positions that are padding."""
        return 1.0 - self.tokens / self.padded if self.padded else 0.0


def batch_size(plays: float, designs: float, nominal_plays: int) -> float:
    """Return B of a round.

    A batch of designs alone (the last of a run) counts the plays of a usual round, so that its designs weigh
    no more than those of any other batch.
    """
    return (plays or nominal_plays) + designs


def share(quota: int, sent: int) -> float:
    """Return the share of a round that a ``quota`` takes when the role sent ``sent`` samples.

    The plays or designs in B shrink by the same share, so that a quota does not reduce the role's weight.
    """
    return min(1.0, quota / sent) if quota and sent else 1.0


def policy_rows(
    samples: Sequence[CreditedSample],
    training: Mapping[Role, RoleTraining],
    size: float,
    temperatures: Mapping[Role, float] | None = None,
    routes: Routes | None = None,
) -> list[Row]:
    """Return one row a segment with a sampled token.

    A sample's token mean runs over all its segments. ``temperatures`` are those that the roles sample at (1
    without them), ``routes`` the sizes of the experts that are replayed. B is ``size``, at least the number
    of samples here, which matters only when a quota carried samples over from an earlier round.
    """
    denominator = max(size, len(samples))
    rows: list[Row] = []
    for sample in samples:
        weight = training[sample.role].weight / (trained_tokens(sample) * denominator)
        advantage, temperature = sample.credit.advantage, (temperatures or {}).get(sample.role, 1.0)
        for index, segment in enumerate(sample.segments):
            tokens, mask, logprobs = arrays(segment)
            if mask.any():
                name = f"{sample.sample}/{index:04d}"
                kind = KINDS.index(sample.role)
                experts = None if routes is None else routes.read(segment)
                row = Row(name, kind, tokens, mask, logprobs, advantage, weight, temperature, experts)
                rows.append(row)
    return rows


def supervised_rows(examples: Sequence[Example], weight: float) -> list[Row]:
    """Return rows whose loss is ``weight`` times the mean over examples of the token mean of the NLL."""
    return [
        Row(
            f"supervised/{index:04d}",
            KINDS.index("supervised"),
            tokens,
            mask,
            np.zeros(len(tokens), dtype=np.float32),
            0.0,
            weight / (int(mask.sum()) * len(examples)),
        )
        for index, (tokens, mask) in enumerate(examples)
    ]


def build(
    rows: Iterable[Row], *, micro_batch_tokens: int, padding: int, steps: int = 1, minibatches: bool = False
) -> Batch:
    """Pack ``rows``, sorted by length, into micro-batches of at most ``micro_batch_tokens`` positions.

    A row longer than that is a micro-batch of its own. Rows of different temperatures do not share one,
    because the fused head of the trainer divides by one number. ``padding`` is the padding token id.
    ``steps`` optimiser steps are taken on all of them, or with ``minibatches`` each on its part of the
    samples (at most as many steps as samples).
    """
    ordered = sorted(rows, key=lambda row: (len(row.tokens), row.name))
    parts = [ordered]
    if minibatches and steps > 1:
        parts, steps = _deal(ordered, steps), 1
    packed = [[collate(group, padding) for group in _pack(part, micro_batch_tokens)] for part in parts]
    micro_batches = tuple(micro for part in packed for micro in part)
    indices = iter(range(len(micro_batches)))
    return Batch(
        micro_batches=micro_batches,
        rows=len(ordered),
        tokens=sum(len(row.tokens) for row in ordered),
        padded=sum(micro["input_ids"].numel() for micro in micro_batches),
        trained=sum(int(row.mask.sum()) for row in ordered if KINDS[row.kind] != "supervised"),
        schedule=tuple(tuple(next(indices) for _ in part) for part in packed) * steps,
    )


def _pack(ordered: Sequence[Row], micro_batch_tokens: int) -> list[list[Row]]:
    groups: list[list[Row]] = []
    for row in sorted(ordered, key=lambda row: row.temperature):
        alike = groups and groups[-1][0].temperature == row.temperature
        if alike and (len(groups[-1]) + 1) * len(row.tokens) <= micro_batch_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _deal(ordered: Sequence[Row], count: int) -> list[list[Row]]:
    """Deal samples out into ``count`` parts, kind by kind, in the order of the hashes of their names."""
    samples: dict[tuple[int, str], list[Row]] = {}
    for row in ordered:
        whole = row.name if KINDS[row.kind] == "supervised" else row.name.rpartition("/")[0]
        samples.setdefault((row.kind, whole), []).append(row)
    names = sorted(samples, key=lambda name: (name[0], hashlib.blake2b(name[1].encode()).digest()))
    count = min(count, len(names))
    dealt = {name: index % count for index, name in enumerate(names)}
    parts: list[list[Row]] = [[] for _ in range(count)]
    for name, rows in samples.items():
        parts[dealt[name]] += [row._replace(weight=row.weight * count) for row in rows]
    return [sorted(part, key=lambda row: (len(row.tokens), row.name)) for part in parts]


def collate(rows: Sequence[Row], padding: int) -> MicroBatch:
    """Return the tensors of ``rows`` (see :data:`MicroBatch`)."""
    count, length = len(rows), max(len(row.tokens) for row in rows)
    tokens = np.full((count, length), padding, dtype=np.int64)
    present = np.zeros((count, length), dtype=np.int64)
    mask = np.zeros((count, length), dtype=np.bool_)
    behaviour = np.zeros((count, length), dtype=np.float32)
    for index, row in enumerate(rows):
        end = len(row.tokens)
        tokens[index, :end] = row.tokens
        present[index, :end] = 1
        mask[index, :end] = row.mask
        behaviour[index, :end] = np.where(row.mask, row.behaviour, 0.0)
    advantage = np.array([[row.advantage] for row in rows], dtype=np.float32)
    weight = np.array([[row.weight] for row in rows], dtype=np.float32)
    shifted = mask[:, 1:]
    micro = {
        "input_ids": torch.from_numpy(tokens),
        "attention_mask": torch.from_numpy(present),
        "kind": torch.tensor([row.kind for row in rows], dtype=torch.int64),
        "temperature": torch.tensor([row.temperature for row in rows], dtype=torch.float64),
        "mask": torch.from_numpy(shifted.copy()),
        "behaviour": torch.from_numpy(behaviour[:, 1:].copy()),
        "advantages": torch.from_numpy(advantage * shifted),
        "weights": torch.from_numpy(weight * shifted),
    }
    shape = next((row.experts.shape[1:] for row in rows if row.experts is not None), None)
    if shape is not None:
        experts = np.full((count, length, *shape), -1, dtype=np.int16)
        for index, row in enumerate(rows):
            if row.experts is not None:
                experts[index, : len(row.tokens)] = row.experts
        micro["experts"] = torch.from_numpy(experts)
    return micro
