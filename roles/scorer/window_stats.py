"""What the plays of a design say about it: statistics of its window, and what a reward may look at. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from bus.messages import Arm
from engine.config import Config, RewardConfig
from roles.scorer import plan
from roles.scorer.leaks import leaks
from roles.scorer.regret import shrink
from roles.scorer.rewards import BROKEN_SHARE, Evidence
from roles.scorer.state import Design, Play, Status
from roles.scorer.window import Statistics, Window, measure


def window_of(design: Design) -> Window:
    """Return the outcomes of a design so far."""

    def returns(plays: Sequence[Play]) -> dict[int, float]:
        return {i: play.returned for i, play in enumerate(plays) if play.status is Status.DONE}

    return Window(
        plain={number: returns(plays.plain) for number, plays in design.rounds.items()},
        hinted={number: returns(plays.hinted) for number, plays in design.rounds.items() if plays.hinted},
    )


def plays_of(design: Design, arm: Arm) -> list[Play]:
    """Return the plays of one arm, of all rounds so far."""
    return [play for plays in design.rounds.values() for play in plays.arm(arm)]


def measured(config: Config, design: Design) -> Statistics:
    """Return the statistics of its window so far, the same on every host."""
    settings = config.reward
    return measure(
        window_of(design),
        plan.seed(config.run.seed, design.design, "bootstrap"),
        lowest=settings.lowest_return,
        confidence=settings.confidence,
    )


def evidence_of(config: Config, design: Design, found: Statistics, estimate: float | None) -> Evidence:
    """Return what a reward may look at; ``estimate`` is the regret that is paid."""
    return Evidence(
        skill=design.skill,
        rounds=window_of(design).by_round,
        hinted=found.hinted,
        regret=estimate,
        broken=broken(config, design, found),
        measured=found.regret,
        pairs=found.pairs,
        noise_floor=found.noise_floor,
        turns=turns(design),
    )


def paid(settings: RewardConfig, found: Sequence[Statistics]) -> list[float | None]:
    """Return what of each measured regret is paid. Without pairs only the plain mean has anything to say."""
    if settings.regret_estimate == "mean":
        return [one.regret for one in found]
    if settings.regret_estimate == "lower":
        return [one.regret_lower for one in found]
    known = [
        (i, one.regret, one.regret_variance)
        for i, one in enumerate(found)
        if one.regret is not None and one.regret_variance is not None
    ]
    result: list[float | None] = [None] * len(found)
    for (i, _, _), value in zip(known, shrink([m for _, m, _ in known], [v for *_, v in known]), strict=True):
        result[i] = value
    return result


def turns(design: Design) -> float | None:
    """Return the mean length of finished plain plays."""
    lengths = [play.turns for play in plays_of(design, "plain") if play.status is Status.DONE]
    return fmean(lengths) if lengths else None


def broken(config: Config, design: Design, found: Statistics) -> bool:
    """Whether a design earns the floor: flagged, degenerate, ending most of its own plays, or leaking."""
    crashes = sum(play.env_failed for play in plays_of(design, "plain"))
    crashing = found.plays > 0 and crashes > BROKEN_SHARE * found.plays
    if config.reward.reference_parity:
        return design.degenerate or crashing
    leak = config.reward.hint_leak == "floor" and leaks(plays_of(design, "hinted"))
    return design.degenerate or crashing or bool(design.flag) or leak
