"""Figures of an evaluation with their intervals: pure.

Items are the sampling unit: samples of one item are not independent, so an interval comes from resampling
items (bootstrap), never samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

DRAWS = 4_000
LEVEL = 0.95
RIGHT = 1.0 - 1e-9
_SEED = 17

Scores = Mapping[str, Sequence[float]]
"""The scores of the samples of each item."""


class Estimate(msgspec.Struct, frozen=True):
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one suite or group. ``pass_at`` maps k to the share of items that k samples solve."""

    items: int
    samples: int
    mean: Estimate
    pass_at: dict[int, float]


class Difference(NamedTuple):
    """The paired difference of two evaluations on ``items`` common items; ``left_out`` are not common."""

    items: int
    left_out: int
    mean: Estimate


def pass_at(right: int, samples: int, k: int) -> float:
    """Return an unbiased estimate that one of ``k`` is right, where ``right`` of ``samples`` were."""
    if samples - right < k:
        return 1.0
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def figures(scores: Scores) -> Figures:
    """Return the figures of at least one item with at least one sample each."""
    fewest = min(len(values) for values in scores.values())
    ks = [2**power for power in range(fewest.bit_length())]
    solved = [(sum(value >= RIGHT for value in values), len(values)) for values in scores.values()]
    return Figures(
        items=len(scores),
        samples=sum(len(values) for values in scores.values()),
        mean=interval([math.fsum(values) / len(values) for values in scores.values()]),
        pass_at={k: math.fsum(pass_at(*pair, k) for pair in solved) / len(solved) for k in ks},
    )


def interval(values: Sequence[float]) -> Estimate:
    """Return the mean of ``values`` with its interval.

    If all values are 0, or all are 1, resampling shows no spread; then it is Wilson's interval.
    """
    mean, count = math.fsum(values) / len(values), len(values)
    if min(values) == max(values) and mean in (0.0, 1.0):
        width = 1.96**2 / (count + 1.96**2)
        return Estimate(mean, max(0.0, mean - width), min(1.0, mean + width))
    return Estimate(mean, *_drawn(values))


def difference(first: Scores, second: Scores) -> Difference | None:
    """Compare ``second`` with ``first`` item by item; None without a common item."""
    common = sorted(first.keys() & second.keys())
    if not common:
        return None
    means = [
        math.fsum(second[one]) / len(second[one]) - math.fsum(first[one]) / len(first[one]) for one in common
    ]
    mean = Estimate(math.fsum(means) / len(means), *_drawn(means))
    return Difference(len(common), len(first.keys() | second.keys()) - len(common), mean)


def _drawn(values: Sequence[float]) -> tuple[float, float]:
    array, rng = np.asarray(values, float), np.random.default_rng(_SEED)
    size = max(1, min(DRAWS, 4_000_000 // len(array)))
    means = array[rng.integers(len(array), size=(size, len(array)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
