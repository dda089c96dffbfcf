"""Closes rounds and windows, and cuts the last batch of a run."""

from __future__ import annotations

from collections.abc import Iterable

from bus.messages import Credit, EnvironmentScored, RoundClosed
from engine.config import Config
from roles.scorer.credit import PlayGroup, RoundCredit, grade, settle, worth_sending
from roles.scorer.reports import standing, summarise
from roles.scorer.rewards import Reward
from roles.scorer.state import ARMS, Cohort, Command, CurriculumState, DesignCredit, MarkFlushed, Publish


def close_round(
    config: Config, state: CurriculumState, round_: int, *, last: bool, reward: Reward
) -> list[Command]:
    """Close a round, and the windows that end with it: all of them in the ``last`` round of a segment."""
    plays = grade(config, round_, _groups(state, round_))
    opening = [cohort for cohort in state.cohorts.values() if cohort.opens == round_]
    played = list(state.designs.values())
    ending = [cohort for cohort in state.cohorts.values() if cohort.last <= round_ or last]
    scores = _settle(config, state, ending, round_, reward)
    due = [item for item in state.held if item.due <= round_]
    going_on = [
        standing(config.reward, config.run.seed, design)
        for design in state.designs.values()
        if round_ in design.rounds
    ]
    failures = state.tallies.pop(round_).failures
    summary = summarise(config, round_, failures, plays.graded, played, opening, scores, going_on)
    state.closed = round_
    closed = _close(config, state, round_, plays, due)
    return [Publish(message) for message in (*scores, closed, summary)]


def flush(config: Config, state: CurriculumState, *, reward: Reward) -> list[Command]:
    """Cut the last batch of a segment from everything held, due or not, and begin the next segment."""
    round_ = state.closed + 1
    total = (state.flushed[-1] if state.flushed else 0) + round_ - state.first
    scores = _settle(config, state, list(state.cohorts.values()), state.closed, reward)
    state.flushed.append(total)
    closed = _close(config, state, round_, RoundCredit(), list(state.held), final=True)
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


def _settle(
    config: Config, state: CurriculumState, cohorts: Iterable[Cohort], round_: int, reward: Reward
) -> list[EnvironmentScored]:
    """Close windows: their designs have their credit, the plays are forgotten."""
    scores: list[EnvironmentScored] = []
    for cohort in cohorts:
        designs = [state.designs.pop(name) for name in cohort.designs]
        ready = [design for design in designs if design.status == "ready"]
        scored, held = settle(config, state.tracker, cohort, ready, round_, reward)
        state.held += held
        del state.cohorts[cohort.number]
        scores += scored
    return scores


def _close(
    config: Config,
    state: CurriculumState,
    round_: int,
    plays: RoundCredit,
    due: list[DesignCredit],
    *,
    final: bool = False,
) -> RoundClosed:
    """Return the message that credits a round's plays and the designs that are ``due``, which are done."""
    sent = worth_sending(config, due)
    state.held = [item for item in state.held if item not in due]
    return RoundClosed(
        round=round_,
        plays=plays.plays,
        designs=len(due),
        credits=(*plays.credits, *(_credit(item) for item in sent)),
        settled=min([*state.cohorts, *(item.cohort for item in state.held)], default=state.next_cohort),
        zero_variance_groups=plays.flat,
        groups=plays.groups,
        final=final,
        play_tokens=plays.tokens,
    )


def _credit(item: DesignCredit) -> Credit:
    group, accepted = item.group or f"cohort-{item.cohort}", item.valid and not item.part
    return Credit(item.sample, "designer", group, item.reward, item.advantage, item.members, accepted)
