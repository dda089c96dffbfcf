"""Asking for work: tickets of cohorts, plays of rounds. It changes the state and returns what to publish."""

from __future__ import annotations

from bus.messages import stable_id
from engine.config import Config
from roles.scorer import plan, work
from roles.scorer.run_extensions import alive, designing
from roles.scorer.state import Cohort, Command, Design, Publish, State, Tally


def admit(config: Config, state: State) -> list[Command]:
    """Admit the next round; in sync mode its plays come later, from :func:`waiting`."""
    state.admitted += 1
    state.tallies.setdefault(state.admitted, Tally())
    return [] if config.curriculum.mode == "sync" else _round(config, state, state.admitted)


def waiting(config: Config, state: State) -> list[Command]:
    """In sync mode, a round is played once all of its tickets have their answer."""
    if config.curriculum.mode != "sync":
        return []
    return [
        command
        for round_ in range(state.closed + 1, state.admitted + 1)
        if not designing(state, round_)
        for command in _round(config, state, round_)
    ]


def _round(config: Config, state: State, round_: int) -> list[Command]:
    return [
        command
        for cohort in alive(state, round_)
        for design in map(state.designs.__getitem__, cohort.designs)
        if design.status == "ready" and round_ not in design.rounds
        for command in _plays(config, state, design, round_)
    ]


def open_rounds(config: Config, state: State, design: Design) -> list[Command]:
    """A new environment is played at once in the admitted rounds of its window; not so in sync mode."""
    if config.curriculum.mode == "sync":
        return []
    cohort = state.cohorts[design.cohort]
    admitted = range(cohort.opens, min(cohort.last, state.admitted) + 1)
    return [command for round_ in admitted for command in _plays(config, state, design, round_)]


def _plays(config: Config, state: State, design: Design, round_: int) -> list[Command]:
    hints = round_ < state.cohorts[design.cohort].opens + config.curriculum.hinted_rounds
    plays = work.new_plays(config, design, hints=hints)
    design.rounds[round_] = plays
    state.tallies[round_].pending += len(plays.plain) + len(plays.hinted)
    return [Publish(request) for request in work.requests(config, design, round_)]


def cohorts(config: Config, state: State, rounds: int) -> list[Command]:
    """Ask for every cohort whose opening round is at most ``design_ahead`` rounds away.

    ``rounds`` is how many the segment has.
    """
    commands: list[Command] = []
    while state.admitted >= state.first:
        life = plan.life(config.curriculum, state.next_cohort - state.first_cohort)
        opens = state.first + life.opens
        if opens - config.curriculum.design_ahead > state.admitted or life.opens >= rounds:
            break
        commands += _cohort(config, state, life)
    return commands


def _cohort(config: Config, state: State, life: plan.Life) -> list[Command]:
    number = state.next_cohort
    state.next_cohort += 1
    names = [stable_id("design", config.run.name, number, slot) for slot in range(life.size)]
    cohort = state.cohorts[number] = Cohort(
        number=number,
        opens=state.first + life.opens,
        last=state.first + life.last,
        due=state.first + life.due,
        asked=life.size,
        designs=names,
    )
    commands: list[Command] = []
    for slot, skill in enumerate(plan.skills(config, number, life.size)):
        design = Design(design=names[slot], cohort=number, slot=slot, skill=skill)
        state.designs[design.design] = design
        if slot % config.designer.designs_per_ticket == 0:
            commands.append(Publish(work.ticket(config, cohort, design, 0)))
    return commands


def ticket_again(config: Config, state: State, design: Design) -> list[Command]:
    """Of a group, the first design that failed brings the ticket of all."""
    before = work.newest_issue(config, state, design)
    design.issue += 1
    if design.issue <= before:
        return []
    state.reissued += 1
    return [Publish(work.ticket(config, state.cohorts[design.cohort], design, design.issue))]
