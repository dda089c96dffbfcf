"""What a handful of paired plays says about a regret: interval, lower bound, shrunk mean. Pure.

Differences d_i = hinted - plain lie in [-width, width]. They are taken as draws from an unknown
distribution whose prior is a Dirichlet process of total mass 1, half of it at each end: the Bayesian
bootstrap (Rubin 1981) with half a pseudo pair at -width and half at +width. So equal pairs leave doubt: four
wins of the hint over four losses give a regret of 1 with an interval down to 0.1, where resampling the pairs
themselves says [1, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

_DRAWS = 1000
_ENDS = 0.5


class Doubt(NamedTuple):
    """Of a mean difference: its 95 % interval, its one-sided ``lower`` bound, its ``variance``."""

    low: float
    high: float
    lower: float
    variance: float


def doubt(differences: Sequence[float], width: float, seed: int, *, confidence: float = 0.9) -> Doubt | None:
    """Return what ``differences`` leave open about their mean, None without any.

    ``seed`` makes the draws the same on every host. The interval holds the mean of the differences.
    """
    if not differences:
        return None
    mean = fmean(differences)
    generator = np.random.default_rng(seed)
    # Dirichlet weights are gamma variables: of shape 1 exponential, of shape 1/2 half a squared normal.
    weights = generator.standard_exponential((_DRAWS, len(differences)))
    ends = generator.standard_normal((_DRAWS, 2)) ** 2 / 2
    total = weights.sum(axis=1) + ends.sum(axis=1)
    means = (weights @ np.asarray(differences, dtype=np.float64) + ends @ np.array([-width, width])) / total
    low, high, lower = np.quantile(means, (0.025, 0.975, 1 - confidence))
    return Doubt(
        low=min(mean, float(low)),
        high=max(mean, float(high)),
        lower=min(mean, float(lower)),
        variance=spread(differences, -width, width) / len(differences),
    )


def spread(values: Sequence[float], low: float, high: float) -> float:
    """Return the variance of ``values`` and half a pseudo value at each of ``low`` and ``high``.

    It is above 0 for equal values, and 1/4 of the squared range for a fair coin.
    """
    total = len(values) + 2 * _ENDS
    mean = (math.fsum(values) + _ENDS * (low + high)) / total
    square = (math.fsum(value * value for value in values) + _ENDS * (low * low + high * high)) / total
    return max(0.0, square - mean * mean)


def shrink(means: Sequence[float], variances: Sequence[float]) -> list[float]:
    """Return ``means`` drawn towards 0 by what of their size is noise (empirical Bayes).

    True regrets are taken as normal around 0 with a variance that the means themselves show: their mean
    square less their mean ``variances``, at least 0. A single mean gets the positive-part James-Stein rule.
    """
    if not means:
        return []
    true = max(0.0, fmean(m * m - v for m, v in zip(means, variances, strict=True)))
    return [m * (true / (true + v) if true > 0 else 0.0) for m, v in zip(means, variances, strict=True)]
