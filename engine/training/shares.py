"""Which rank computes which micro-batch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.training.batch import Batch, MicroBatch

_CARRIES_LOSS = ("mask", "advantages", "weights")


def deal(batch: Batch, ranks: int) -> list[Batch]:
    """Return one batch a rank; in each optimiser step their losses add up to that of ``batch``.

    Counts (rows, tokens) stay those of the whole; ``padded`` counts the rows that fill up, too.
    """
    if ranks == 1:
        return [batch]
    hands: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    places: dict[tuple[int, ...], tuple[int, ...]] = {}
    filling = 0
    for step in batch.schedule:
        if step in places:
            continue
        dealt, padded = _split([batch.micro_batches[index] for index in step], ranks)
        places[step] = tuple(range(len(hands[0]), len(hands[0]) + len(dealt[0])))
        filling += padded
        for hand, part in zip(hands, dealt, strict=True):
            hand += part
    schedule = tuple(places[step] for step in batch.schedule)
    padded = batch.padded + filling
    return [replace(batch, micro_batches=tuple(hand), schedule=schedule, padded=padded) for hand in hands]


def _split(micro_batches: Sequence[MicroBatch], ranks: int) -> tuple[list[list[MicroBatch]], int]:
    """Return the micro-batches of each rank, and how many positions of them only fill up.

    Each rank gets equally many, because sharded weights are gathered by all ranks at once, and about equally
    many positions: the largest goes first, to the rank with the least so far. So the i-th ones of all ranks
    are of like size. What is missing is filled with rows without weight.
    """
    count = -(-len(micro_batches) // ranks)
    hands: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for micro in sorted(micro_batches, key=_size, reverse=True):
        free = [rank for rank in range(ranks) if len(hands[rank]) < count]
        rank = min(free, key=lambda rank: (loads[rank], rank))
        hands[rank].append(micro)
        loads[rank] += _size(micro)
    filling = 0
    smallest = min(micro_batches, key=_size)
    for hand in hands:
        while len(hand) < count:
            hand.append(blank(smallest))
            filling += _size(hand[-1])
    return hands, filling


def blank(micro: MicroBatch) -> MicroBatch:
    """Return the first row of ``micro`` without any weight in the loss: a gradient of zero, of full shape."""
    row = {name: tensor[:1].clone() for name, tensor in micro.items()}
    return {name: torch.zeros_like(row[name]) if name in _CARRIES_LOSS else row[name] for name in row}


def _size(micro: MicroBatch) -> int:
    return micro["input_ids"].numel()
