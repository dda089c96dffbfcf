"""Statistics of a window: win rate, paired regret, their uncertainty, hint leaks. Pure.

The plain arm is pooled over all rounds of the window. Regret compares plays of one round that have the same
instance seed in both arms (architecture section 5, invariant I4). A plain play of a later round has no
partner: by then the policy has moved on, and its gain would be taken from the hint.

Uncertainty of the regret: differences d_i = hinted - plain lie in [-width, width]. They are taken as draws
from an unknown distribution whose prior is a Dirichlet process of total mass 1, half of it at each end: the
Bayesian bootstrap (Rubin 1981) with half a pseudo pair at -width and half at +width. So equal pairs leave
doubt: four wins with the hint against four losses give a regret of 1 with an interval down to 0.1, where
resampling the pairs themselves gives [1, 1].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import msgspec
import numpy as np

from bus.messages import Arm
from engine.config import RewardConfig
from roles.scorer.rewards import BROKEN_SHARE, Evidence
from roles.scorer.state import Design, Play, PlayStatus
from sandbox.trivial_policies import interval

_DRAWS = 1000
_ENDS = 0.5
_LEAK_SHARE = 0.9
_FEWEST = 2


class Doubt(NamedTuple):
    """The doubt about a mean: its 95 % interval, its one-sided ``lower`` bound, and its ``variance``."""

    low: float
    high: float
    lower: float
    variance: float


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a design's window so far. ``rounds`` maps round -> plain returns, rounds with any only.

    ``win`` is the mean plain return, ``regret`` the mean hinted minus plain return over ``pairs``.
    ``noise_floor`` is the standard error that the regret would have if the hint did nothing: a smaller regret
    cannot be told from none. None where there was nothing to measure; no ``doubt`` where none was asked for.
    """

    rounds: dict[int, list[float]]
    plays: int
    hinted_plays: int
    pairs: int
    win: float
    win_low: float
    win_high: float
    hinted: float | None
    regret: float | None
    noise_floor: float | None
    doubt: Doubt | None


def measure(settings: RewardConfig, design: Design, seed: int | None = None) -> Statistics:
    """Return the statistics of a design's window so far.

    A pair is a hinted and a plain play of one round and index. Without a pair there is no regret: a
    difference of arms that met other instances is none. ``seed`` draws the doubt about the regret, which is
    the same on every host.
    """
    plain, hinted = _outcomes(design, "plain"), _outcomes(design, "hinted")
    returns = [value for plays in plain.values() for value in plays.values()]
    told = [value for plays in hinted.values() for value in plays.values()]
    differences = [
        hinted[number][index] - value
        for number, plays in plain.items()
        for index, value in plays.items()
        if index in hinted[number]
    ]
    lowest = settings.lowest_return
    low, high = wilson(returns, lowest)
    floor = math.sqrt(2 * spread(returns, lowest, 1.0) / len(differences)) if differences else None
    drawn = None if seed is None else doubt(differences, 1.0 - lowest, seed, confidence=settings.confidence)
    return Statistics(
        rounds={number: list(plays.values()) for number, plays in plain.items() if plays},
        plays=len(returns),
        hinted_plays=len(told),
        pairs=len(differences),
        win=fmean(returns) if returns else 0.0,
        win_low=low,
        win_high=high,
        hinted=fmean(told) if told else None,
        regret=fmean(differences) if differences else None,
        noise_floor=floor,
        doubt=drawn,
    )


def _outcomes(design: Design, arm: Arm) -> dict[int, dict[int, float]]:
    """Return the returns of the finished plays of an arm, by round and index, in order."""
    return {
        number: {
            index: play.returned
            for index, play in enumerate(plays.arm(arm))
            if play.status is PlayStatus.DONE
        }
        for number, plays in sorted(design.rounds.items())
    }


def wilson(returns: Sequence[float], lowest: float = 0.0) -> tuple[float, float]:
    """Return the Wilson interval (95 %) of a mean of values in [lowest, 1].

    For values that are not all 0 or 1 it is conservative: no variable on [0, 1] with mean p varies more than
    a coin with probability p. The range is a declared one, so a single return moves the interval as little as
    the mean. The mean of values that break the declaration is inside all the same. Without values the
    interval is the whole range.
    """
    if not returns:
        return lowest, 1.0
    width, mean = 1.0 - lowest, fmean(returns)
    share = min(1.0, max(0.0, (mean - lowest) / width))
    low, high = interval(share * len(returns), len(returns))
    return min(mean, lowest + width * low), max(mean, lowest + width * high)


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
    """Return ``means`` drawn towards 0 by the share of their size that is noise (empirical Bayes).

    True regrets are taken as normal around 0 with a variance that the means themselves show: their mean
    square less their mean ``variances``, at least 0. A single mean gets the positive-part James-Stein rule.
    """
    if not means:
        return []
    true = max(0.0, fmean(m * m - v for m, v in zip(means, variances, strict=True)))
    return [m * (true / (true + v) if true > 0 else 0.0) for m, v in zip(means, variances, strict=True)]


# --- of one design ------------------------------------------------------------------------------------


def plays_of(design: Design, arm: Arm) -> list[Play]:
    """Return the plays of one arm, of all rounds so far."""
    return [play for plays in design.rounds.values() for play in plays.arm(arm)]


def evidence(
    settings: RewardConfig, designs: Sequence[Design], found: Sequence[Statistics]
) -> list[Evidence]:
    """Return the evidence that the rewards of designs are computed from.

    ``reward.regret_estimate`` selects the part of each measured regret that is paid.
    """
    known = [(one.regret, one.doubt) for one in found if one.regret is not None and one.doubt is not None]
    match settings.regret_estimate:
        case "mean":
            paid = [regret for regret, _ in known]
        case "lower":
            paid = [doubt.lower for _, doubt in known]
        case _:
            paid = shrink([regret for regret, _ in known], [doubt.variance for _, doubt in known])
    estimates = iter(paid)
    return [
        Evidence(
            skill=design.skill,
            rounds=one.rounds,
            hinted=one.hinted,
            regret=None if one.regret is None else next(estimates),
            broken=broken(settings, design, one),
            measured=one.regret,
            pairs=one.pairs,
            noise_floor=one.noise_floor,
            turns=turns(design),
        )
        for design, one in zip(designs, found, strict=True)
    ]


def turns(design: Design) -> float | None:
    """Return the mean length of finished plain plays, in turns."""
    lengths = [play.turns for play in plays_of(design, "plain") if play.status is PlayStatus.DONE]
    return fmean(lengths) if lengths else None


def broken(settings: RewardConfig, design: Design, found: Statistics) -> bool:
    """Return whether a design earns the floor: flagged, degenerate, mostly crashing, or leaking."""
    crashes = sum(play.env_failed for play in plays_of(design, "plain"))
    crashing = found.plays > 0 and crashes > BROKEN_SHARE * found.plays
    if settings.reference_parity:
        return design.degenerate or crashing
    leak = settings.hint_leak == "floor" and hint_leaks(plays_of(design, "hinted"))
    return design.degenerate or crashing or bool(design.flag) or leak


def hint_leaks(hinted: Sequence[Play]) -> bool:
    """Return whether an action that the hint names won nearly all of at least two hinted plays at once."""
    done = [play for play in hinted if play.status is PlayStatus.DONE]
    if len(done) < _FEWEST:
        return False
    least = _LEAK_SHARE * len(done)
    return sum(play.returned for play in done) >= least and sum(play.leaked for play in done) >= least
