"""The designer's reward (architecture section 5; reference spec 5.2-5.8). Pure.

Two sets of rules. ``CORRECTED`` is what runs use: no play means no reward, a program that is degenerate or
breaks in play earns a floor, a missing hint earns no regret credit. ``REFERENCE`` reproduces the public
implementation number for number, for comparison (``reward.reference_parity``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean, pvariance

import msgspec
import numpy as np

from engine.config import RewardConfig

BROKEN_SHARE = 0.5
_HANG_REWARD = -0.5


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward may look at. ``rounds`` maps round -> plain returns in [-1, 1].

    ``hinted`` is the mean hinted return; ``regret`` the estimate that ``reward.regret_estimate`` asks for and
    ``measured`` the mean over ``pairs``, with ``noise_floor``; None without a hint. ``turns`` is the mean
    length of a plain play. ``broken`` marks a degenerate program or one that itself ended most of its plays.
    """

    skill: str
    rounds: Mapping[int, Sequence[float]]
    hinted: float | None = None
    regret: float | None = None
    broken: bool = False
    measured: float | None = None
    pairs: int = 0
    noise_floor: float | None = None
    turns: float | None = None

    @property
    def returns(self) -> list[float]:
        """All plain returns in order of rounds."""
        return [value for number in sorted(self.rounds) for value in self.rounds[number]]


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Switches of the formulas that the recipe table does not name.

    ``slope``: micro_lp is a weighted regression instead of late half minus early half. ``signed``: it may
    be negative inside ``blend``. ``variance_bonus``: learning_potential likes games that are fair coins.
    ``update_first``: the slow mean has seen the window before it serves as the window's baseline.
    """

    reference: bool = False
    regret_floor: bool = True
    slope: bool = True
    signed: bool = True
    variance_bonus: bool = False
    update_first: bool = False


CORRECTED = Rules()
REFERENCE = Rules(reference=True, update_first=True)

Own = Callable[[Evidence, RewardConfig], float | None]
"""A reward of your own: the value of one design before centring, None to leave it untrained."""


class Tracker(msgspec.Struct, kw_only=True):
    """A fast and a slow moving average of returns for every skill (reference spec 5.2)."""

    fast: dict[str, float] = {}
    slow: dict[str, float] = {}

    def update(self, skill: str, value: float, *, fast: float, slow: float) -> None:
        """Move both means of ``skill`` towards ``value``; ``fast`` and ``slow`` weigh the new value."""
        for means, weight in ((self.fast, fast), (self.slow, slow)):
            means[skill] = (1 - weight) * means[skill] + weight * value if skill in means else value

    def observe(self, evidence: Sequence[Evidence], settings: RewardConfig, rules: Rules = CORRECTED) -> None:
        """Take in a window: the mean return of every skill that was played in it.

        The recipe's ``fast_decay`` is always the weight of the new value. ``slow_decay`` is that too in the
        reference, which makes its slow mean almost memoryless; corrected, it is the weight of the old one.
        """
        slow = settings.slow_decay if rules.reference else 1 - settings.slow_decay
        for skill, mean in skill_means(evidence).items():
            self.update(skill, mean, fast=settings.fast_decay, slow=slow)

    def potential(self) -> float:
        """Return the mean over skills of |fast - slow|, a gauge of how fast returns move."""
        return fmean(abs(self.fast[s] - self.slow[s]) for s in self.slow) if self.slow else 0.0


def skill_means(evidence: Sequence[Evidence]) -> dict[str, float]:
    """Return the mean of all plain returns of every skill that has any."""
    pooled: dict[str, list[float]] = {}
    for item in evidence:
        pooled.setdefault(item.skill, []).extend(item.returns)
    return {skill: fmean(values) for skill, values in pooled.items() if values}


def raw_rewards(
    evidence: Sequence[Evidence],
    settings: RewardConfig,
    tracker: Tracker,
    rules: Rules = CORRECTED,
    own: Own | None = None,
) -> list[float | None]:
    """Return the reward of every design before centring, None where it has none.

    Feeds the window to ``tracker``. None means "not trained, not part of a mean": a design that was never
    played (corrected rules), or one whose blend came out negative (reference rules). ``own`` takes the place
    of the built-in formulas for what was played and is not broken.
    """
    baseline = skill_means(evidence) | tracker.slow
    if rules.update_first:
        tracker.observe(evidence, settings, rules)
        baseline = dict(tracker.slow)
    elif rules.reference:
        baseline = dict(tracker.slow)
    if own is not None:
        rewards = [_floored(item, settings, partial(own, item, settings)) for item in evidence]
    else:
        single = _reference if rules.reference else _corrected
        rewards = [single(item, settings, baseline.get(item.skill, 0.0), rules) for item in evidence]
    if not rules.update_first:
        tracker.observe(evidence, settings, rules)
    return rewards


def plateau(win: float, low: float, high: float, ramp: float) -> float:
    """Return 1 on [low, high], falling linearly to 0 over ``ramp`` on both sides."""
    distance = max(low - win, win - high, 0.0)
    if distance == 0.0:
        return 1.0
    return max(0.0, 1.0 - distance / ramp) if ramp > 0 else 0.0


def regret_credit(regret: float | None, scale: float) -> float:
    """Return clip(regret / scale, 0, 1); no credit without a measured regret."""
    return 0.0 if regret is None else min(1.0, max(0.0, regret / scale))


def micro_lp(rounds: Mapping[int, Sequence[float]], *, slope: bool = True) -> float:
    """Return how much the plain return rose over the window; 0 below two rounds with plays.

    ``slope``: least squares of round means on their index, weighted by plays, times (rounds - 1). Otherwise
    the late half's mean minus the early half's (an odd middle round is late). Reference spec 5.5, 5.6.
    """
    played = [rounds[number] for number in sorted(rounds) if rounds[number]]
    count = len(played)
    if count < 2:
        return 0.0
    if slope:
        means = [fmean(values) for values in played]
        weights = [math.sqrt(len(values)) for values in played]
        return float(np.polyfit(np.arange(count), means, 1, w=weights)[0]) * (count - 1)
    early = [value for values in played[: count // 2] for value in values]
    late = [value for values in played[count // 2 :] for value in values]
    return fmean(late) - fmean(early)


def frontier(win: float) -> float:
    """Return the squared distance from an even chance."""
    return (win - 0.5) ** 2


def _corrected(item: Evidence, settings: RewardConfig, baseline: float, rules: Rules) -> float | None:
    return _floored(item, settings, lambda: _valid(item, fmean(item.returns), settings, baseline, rules))


def _floored(item: Evidence, settings: RewardConfig, formula: Callable[[], float | None]) -> float | None:
    """A broken design earns the floor, one that was never played nothing, and none less than the floor."""
    if item.broken:
        return settings.degenerate_reward
    value = formula() if item.returns else None
    return None if value is None else max(settings.degenerate_reward, value)


def _valid(item: Evidence, win: float, settings: RewardConfig, baseline: float, rules: Rules) -> float:
    in_band = plateau(win, settings.low, settings.high, settings.ramp)
    progress = micro_lp(item.rounds, slope=rules.slope)
    distance = frontier(win) / settings.frontier_scale
    match settings.variant:
        case "regret":
            return max(0.0, item.regret or 0.0)
        case "solve_rate":
            return in_band
        case "learning_potential":
            return abs(win - baseline)
        case "micro_lp":
            return max(0.0, progress)
        case "frontier":
            return max(0.0, 1.0 - distance)
        case _:
            return (
                settings.plateau_weight * in_band
                + settings.regret_weight * regret_credit(item.regret, settings.regret_scale)
                + settings.micro_lp_weight * min(1.0, max(-1.0, progress / settings.micro_lp_scale))
                - settings.frontier_weight * distance
            )


def _reference(item: Evidence, settings: RewardConfig, baseline: float, rules: Rules) -> float | None:
    """The public implementation's delayed reward with its edge cases (reference spec 5.3-5.8)."""
    returns = item.returns
    win = fmean(returns) if returns else 0.0
    hinted = item.hinted or 0.0
    match settings.variant:
        case "regret":
            return _HANG_REWARD if item.broken else max(0.0, hinted - win)
        case "micro_lp":
            return max(0.0, micro_lp(item.rounds, slope=False))
        case "learning_potential":
            if not returns:
                return 0.0
            bonus = rules.variance_bonus and len(returns) > 1
            extra = math.exp(-((pvariance(returns) - 0.25) ** 2) / 0.02) if bonus else 0.0
            return abs(win - baseline) + extra
        case variant:
            value = _reference_blend(item, win, hinted, settings, rules, variant == "solve_rate")
            return None if value < 0 else value


def _reference_blend(
    item: Evidence, win: float, hinted: float, settings: RewardConfig, rules: Rules, solve_rate: bool
) -> float:
    in_band = plateau(win, settings.low, settings.high, settings.ramp)
    plateau_weight, regret_weight = settings.plateau_weight, settings.regret_weight
    if solve_rate:
        plateau_weight, regret_weight = 1.0, 0.0
    played = [number for number in sorted(item.rounds) if item.rounds[number]]
    regret = (hinted - (fmean(item.rounds[played[0]]) if played else 0.0)) / settings.regret_scale
    if rules.regret_floor:
        regret = min(1.0, max(0.0, regret))
    progress = micro_lp(item.rounds, slope=rules.slope)
    if not rules.signed:
        progress = max(0.0, progress)
    return (
        regret_weight * regret
        + settings.micro_lp_weight * progress / settings.micro_lp_scale
        + plateau_weight * in_band
        - settings.frontier_weight * frontier(win) / settings.frontier_scale
    )
