"""Reports on designs and rounds: scores, standings, summaries. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from bus.messages import EnvironmentScored, EnvironmentStanding, EnvironmentState, RoundSummary
from engine.config import Config, RewardConfig
from roles.scorer.rewards import Evidence, plateau
from roles.scorer.state import ARMS, Cohort, Design, DesignCredit, Play, PlayStatus
from roles.scorer.window import Statistics, broken, hint_leaks, measured, plays_of, turns

_BINS = 10


def scored(
    config: Config,
    design: Design,
    found: Statistics,
    proof: Evidence,
    credit: DesignCredit | None,
    round_: int,
) -> EnvironmentScored:
    """Return the score of a design whose window closed in ``round_``; ``credit`` None: it has none."""
    settings, versions = config.reward, versions_of(design)
    return EnvironmentScored(
        design=design.design,
        cohort=design.cohort,
        environment=design.environment,
        skill=design.skill,
        document=design.document,
        round=round_,
        plays=found.plays,
        hinted_plays=found.hinted_plays,
        win=found.win,
        win_low=found.win_low,
        win_high=found.win_high,
        hinted=found.hinted,
        regret=found.regret,
        regret_low=found.regret_low,
        regret_high=found.regret_high,
        plateau=plateau(found.win, settings.low, settings.high, settings.ramp) if found.plays else 0.0,
        reward=credit.reward if credit else 0.0,
        advantage=credit.advantage if credit else 0.0,
        state=_state(settings, found, proof.broken),
        difficulty=design.difficulty,
        family=design.family,
        noise_floor=found.noise_floor,
        turns=proof.turns,
        asked=len(plays_of(design, "plain")),
        pairs=found.pairs,
        pairs_apart=versions.apart,
        plain_versions=versions.plain,
        hinted_versions=versions.hinted,
        regret_paid=proof.regret,
        leak=hint_leaks(plays_of(design, "hinted")),
    )


def standing(settings: RewardConfig, run_seed: int, design: Design) -> EnvironmentStanding:
    """Return how a design of an open window has done so far."""
    found = measured(settings, run_seed, design)
    return EnvironmentStanding(
        design=design.design,
        environment=design.environment,
        state=_state(settings, found, broken(settings, design, found)),
        plays=found.plays,
        win=found.win,
        win_low=found.win_low,
        win_high=found.win_high,
        hinted_plays=found.hinted_plays,
        hinted=found.hinted,
        regret=found.regret,
        turns=turns(design),
        noise_floor=found.noise_floor,
        leak=hint_leaks(plays_of(design, "hinted")),
    )


def _state(settings: RewardConfig, found: Statistics, broken: bool) -> EnvironmentState:
    """Mastered and intractable are where the plateau has fallen to zero; fresh was never played."""
    if broken:
        return "degenerate"
    if found.plays == 0:
        return "fresh"
    if found.win >= settings.high + settings.ramp:
        return "mastered"
    return "intractable" if found.win <= settings.low - settings.ramp else "frontier"


class ArmVersions(NamedTuple):
    """Policy versions (oldest, newest) of each arm, and the number of pairs without a common one."""

    plain: tuple[int, int] | None
    hinted: tuple[int, int] | None
    apart: int


def versions_of(design: Design) -> ArmVersions:
    """Return the versions of the arms. Packed versions compare by learner, then by step."""
    arms = [
        [play.versions for play in plays_of(design, arm) if play.status is PlayStatus.DONE and play.versions]
        for arm in ARMS
    ]
    plain, hinted = (
        (min(low for low, _ in spans), max(high for _, high in spans)) if spans else None for spans in arms
    )
    pairs = [
        (one.versions, other.versions)
        for plays in design.rounds.values()
        for one, other in zip(plays.plain, plays.hinted, strict=False)
        if one.status is other.status is PlayStatus.DONE
    ]
    apart = sum(a[1] < b[0] or b[1] < a[0] for a, b in pairs if a and b)
    return ArmVersions(plain, hinted, apart)


def summarise(
    config: Config,
    round_: int,
    failures: dict[str, int],
    graded: int,
    designs: Iterable[Design],
    opening: Sequence[Cohort],
    scored: Sequence[EnvironmentScored],
    going_on: Sequence[EnvironmentStanding] = (),
) -> RoundSummary:
    """Return the summary of a round, in which ``graded`` plain plays had an advantage.

    ``opening`` cohorts had their first round now; windows that stay open are ``going_on``.
    """
    active = [(design, design.rounds[round_]) for design in designs if round_ in design.rounds]
    plain = [_returns(plays.plain) for _, plays in active]
    wins = [fmean(values) for values in plain if values]
    every = [value for values in plain for value in values]
    hinted = [value for _, plays in active for value in _returns(plays.hinted)]
    levels = [design.difficulty for design, _ in active if design.difficulty is not None]
    arms = [plays.arm(arm) for _, plays in active for arm in ARMS]
    missing = [sum(play.status is PlayStatus.LOST for play in arm) for arm in arms]
    histogram = [0] * _BINS
    for win in wins:
        histogram[min(_BINS - 1, max(0, int(win * _BINS)))] += 1
    failures = dict(failures)
    for cohort in opening:
        for kind, count in cohort.failed.items():
            failures[f"design_{kind}"] = failures.get(f"design_{kind}", 0) + count
    rewards = [item.reward for item in scored if item.plays]
    in_band = [config.reward.low <= win <= config.reward.high for win in wins]
    return RoundSummary(
        round=round_,
        environments=len(active),
        accepted=sum(len(cohort.designs) - sum(cohort.failed.values()) for cohort in opening),
        rejected=sum(cohort.refused for cohort in opening),
        plain=_mean(every),
        hinted=_mean(hinted),
        in_band=_mean(in_band),
        gradient_share=graded / len(every) if every else None,
        difficulty=_mean(levels),
        failures=failures,
        win_histogram=tuple(histogram),
        reward=_mean(rewards),
        standings=tuple(going_on),
        lost=sum(missing),
        partial=sum(map(bool, missing)),
    )


def _returns(plays: Sequence[Play]) -> list[float]:
    return [play.returned for play in plays if play.status is PlayStatus.DONE]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
