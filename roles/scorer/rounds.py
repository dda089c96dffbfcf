"""Closes rounds and windows, cuts the last batch of a run, and reports on designs and rounds. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from bus.messages import (
    EnvironmentScored,
    EnvironmentStanding,
    EnvironmentState,
    RoundClosed,
    RoundSummary,
)
from engine.config import Config, RewardConfig
from roles.scorer.credit import PlayGroup, RoundCredit, SettledDesign, grade, settle
from roles.scorer.rewards import Reward, plateau
from roles.scorer.state import (
    ARMS,
    Cohort,
    Command,
    CurriculumState,
    Design,
    HeldCredit,
    MarkFlushed,
    Play,
    PlayStatus,
    Publish,
)
from roles.scorer.window import Statistics, broken, hint_leaks, measure, plays_of, turns


def close_round(
    config: Config, state: CurriculumState, round_: int, *, last: bool, reward: Reward
) -> list[Command]:
    """Close a round, and the windows that end with it: all of them in the ``last`` round of a segment."""
    plays = grade(config, round_, _groups(state, round_))
    opening = [cohort for cohort in state.cohorts.values() if cohort.opens == round_]
    played = list(state.designs.values())
    ending = [cohort for cohort in state.cohorts.values() if cohort.last <= round_ or last]
    scores = _close_windows(config, state, ending, round_, reward)
    due = [item for item in state.held if item.due <= round_]
    going_on = [
        EnvironmentStanding(**_standing(config.reward, design, measure(config.reward, design)))
        for design in state.designs.values()
        if round_ in design.rounds
    ]
    failures = state.tallies.pop(round_).failures
    summary = summarise(config.reward, round_, failures, plays.graded, played, opening, scores, going_on)
    state.closed = round_
    closed = _close(state, round_, plays, due)
    return [Publish(message) for message in (*scores, closed, summary)]


def flush(config: Config, state: CurriculumState, *, reward: Reward) -> list[Command]:
    """Cut the last batch of a segment from everything held, due or not, and begin the next segment."""
    round_ = state.closed + 1
    total = (state.flushed[-1] if state.flushed else 0) + round_ - state.first
    scores = _close_windows(config, state, list(state.cohorts.values()), state.closed, reward)
    state.flushed.append(total)
    closed = _close(state, round_, RoundCredit(), list(state.held), final=True)
    state.admitted = state.closed = round_
    state.first, state.first_cohort = round_ + 1, state.next_cohort
    return [*map(Publish, scores), MarkFlushed(tuple(state.flushed)), Publish(closed)]


def _groups(state: CurriculumState, round_: int) -> list[PlayGroup]:
    return [
        PlayGroup(design, arm, plays.arm(arm))
        for design in state.designs.values()
        if (plays := design.rounds.get(round_))
        for arm in ARMS
    ]


def _close_windows(
    config: Config, state: CurriculumState, cohorts: Iterable[Cohort], round_: int, reward: Reward
) -> list[EnvironmentScored]:
    """Close windows: their designs have their credit, the plays are forgotten."""
    scores: list[EnvironmentScored] = []
    for cohort in cohorts:
        designs = [state.designs.pop(name) for name in cohort.designs]
        ready = [design for design in designs if design.status == "ready"]
        settled, held = settle(config, state.tracker, cohort, ready, reward)
        state.held += held
        del state.cohorts[cohort.number]
        scores += [scored(config.reward, one, round_) for one in settled]
    return scores


def _close(
    state: CurriculumState,
    round_: int,
    plays: RoundCredit,
    due: list[HeldCredit],
    *,
    final: bool = False,
) -> RoundClosed:
    """Return the message that credits a round's plays and the designs that are ``due``, which are done."""
    state.held = [item for item in state.held if item not in due]
    return RoundClosed(
        round=round_,
        plays=plays.plays,
        designs=len(due),
        credits=(*plays.credits, *(item.credit for item in due if item.credit)),
        settled=min([*state.cohorts, *(item.cohort for item in state.held)], default=state.next_cohort),
        zero_variance_groups=plays.flat,
        groups=plays.groups,
        final=final,
        play_tokens=plays.tokens,
    )


_BINS = 10


def scored(settings: RewardConfig, settled: SettledDesign, round_: int) -> EnvironmentScored:
    """Return the score of a design whose window closed in ``round_``."""
    design, found, proof, credit = settled
    versions = versions_of(design)
    return EnvironmentScored(
        **_standing(settings, design, found),
        cohort=design.cohort,
        skill=design.skill,
        document=design.document,
        round=round_,
        regret_low=found.doubt.low if found.doubt else None,
        regret_high=found.doubt.high if found.doubt else None,
        plateau=plateau(found.win, settings.low, settings.high, settings.ramp) if found.plays else 0.0,
        reward=credit.reward if credit else 0.0,
        advantage=credit.advantage if credit else 0.0,
        difficulty=design.difficulty,
        family=design.family,
        asked=len(plays_of(design, "plain")),
        pairs=found.pairs,
        pairs_apart=versions.apart,
        plain_versions=versions.plain,
        hinted_versions=versions.hinted,
        regret_paid=proof.regret,
    )


def _standing(settings: RewardConfig, design: Design, found: Statistics) -> dict[str, Any]:
    """Return the results of a design that a standing and a score have in common."""
    return {
        "design": design.design,
        "environment": design.environment,
        "state": _state(settings, found, broken(settings, design, found)),
        "plays": found.plays,
        "win": found.win,
        "win_low": found.win_low,
        "win_high": found.win_high,
        "hinted_plays": found.hinted_plays,
        "hinted": found.hinted,
        "regret": found.regret,
        "turns": turns(design),
        "noise_floor": found.noise_floor,
        "leak": hint_leaks(plays_of(design, "hinted")),
    }


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
    settings: RewardConfig,
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
    in_band = [settings.low <= win <= settings.high for win in wins]
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
