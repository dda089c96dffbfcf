"""Rewards as a stranger would write them: found by module path or, in tests, by a made-up entry point."""

from __future__ import annotations

import msgspec

from engine.config import RewardConfig
from roles.scorer.rewards import Evidence

twelve = 12


def half_won(evidence: Evidence, settings: RewardConfig) -> float | None:
    """Pay for being near the middle, nothing for a design whose hint could not be measured."""
    if evidence.measured is None:
        return None
    returns = evidence.returns
    return 1.0 - abs(sum(returns) / len(returns) - 0.5) * settings.frontier_scale


class Near(msgspec.Struct, frozen=True):
    """Settings of :func:`near_target`, the recipe's table ``[plugins.near]``."""

    target: float = 0.5


def near_target(evidence: Evidence, settings: Near) -> float:
    """Pay for a win rate near a target of one's own."""
    returns = evidence.returns
    return 1.0 - abs(sum(returns) / len(returns) - settings.target)


def of_one(evidence: Evidence) -> float:
    return 0.0


def nothing_much(evidence: Evidence, settings: RewardConfig) -> float:
    return float("nan")


def easily_upset(evidence: Evidence, settings: RewardConfig) -> float:
    """It bears the evidence that it is tried with, and nothing that was really played."""
    if evidence.skill == "trial":
        return 0.0
    raise RuntimeError("not like this")


def a_text(evidence: Evidence, settings: RewardConfig) -> float:
    return "much"  # type: ignore[return-value]


def breaks(evidence: Evidence, settings: RewardConfig) -> float:
    return 1 / 0
