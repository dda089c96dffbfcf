"""The designer's reward: the built-in formulas, the registry, and the rewards of a cohort. Pure.

A reward is a function ``(evidence, settings) -> float | None``: the value of one design before centring,
None to leave it untrained. ``BUILT_IN`` and the entry-point group ``spade.rewards`` name them, and
``reward.variant`` may be a "package.module:function" too. ``settings`` is the recipe's ``[reward]`` table;
where the function's second parameter is annotated with a Struct of its own, it is ``[plugins.NAME]`` decoded
as that. A reward must be pure: a scorer that starts again computes all of them once more.
"""

from __future__ import annotations

import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from statistics import fmean
from typing import Any

import msgspec
import numpy as np

from engine import registry
from engine.config import Config, RewardConfig
from engine.errors import ConfigError, SpadeError

BROKEN_SHARE = 0.5
"""A program that ends more than this share of its own plays by a fault is broken."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a reward may use. ``rounds`` maps round -> plain returns in [-1, 1].

    ``hinted`` is the mean hinted return; ``regret`` the estimate that ``reward.regret_estimate`` asks for and
    ``measured`` the mean over ``pairs``, with ``noise_floor``; None without a pair. ``turns`` is the mean
    length of a plain play. ``broken`` marks a degenerate program or one that itself ended most of its plays.
    ``baseline`` is the slow moving mean of the skill's returns before this window.
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
    baseline: float = 0.0

    @property
    def returns(self) -> list[float]:
        """All plain returns in order of rounds."""
        return [value for number in sorted(self.rounds) for value in self.rounds[number]]


Formula = Callable[[Evidence, Any], float | None]


# --- built-in formulas --------------------------------------------------------------------------------


def blend(evidence: Evidence, settings: RewardConfig) -> float:
    """Return the weighted sum of plateau, regret credit and progress, less the distance to the frontier."""
    win = fmean(evidence.returns)
    progress = micro_lp(evidence.rounds) / settings.micro_lp_scale
    return (
        settings.plateau_weight * plateau(win, settings.low, settings.high, settings.ramp)
        + settings.regret_weight * regret_credit(evidence.regret, settings.regret_scale)
        + settings.micro_lp_weight * min(1.0, max(-1.0, progress))
        - settings.frontier_weight * (win - 0.5) ** 2 / settings.frontier_scale
    )


def _regret(evidence: Evidence, settings: RewardConfig) -> float:
    return max(0.0, evidence.regret or 0.0)


def _solve_rate(evidence: Evidence, settings: RewardConfig) -> float:
    return plateau(fmean(evidence.returns), settings.low, settings.high, settings.ramp)


def _learning_potential(evidence: Evidence, settings: RewardConfig) -> float:
    return abs(fmean(evidence.returns) - evidence.baseline)


def _progress(evidence: Evidence, settings: RewardConfig) -> float:
    return max(0.0, micro_lp(evidence.rounds))


def _frontier(evidence: Evidence, settings: RewardConfig) -> float:
    return max(0.0, 1.0 - (fmean(evidence.returns) - 0.5) ** 2 / settings.frontier_scale)


BUILT_IN: Mapping[str, Formula] = {
    "blend": blend,
    "regret": _regret,
    "solve_rate": _solve_rate,
    "learning_potential": _learning_potential,
    "micro_lp": _progress,
    "frontier": _frontier,
}


def plateau(win: float, low: float, high: float, ramp: float) -> float:
    """Return 1 on [low, high], falling linearly to 0 over ``ramp`` on both sides."""
    distance = max(low - win, win - high, 0.0)
    if distance == 0.0:
        return 1.0
    return max(0.0, 1.0 - distance / ramp) if ramp > 0 else 0.0


def regret_credit(regret: float | None, scale: float) -> float:
    """Return clip(regret / scale, 0, 1); no credit without a measured regret."""
    return 0.0 if regret is None else min(1.0, max(0.0, regret / scale))


def micro_lp(rounds: Mapping[int, Sequence[float]]) -> float:
    """Return how much the plain return rose over the window; 0 below two rounds with plays.

    Least squares of round means on their index, weighted by plays, times (rounds - 1). Reference spec 5.5.
    """
    played = [rounds[number] for number in sorted(rounds) if rounds[number]]
    if len(played) < 2:
        return 0.0
    means = [fmean(values) for values in played]
    weights = [math.sqrt(len(values)) for values in played]
    return float(np.polyfit(np.arange(len(played)), means, 1, w=weights)[0]) * (len(played) - 1)


# --- a cohort -----------------------------------------------------------------------------------------


class Tracker(msgspec.Struct, kw_only=True):
    """A fast and a slow moving average of returns for every skill (reference spec 5.2)."""

    fast: dict[str, float] = {}
    slow: dict[str, float] = {}

    def update(self, skill: str, value: float, *, fast: float, slow: float) -> None:
        """Move both means of ``skill`` towards ``value``; ``fast`` and ``slow`` weigh the new value."""
        for means, weight in ((self.fast, fast), (self.slow, slow)):
            means[skill] = (1 - weight) * means[skill] + weight * value if skill in means else value

    def observe(self, evidence: Sequence[Evidence], settings: RewardConfig) -> None:
        """Take in a window: the mean return of every skill that was played in it.

        The recipe's ``fast_decay`` weighs the new value, ``slow_decay`` the old one. In the reference both
        weigh the new value, which makes its slow mean almost memoryless.
        """
        slow = settings.slow_decay if settings.reference_parity else 1 - settings.slow_decay
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


class Reward:
    """A loaded reward: checks each value that its formula returns."""

    def __init__(self, name: str, formula: Formula, settings: Any) -> None:
        self._name, self._formula, self._settings = name, formula, settings

    def __call__(self, evidence: Evidence) -> float | None:
        """Return the value of a design that was played. Raises SpadeError when it is not usable."""
        try:
            value = self._formula(evidence, self._settings)
        except Exception as error:
            raise self._failure(f"raised {error!r}", evidence) from error
        if not _fits(value):
            raise self._failure(f"returned {value!r}", evidence)
        return None if value is None else float(value)

    def _failure(self, what: str, evidence: Evidence) -> SpadeError:
        return SpadeError(
            f'reward.variant = "{self._name}" {what} for {evidence}',
            where="scorer",
            remedy="Mend it and run the same command again: nothing is lost. It must return a finite number, "
            "or None.",
        )


def raw_rewards(
    evidence: Sequence[Evidence], settings: RewardConfig, tracker: Tracker, reward: Reward
) -> list[float | None]:
    """Return the reward of every design of a cohort before centring, and feed the cohort to ``tracker``.

    A broken design earns the floor, one that was never played has no reward (None: not trained, in no mean),
    and none earns less than the floor.
    """
    baseline = skill_means(evidence) | tracker.slow
    rewards: list[float | None] = []
    for item in evidence:
        if item.broken:
            rewards.append(settings.degenerate_reward)
            continue
        known = msgspec.structs.replace(item, baseline=baseline.get(item.skill, 0.0))
        value = reward(known) if item.returns else None
        rewards.append(None if value is None else max(settings.degenerate_reward, value))
    tracker.observe(evidence, settings)
    return rewards


# --- the registry -------------------------------------------------------------------------------------

_TRIAL = Evidence(
    skill="trial", rounds={0: [0.0, 1.0], 1: [1.0, 1.0]}, hinted=1.0, regret=0.5, measured=0.5, pairs=2
)


def names() -> list[str]:
    """Return the names of all known rewards: the built-in ones, then those of installed packages."""
    return [*BUILT_IN, *registry.registered(registry.REWARDS)]


def load(config: Config) -> Reward:
    """Return the reward that ``reward.variant`` names, after one call on made-up evidence.

    Raises ConfigError when it cannot be found or does not fit.
    """
    name = config.reward.variant
    label = f'reward.variant = "{name}"'
    formula = BUILT_IN.get(name) or _find(name, label)
    if not callable(formula):
        raise _error(f"{label} is a {type(formula).__name__}, not a function")
    settings = _settings(config, name, formula)
    try:
        inspect.signature(formula).bind(_TRIAL, settings)
    except (TypeError, ValueError) as error:
        raise _error(f"{label} does not take (evidence, settings): {error}") from error
    try:
        value = formula(_TRIAL, settings)
    except Exception as error:
        raise _error(f"{label} raised {error!r} on made-up evidence") from error
    if not _fits(value):
        raise _error(f"{label} returned {value!r} on made-up evidence")
    return Reward(name, formula, settings)


def check(config: Config) -> None:
    """Load the reward and check that the recipe measures what it pays for. Raises ConfigError."""
    load(config)
    reward, plan = config.reward, config.curriculum
    blended = reward.variant == "blend"
    weights = reward.plateau_weight + reward.regret_weight + reward.micro_lp_weight + reward.frontier_weight
    if blended and abs(weights - 1) > 1e-6:
        raise _contradiction(
            "reward.plateau_weight", f"the four weights of a blend must add up to 1, not {weights:g}"
        )
    if plan.hinted_plays < 1 and (reward.variant == "regret" or (blended and reward.regret_weight > 0)):
        raise _contradiction(
            "curriculum.hinted_plays",
            f'must be at least 1: reward.variant = "{reward.variant}" needs the regret',
        )
    slope = reward.variant == "micro_lp" or (blended and reward.micro_lp_weight > 0)
    if slope and plan.rounds_per_window < 2:
        raise _contradiction(
            "curriculum.rounds_per_window", "must be at least 2: the micro_lp term is a slope over the window"
        )
    if reward.reference_parity and reward.variant not in BUILT_IN:
        raise _contradiction("reward.reference_parity", f"needs a built-in variant: {', '.join(BUILT_IN)}")


def _find(name: str, label: str) -> object:
    if ":" not in name:
        if name not in registry.registered(registry.REWARDS):
            raise _error(f"{label} is none of {', '.join(names())}")
        return registry.load(registry.REWARDS, name, where="reward.variant")
    try:
        return EntryPoint(name, name, registry.REWARDS).load()
    except (ImportError, AttributeError) as error:
        raise _error(
            f"{label} cannot be loaded: {error}; modules are looked for among packages and in PYTHONPATH"
        ) from error


def _settings(config: Config, name: str, formula: Formula) -> Any:
    """Return the table that ``formula`` takes: ``[plugins.NAME]`` where it asks for a Struct of its own."""
    kind = RewardConfig
    try:
        hints = typing.get_type_hints(formula)
        second = list(inspect.signature(formula).parameters)[1]
        kind = hints.get(second, RewardConfig)
    except (TypeError, ValueError, NameError, IndexError):
        pass  # the call on made-up evidence says what is wrong with it
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)) or kind is RewardConfig:
        return config.reward
    return registry.settings(config.plugins, name, kind)


def _fits(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (number and math.isfinite(value))  # type: ignore[arg-type]


def _contradiction(key: str, complaint: str) -> ConfigError:
    return ConfigError(f"{key} {complaint}.", where=key)


def _error(what: str) -> ConfigError:
    return ConfigError(
        what,
        where="reward",
        remedy="It must be a pure function (evidence, settings) that returns a finite number or None; "
        "docs/credit.md has one.",
    )
