"""Takes in outcomes of plays and answers to design tickets."""

from __future__ import annotations

import math

from bus.messages import DesignFailed, DesignRejected, EnvironmentReady, EpisodeFailed, EpisodeFinished
from engine.config import Config
from roles.scorer import scheduling
from roles.scorer.credit import penalises
from roles.scorer.state import Command, CurriculumState, Design, Play, PlayStatus, Publish, RejectedAttempt
from roles.scorer.window import hint_names_action

Outcome = EpisodeFinished | EpisodeFailed


def play_finished(config: Config, state: CurriculumState, message: EpisodeFinished) -> list[Command]:
    """Take in the return of a play; its tokens are in SAMPLE."""
    play = _first(config, state, message)
    if play is None:
        return []
    if not math.isfinite(message.returned):
        return _lose(state, play, message, "quarantined")
    play.status, play.sample = PlayStatus.DONE, message.sample
    play.returned = min(1.0, max(-1.0, message.returned))
    play.versions, play.tokens = message.versions, message.tokens
    hint = state.designs[message.design].hint if message.arm == "hinted" else None
    play.leaked = play.returned > 0 and hint_names_action(hint, message.transcript)
    play.env_failed = message.failure == "env"
    play.turns = message.turns
    if message.failure:
        _count(state, message.round, message.failure)
    state.tallies[message.round].pending -= 1
    return []


def play_failed(config: Config, state: CurriculumState, message: EpisodeFailed) -> list[Command]:
    """A play came to nothing: it is asked for again after faults of the infrastructure, or lost."""
    play = _first(config, state, message)
    if play is None:
        return []
    if message.failure != "infra" or play.attempt >= config.curriculum.reissues:
        return _lose(state, play, message, message.failure)
    _count(state, message.round, message.failure)
    play.attempt += 1
    state.reissued += 1
    design = state.designs[message.design]
    return [
        Publish(scheduling.request(config, design, message.round, message.arm, message.index, play.attempt))
    ]


def _first(config: Config, state: CurriculumState, message: Outcome) -> Play | None:
    """Return the play that ``message`` is the first outcome of."""
    design = state.designs.get(message.design)
    plays = design.rounds.get(message.round) if design else None
    arm = plays.arm(message.arm) if plays else []
    play = arm[message.index] if 0 <= message.index < len(arm) else None
    if play and play.status is PlayStatus.PENDING:
        key = (message.design, message.round, message.arm, message.index)
        if message.episode == scheduling.episode(config, *key, play.attempt):
            return play
    state.late += 1
    return None


def _lose(state: CurriculumState, play: Play, message: Outcome, kind: str) -> list[Command]:
    """A play without an outcome leaves its group, which closes with the others."""
    _count(state, message.round, kind)
    play.status = PlayStatus.LOST
    state.tallies[message.round].pending -= 1
    return []


def _count(state: CurriculumState, round_: int, kind: str) -> None:
    failures = state.tallies[round_].failures
    failures[kind] = failures.get(kind, 0) + 1


_COPIED = ("attempt", "environment", "hint", "document", "sample", "hint_sample", "difficulty", "family")


def environment_ready(config: Config, state: CurriculumState, message: EnvironmentReady) -> list[Command]:
    """An environment can be played."""
    design = _asked(state, message.design)
    if design is None:
        return _late(state)
    for name in _COPIED:
        setattr(design, name, getattr(message, name))
    design.degenerate, design.flag = message.finding.degenerate, message.finding.flag
    design.status = "ready"
    cohort = state.cohorts[design.cohort]
    cohort.asked -= 1
    # A ticket that was answered twice can have refused the attempt that was accepted in the end.
    accepted = (design.design, design.attempt)
    cohort.rejected = [one for one in cohort.rejected if (one.design, one.attempt) != accepted]
    return scheduling.open_rounds(config, state, design)


def design_rejected(config: Config, state: CurriculumState, message: DesignRejected) -> list[Command]:
    """One attempt was refused; the ticket may have more."""
    design = _asked(state, message.design)
    if design is None:
        return _late(state)
    cohort = state.cohorts[design.cohort]
    known = (design.design, message.attempt) in {(one.design, one.attempt) for one in cohort.rejected}
    cohort.refused += not known
    if penalises(config) and not known:
        entry = RejectedAttempt(design.design, message.attempt, design.skill, message.sample)
        cohort.rejected.append(entry)
    return []


def design_failed(config: Config, state: CurriculumState, message: DesignFailed) -> list[Command]:
    """A fault of the infrastructure asks for the ticket again, as long as ``reissues`` lasts."""
    design = _asked(state, message.design)
    if design is None:
        return _late(state)
    if message.failure == "infra":
        if message.issue != design.issue:
            return _late(state)
        if design.issue < config.curriculum.reissues:
            return scheduling.ticket_again(config, state, design)
    cohort = state.cohorts[design.cohort]
    cohort.asked -= 1
    design.status = "failed"
    cohort.failed[message.failure] = cohort.failed.get(message.failure, 0) + 1
    return []


def _asked(state: CurriculumState, name: str) -> Design | None:
    """Return the design if its ticket still waits for an answer; the first answer counts."""
    design = state.designs.get(name)
    return design if design and design.status == "asked" else None


def _late(state: CurriculumState) -> list[Command]:
    state.late += 1
    return []
