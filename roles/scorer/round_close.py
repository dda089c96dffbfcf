"""Closing rounds and windows, cutting the last batch, purging what is trained."""

from __future__ import annotations

from collections.abc import Iterable

from bus.messages import EnvironmentScored, stable_id
from engine.config import Config
from roles.scorer.credit import PlayGroup, grade, settle, worth_sending
from roles.scorer.reports import close, standing, summarise
from roles.scorer.rewards import Reward
from roles.scorer.state import (
    ARMS,
    Cohort,
    Command,
    CurriculumState,
    DesignCredit,
    MarkFlushed,
    Publish,
    PublishDesigns,
    PurgeHeld,
    Tally,
)


def close_round(
    config: Config, state: CurriculumState, round_: int, *, last: bool, reward: Reward
) -> list[Command]:
    """Close a round, and the windows that end with it: all of them in the ``last`` round of a segment."""
    tally, commands = state.tallies[round_], list[Command]()
    if config.learner.agent.scope != "group":
        commands += grade(config, round_, _groups(state, round_), tally)
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
    summary = summarise(config, round_, tally, played, opening, scores, going_on)
    commands += [Publish(message) for message in scores]
    commands += [*_train(config, state, round_, due, tally), Publish(summary)]
    del state.tallies[round_]
    state.closed = round_
    return commands


def flush(config: Config, state: CurriculumState, *, reward: Reward) -> list[Command]:
    """Cut the last batch of a segment from everything held, due or not, and begin the next segment."""
    round_ = state.closed + 1
    total = (state.flushed[-1] if state.flushed else 0) + round_ - state.first
    scores = _settle(config, state, list(state.cohorts.values()), state.closed, reward)
    due, later = list(state.held), [number for numbers in state.purges.values() for number in numbers]
    state.purges = {round_: later}
    state.flushed.append(total)
    commands: list[Command] = [Publish(message) for message in scores]
    commands.append(MarkFlushed(tuple(state.flushed)))
    commands += _train(config, state, round_, due, Tally(), final=True)
    state.admitted = state.closed = round_
    state.first, state.first_cohort = round_ + 1, state.next_cohort
    return commands


def purge(state: CurriculumState, trained: int) -> list[Command]:
    """DesignCredit designs are stored as samples and trained: their subjects are no longer needed.

    They are dropped twice, with the next ones again: a ticket that was delivered twice may have been
    answered in between, by news that the broker took for a repetition.
    """
    purges, before = state.purges, state.purged
    past = sorted(due for due in purges if due <= trained)
    if not past:
        return []
    state.purged = [number for due in past for number in purges.pop(due)]
    return [PurgeHeld(f"design.{number}.>") for number in [*before, *state.purged]]


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
    """Close windows: credit goes to the held designs, the plays are forgotten."""
    scores: list[EnvironmentScored] = []
    for cohort in cohorts:
        designs = [state.designs.pop(name) for name in cohort.designs]
        ready = [design for design in designs if design.status == "ready"]
        scored, held = settle(config, state.tracker, cohort, ready, round_, reward)
        state.held += held
        state.purges.setdefault(cohort.due, []).append(cohort.number)
        del state.cohorts[cohort.number]
        scores += scored
    return scores


def _train(
    config: Config,
    state: CurriculumState,
    round_: int,
    due: list[DesignCredit],
    tally: Tally,
    *,
    final: bool = False,
) -> list[Command]:
    """Send the designs of a batch, and close its round."""
    sent = worth_sending(config, due)
    state.held = [item for item in state.held if item not in due]
    samples = tuple(
        stable_id("sample", config.run.name, item.design, item.attempt, *([item.part] if item.part else []))
        for item in sent
    )
    designs: list[Command] = [PublishDesigns(round_, tuple(sent), samples)] if sent else []
    return [*designs, Publish(close(round_, tally, due, sent, final=final))]
