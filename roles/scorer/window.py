"""What a window says about one design: win rate, hint-based regret, their intervals.

Pure. The plain arm is pooled over all rounds of the window; regret is measured in its first round, on
plays that have the same instance seed in both arms (architecture section 5, invariant I4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec
import numpy as np

_Z = 1.959963984540054
_RESAMPLES = 1000


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes of one design. ``plain`` and ``hinted`` map round -> play index -> return in [-1, 1].

    Hinted plays exist in the first round only. ``env_failures`` counts plain plays that the design's own
    program ended by raising, hanging, crashing or breaking its protocol.
    """

    first: int
    plain: Mapping[int, Mapping[int, float]]
    hinted: Mapping[int, float]
    env_failures: int = 0

    @property
    def returns(self) -> list[float]:
        """All plain returns, in order of round and index."""
        return [value for _, plays in sorted(self.plain.items()) for _, value in sorted(plays.items())]

    @property
    def by_round(self) -> dict[int, list[float]]:
        """Plain returns of the rounds that have any."""
        rounds = sorted(self.plain.items())
        return {number: [v for _, v in sorted(plays.items())] for number, plays in rounds if plays}


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """``win`` is the mean plain return, ``regret`` the mean hinted minus plain return over pairs.

    ``noise_floor`` is the standard error that the regret would have if the hint did nothing: a smaller
    regret cannot be told from none. None where there was nothing to measure.
    """

    plays: int
    hinted_plays: int
    win: float
    win_low: float
    win_high: float
    hinted: float | None
    regret: float | None
    regret_low: float | None
    regret_high: float | None
    noise_floor: float | None


def measure(window: Window, seed: int) -> Statistics:
    """Return the statistics of ``window``; ``seed`` makes the bootstrap the same on every host."""
    returns = window.returns
    win = fmean(returns) if returns else 0.0
    low, high = wilson(returns)
    hinted = list(window.hinted.values())
    differences = paired(window)
    regret = _regret(window, differences)
    regret_low, regret_high = bootstrap(differences, seed)
    return Statistics(
        plays=len(returns),
        hinted_plays=len(hinted),
        win=win,
        win_low=low,
        win_high=high,
        hinted=fmean(hinted) if hinted else None,
        regret=regret,
        regret_low=regret_low,
        regret_high=regret_high,
        noise_floor=_noise_floor(returns, len(differences)),
    )


def paired(window: Window) -> list[float]:
    """Return hinted - plain for every index of the first round that both arms have an outcome of."""
    plain = window.plain.get(window.first, {})
    return [window.hinted[i] - plain[i] for i in sorted(window.hinted.keys() & plain.keys())]


def _regret(window: Window, differences: Sequence[float]) -> float | None:
    """Pairs when there are any; else the difference of the arms' means in the first round; else None.

    Surplus hinted plays (more than plain ones) have seeds of their own and enter only the fallback.
    """
    if differences:
        return fmean(differences)
    plain = window.plain.get(window.first, {})
    if not plain or not window.hinted:
        return None
    return fmean(window.hinted.values()) - fmean(plain.values())


def wilson(returns: Sequence[float], z: float = _Z) -> tuple[float, float]:
    """Return the Wilson interval (95 %) of a mean of values in [0, 1], or in [-1, 1] when one is negative.

    For values that are not all 0 or 1 it is conservative: no variable on [0, 1] with mean p varies more
    than a coin with probability p. Without values the interval is the whole range (0, 1).
    """
    n = len(returns)
    if n == 0:
        return 0.0, 1.0
    base = -1.0 if min(returns) < 0 else 0.0
    width = 1.0 - base
    p = min(1.0, max(0.0, (fmean(returns) - base) / width))
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return base + width * max(0.0, centre - half), base + width * min(1.0, centre + half)


def bootstrap(differences: Sequence[float], seed: int) -> tuple[float | None, float | None]:
    """Return the 95 % percentile interval of the mean of paired differences; None below two pairs."""
    if len(differences) < 2:
        return None, None
    values = np.asarray(differences, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(values[picks].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)


def _noise_floor(returns: Sequence[float], pairs: int) -> float | None:
    if pairs == 0 or not returns:
        return None
    mean = fmean(returns)
    return math.sqrt(2 * fmean((value - mean) ** 2 for value in returns) / pairs)
