"""The score of an evaluation, with its standard error: pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Result(NamedTuple):
    """One held-out episode: its return in [-1, 1] and the lowest and highest version that played it.

    ``versions`` is None where the program failed before the policy was asked.
    """

    family: str
    returned: float
    versions: tuple[int, int] | None


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


def score(results: Sequence[Result], version: int) -> Score:
    """Return the score of at least one result; ``version`` is used where the policy was never asked.

    Raises ValueError without a result.
    """
    if not results:
        raise ValueError("an evaluation without episodes has no score")
    returns = [result.returned for result in results]
    count = len(returns)
    mean = math.fsum(returns) / count
    spread = math.fsum((value - mean) ** 2 for value in returns)
    families: dict[str, list[float]] = defaultdict(list)
    for result in results:
        families[result.family].append(result.returned)
    versions = [result.versions for result in results if result.versions] or [(version, version)]
    return Score(
        episodes=count,
        win=mean,
        stderr=math.sqrt(spread / (count - 1) / count) if count > 1 else 0.0,
        by_family={name: math.fsum(values) / len(values) for name, values in sorted(families.items())},
        low=min(low for low, _ in versions),
        high=max(high for _, high in versions),
    )
