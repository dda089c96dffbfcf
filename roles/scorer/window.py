"""What a window says about one design: win rate, hint-based regret, their intervals.

Pure. The plain arm is pooled over all rounds of the window; regret over the rounds in which hints were
played, on plays of a round that have the same instance seed in both arms (architecture section 5, invariant
I4). A later plain play has no partner: the policy has moved on, and its gain would be taken from the hint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import msgspec

from roles.scorer.regret import doubt, spread

_Z = 1.959963984540054

Returns = Mapping[int, Mapping[int, float]]


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """Outcomes of one design. ``plain`` and ``hinted`` map round -> play index -> return in [-1, 1].

    Hinted plays exist in the first rounds only.
    """

    plain: Returns
    hinted: Returns

    @property
    def returns(self) -> list[float]:
        """All plain returns, in order of round and index."""
        return list(_values(self.plain))

    @property
    def by_round(self) -> dict[int, list[float]]:
        """Plain returns of the rounds that have any."""
        rounds = sorted(self.plain.items())
        return {number: [v for _, v in sorted(plays.items())] for number, plays in rounds if plays}


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """``win`` is the mean plain return, ``regret`` the mean hinted minus plain return over ``pairs``.

    ``regret_lower`` is its one-sided bound, ``regret_variance`` the variance of its error. ``noise_floor`` is
    the standard error that the regret would have if the hint did nothing: a smaller regret cannot be told
    from none. None where there was nothing to measure.
    """

    plays: int
    hinted_plays: int
    pairs: int
    win: float
    win_low: float
    win_high: float
    hinted: float | None
    regret: float | None
    regret_low: float | None
    regret_high: float | None
    regret_lower: float | None
    regret_variance: float | None
    noise_floor: float | None


def measure(window: Window, seed: int, *, lowest: float = 0.0, confidence: float = 0.9) -> Statistics:
    """Return the statistics of ``window``; ``seed`` makes the bootstrap the same on every host.

    ``lowest`` is the least return that is declared for the environments, ``confidence`` that of the one-sided
    bound.
    """
    returns, hinted = window.returns, list(_values(window.hinted))
    low, high = wilson(returns, lowest)
    differences = paired(window)
    left = doubt(differences, 1.0 - lowest, seed, confidence=confidence)
    return Statistics(
        plays=len(returns),
        hinted_plays=len(hinted),
        pairs=len(differences),
        win=fmean(returns) if returns else 0.0,
        win_low=low,
        win_high=high,
        hinted=fmean(hinted) if hinted else None,
        regret=_regret(window, differences),
        regret_low=left.low if left else None,
        regret_high=left.high if left else None,
        regret_lower=left.lower if left else None,
        regret_variance=left.variance if left else None,
        noise_floor=_noise_floor(returns, lowest, len(differences)),
    )


def paired(window: Window) -> list[float]:
    """Return hinted - plain for every round and index that both arms have an outcome of."""
    result = []
    for number, hinted in sorted(window.hinted.items()):
        plain = window.plain.get(number, {})
        result += [hinted[i] - plain[i] for i in sorted(hinted.keys() & plain.keys())]
    return result


def _regret(window: Window, differences: Sequence[float]) -> float | None:
    """Pairs when there are any; else the difference of the arms' means in the hinted rounds; else None.

    Surplus hinted plays (more than plain ones) have seeds of their own and enter only the fallback.
    """
    if differences:
        return fmean(differences)
    played = {number: plays for number, plays in window.hinted.items() if plays}
    plain = [value for number in played for value in window.plain.get(number, {}).values()]
    if not plain or not played:
        return None
    return fmean(_values(played)) - fmean(plain)


def _values(rounds: Returns) -> Iterator[float]:
    return (value for _, plays in sorted(rounds.items()) for _, value in sorted(plays.items()))


def wilson(returns: Sequence[float], lowest: float = 0.0, z: float = _Z) -> tuple[float, float]:
    """Return the Wilson interval (95 %) of a mean of values in [lowest, 1].

    For values that are not all 0 or 1 it is conservative: no variable on [0, 1] with mean p varies more than
    a coin with probability p. The range is a declared one: a single return moves the interval as little as
    the mean. The mean of values that break the declaration is inside all the same. Without values the
    interval is the whole range.
    """
    n = len(returns)
    if n == 0:
        return lowest, 1.0
    width, mean = 1.0 - lowest, fmean(returns)
    p = min(1.0, max(0.0, (mean - lowest) / width))
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    low, high = lowest + width * max(0.0, centre - half), lowest + width * min(1.0, centre + half)
    return min(mean, low), max(mean, high)


def _noise_floor(returns: Sequence[float], lowest: float, pairs: int) -> float | None:
    """Two independent arms with the spread of the plain plays; plays that are all equal leave some."""
    if pairs == 0 or not returns:
        return None
    return math.sqrt(2 * spread(returns, lowest, 1.0) / pairs)
