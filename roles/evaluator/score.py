"""The score of an evaluation, with its standard error: pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from engine.evals.records import Sample


class Score(NamedTuple):
    """The score of a suite.

    ``win`` is the mean return, ``stderr`` its standard error (0 for one episode); ``low`` and ``high`` are
    the packed versions that answered.
    """

    episodes: int
    win: float
    stderr: float
    by_family: dict[str, float]
    low: int
    high: int


def score(samples: Sequence[Sample], version: int) -> Score:
    """Return the score of at least one sample; ``version`` is used where the policy was never asked.

    Raises ValueError without a sample.
    """
    if not samples:
        raise ValueError("an evaluation without episodes has no score")
    returns = [sample.score for sample in samples]
    count = len(returns)
    families: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        families[sample.group].append(sample.score)
    versions = [sample.versions for sample in samples if sample.versions] or [(version, version)]
    return Score(
        episodes=count,
        win=fmean(returns),
        stderr=stdev(returns) / math.sqrt(count) if count > 1 else 0.0,
        by_family={name: fmean(values) for name, values in sorted(families.items())},
        low=min(low for low, _ in versions),
        high=max(high for _, high in versions),
    )
