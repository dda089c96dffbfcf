"""Rewards that are not ours: found by name in the entry-point group ``spade.rewards``, or by their module.

A reward is a function ``(evidence: Evidence, settings: Reward) -> float | None`` of
``roles.scorer.rewards.Evidence`` and ``engine.config.Reward``. It must be pure: a scorer that starts again
computes everything once more and must come to the same.
"""

from __future__ import annotations

import importlib
import inspect
import math
from importlib.metadata import entry_points

from engine.config import RewardConfig
from engine.errors import ConfigError, SpadeError
from roles.scorer.rewards import Evidence, Own

GROUP = "spade.rewards"
BUILT_IN = ("blend", "regret", "solve_rate", "learning_potential", "micro_lp", "frontier")
_TRIAL = Evidence(
    skill="trial", rounds={0: [0.0, 1.0], 1: [1.0, 1.0]}, hinted=1.0, regret=0.5, measured=0.5, pairs=2
)


def load(settings: RewardConfig) -> Own | None:
    """Return the reward that ``settings.variant`` names, None for a built-in one.

    It is called once, on made-up evidence. Raises ConfigError when it cannot be found or does not fit.
    """
    name = settings.variant
    if name in BUILT_IN:
        return None
    function = _find(name)
    if not callable(function):
        raise _error(f'reward.variant = "{name}" is a {type(function).__name__}, not a function')
    try:
        inspect.signature(function).bind(_TRIAL, settings)
    except (TypeError, ValueError) as error:
        raise _error(f'reward.variant = "{name}" does not take (evidence, settings): {error}') from error
    try:
        value = function(_TRIAL, settings)
    except Exception as error:
        raise _error(f'reward.variant = "{name}" raised {error!r} on made-up evidence') from error
    if not _fits(value):
        raise _error(f'reward.variant = "{name}" returned {value!r} on made-up evidence')
    return _Checked(name, function)


class _Checked:
    """A reward whose values are looked at each time."""

    def __init__(self, name: str, function: Own) -> None:
        self._name, self._function = name, function

    def __call__(self, evidence: Evidence, settings: RewardConfig) -> float | None:
        try:
            value = self._function(evidence, settings)
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


def _find(name: str) -> object:
    for point in entry_points(group=GROUP, name=name):
        try:
            return point.load()
        except (ImportError, AttributeError) as error:
            raise _error(f'reward.variant = "{name}", registered as {point.value}: {error}') from error
    module, colon, attribute = name.partition(":")
    if not colon:
        known = ", ".join((*BUILT_IN, *sorted(point.name for point in entry_points(group=GROUP))))
        raise _error(f'reward.variant = "{name}" is none of {known}')
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise _error(f'reward.variant = "{name}" cannot be loaded: {error}') from error
    return found


def _fits(value: object) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (number and math.isfinite(value))  # type: ignore[arg-type]


def _error(what: str) -> ConfigError:
    return ConfigError(
        what,
        where="reward",
        remedy="It must be a pure function (evidence, settings) that returns a finite number or None; "
        "docs/credit.md has one.",
    )
