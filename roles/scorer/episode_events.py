"""Taking in the outcomes of plays; the last one of a group closes it."""

from __future__ import annotations

import math

from bus.messages import EpisodeFailed, EpisodeFinished
from engine.config import Config
from roles.scorer import work
from roles.scorer.grading import Group, grade
from roles.scorer.leaks import told
from roles.scorer.state import Command, Play, Publish, State, Status

Outcome = EpisodeFinished | EpisodeFailed


def finished(config: Config, state: State, sequence: int, message: EpisodeFinished) -> list[Command]:
    """A play has a return; its segments are at ``sequence`` of EVENT."""
    play = _first(config, state, message)
    if play is None:
        return []
    if not math.isfinite(message.returned):
        return _lose(config, state, play, message, "quarantined")
    play.status, play.sequence = Status.DONE, sequence
    play.returned = min(1.0, max(-1.0, message.returned))
    play.versions = work.versions(message)
    hint = state.designs[message.design].hint if message.arm == "hinted" else None
    play.told = play.returned > 0 and told(hint, message.transcript)
    play.truncated = message.outcome == "truncated"
    play.env_failed = message.failure == "env"
    play.turns = message.turns
    if message.failure:
        _count(state, message.round, message.failure)
    return _ended(config, state, message)


def failed(config: Config, state: State, message: EpisodeFailed) -> list[Command]:
    """A play came to nothing: it is asked for again after faults of the infrastructure, or lost."""
    play = _first(config, state, message)
    if play is None:
        return []
    if message.failure != "infra" or play.attempt >= config.curriculum.reissues:
        return _lose(config, state, play, message, message.failure)
    _count(state, message.round, message.failure)
    play.attempt += 1
    state.reissued += 1
    design = state.designs[message.design]
    return [Publish(work.request(config, design, message.round, message.arm, message.index, play.attempt))]


def _first(config: Config, state: State, message: Outcome) -> Play | None:
    """Return the play that ``message`` is the first outcome of."""
    design = state.designs.get(message.design)
    plays = design.rounds.get(message.round) if design else None
    arm = plays.arm(message.arm) if plays else []
    play = arm[message.index] if 0 <= message.index < len(arm) else None
    if play and play.status is Status.PENDING:
        key = (message.design, message.round, message.arm, message.index)
        if message.episode == work.episode(config, *key, play.attempt):
            return play
    state.late += 1
    return None


def _lose(config: Config, state: State, play: Play, message: Outcome, kind: str) -> list[Command]:
    """A play without an outcome leaves its group, which closes with what it has."""
    _count(state, message.round, kind)
    play.status = Status.LOST
    return _ended(config, state, message)


def _count(state: State, round_: int, kind: str) -> None:
    failures = state.tallies[round_].failures
    failures[kind] = failures.get(kind, 0) + 1


def _ended(config: Config, state: State, message: Outcome) -> list[Command]:
    """One play of a group is over. Groups that are compared with others wait for the end of the round."""
    tally, design = state.tallies[message.round], state.designs[message.design]
    tally.pending -= 1
    plays = design.rounds[message.round].arm(message.arm)
    if config.learner.agent.scope != "group" or any(play.status is Status.PENDING for play in plays):
        return []
    return [*grade(config, message.round, [Group(design, message.arm, plays)], tally)]
