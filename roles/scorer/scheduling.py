"""Asks for work: tickets of cohorts, plays of rounds, and everything that has no outcome yet.

Ids and seeds follow from the recipe. Functions change the state and return what to publish.
"""

from __future__ import annotations

from collections.abc import Iterator

from bus.messages import Arm, DesignTicket, EpisodeRequest, Message, stable_id
from engine.config import Config
from roles.scorer import cohort_plan
from roles.scorer.state import (
    ARMS,
    Cohort,
    Command,
    CurriculumState,
    Design,
    Play,
    Plays,
    PlayStatus,
    Publish,
    Tally,
    alive,
    designing,
)


def admit(config: Config, state: CurriculumState) -> list[Command]:
    """Admit the next round; in sync mode its plays come later, from :func:`waiting`."""
    state.admitted += 1
    state.tallies.setdefault(state.admitted, Tally())
    return [] if config.curriculum.mode == "sync" else _round(config, state, state.admitted)


def waiting(config: Config, state: CurriculumState) -> list[Command]:
    """In sync mode, a round is played once all of its tickets have their answer."""
    if config.curriculum.mode != "sync":
        return []
    return [
        command
        for round_ in range(state.closed + 1, state.admitted + 1)
        if not designing(state, round_)
        for command in _round(config, state, round_)
    ]


def _round(config: Config, state: CurriculumState, round_: int) -> list[Command]:
    return [
        command
        for cohort in alive(state, round_)
        for design in map(state.designs.__getitem__, cohort.designs)
        if design.status == "ready" and round_ not in design.rounds
        for command in _plays(config, state, design, round_)
    ]


def open_rounds(config: Config, state: CurriculumState, design: Design) -> list[Command]:
    """A new environment is played at once in the admitted rounds of its window; not so in sync mode."""
    if config.curriculum.mode == "sync":
        return []
    cohort = state.cohorts[design.cohort]
    admitted = range(cohort.opens, min(cohort.last, state.admitted) + 1)
    return [command for round_ in admitted for command in _plays(config, state, design, round_)]


def _plays(config: Config, state: CurriculumState, design: Design, round_: int) -> list[Command]:
    hints = round_ < state.cohorts[design.cohort].opens + config.curriculum.hinted_rounds
    hinted = config.curriculum.hinted_plays if hints and design.hint is not None else 0
    plays = Plays([Play() for _ in range(config.curriculum.plays_per_round)], [Play() for _ in range(hinted)])
    design.rounds[round_] = plays
    state.tallies[round_].pending += len(plays.plain) + len(plays.hinted)
    return [Publish(request) for request in requests(config, design, round_)]


def cohorts(config: Config, state: CurriculumState, rounds: int) -> list[Command]:
    """Ask for every cohort whose opening round is at most ``design_ahead`` rounds away.

    ``rounds`` is how many the segment has.
    """
    commands: list[Command] = []
    while state.admitted >= state.first:
        life = cohort_plan.rounds_of(config.curriculum, state.next_cohort - state.first_cohort)
        opens = state.first + life.opens
        if opens - config.curriculum.design_ahead > state.admitted or life.opens >= rounds:
            break
        commands += _cohort(config, state, life)
    return commands


def _cohort(config: Config, state: CurriculumState, life: cohort_plan.CohortRounds) -> list[Command]:
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
    for slot, skill in enumerate(cohort_plan.skills(config.designer, number, life.size)):
        design = Design(design=names[slot], cohort=number, slot=slot, skill=skill)
        state.designs[design.design] = design
        if slot % config.designer.designs_per_ticket == 0:
            commands.append(Publish(ticket(config, cohort, design, 0)))
    return commands


def ticket_again(config: Config, state: CurriculumState, design: Design) -> list[Command]:
    """Of a group, the first design that failed brings the ticket of all."""
    before = newest_issue(config, state, design)
    design.issue += 1
    if design.issue <= before:
        return []
    state.reissued += 1
    return [Publish(ticket(config, state.cohorts[design.cohort], design, design.issue))]


def ticket(config: Config, cohort: Cohort, design: Design, issue: int) -> DesignTicket:
    """Return the ticket that ``design`` is on, alone or with the others of its group."""
    group = _group(config, cohort, design)
    first = cohort.designs.index(group[0])
    number, turn = cohort_plan.place(config.designer, config.curriculum, cohort.number, first)
    return DesignTicket(
        design=group[0],
        cohort=cohort.number,
        slot=first,
        skill=design.skill,
        seed=cohort_plan.seed(config.run.seed, group[0]),
        attempts=config.designer.attempts,
        target=config.designer.target,
        round=cohort.opens,
        number=number,
        turn=turn,
        designs=tuple(group) if config.designer.designs_per_ticket > 1 else (),
        issue=issue,
    )


def newest_issue(config: Config, state: CurriculumState, design: Design) -> int:
    """Return how often the ticket of ``design`` was asked for again."""
    group = _group(config, state.cohorts[design.cohort], design)
    return max(state.designs[name].issue for name in group)


def _group(config: Config, cohort: Cohort, design: Design) -> list[str]:
    """Return the designs that share a ticket with ``design``, itself among them."""
    each = config.designer.designs_per_ticket
    first = design.slot - design.slot % each
    return cohort.designs[first : first + each]


def episode(config: Config, design: str, round_: int, arm: str, index: int, attempt: int) -> str:
    """Return the id of one attempt at one play."""
    return stable_id("episode", config.run.name, design, round_, arm, index, attempt)


def request(
    config: Config, design: Design, round_: int, arm: Arm, index: int, attempt: int
) -> EpisodeRequest:
    """Return the request of one play. Nothing in it but ``arm``, ``hint`` and the id knows the arm (I4)."""
    return EpisodeRequest(
        episode=episode(config, design.design, round_, arm, index, attempt),
        design=design.design,
        environment=design.environment,
        arm=arm,
        round=round_,
        index=index,
        seed=cohort_plan.seed(config.run.seed, design.design, round_, index),
        hint=design.hint if arm == "hinted" else None,
        max_turns=config.agent.max_turns,
    )


def requests(config: Config, design: Design, round_: int) -> Iterator[EpisodeRequest]:
    """Yield the requests of the pending plays of a round, the arms of a pair next to each other."""
    plays = design.rounds[round_]
    for index in range(max(len(plays.plain), len(plays.hinted))):
        for arm in ARMS:
            if index < len(plays.arm(arm)) and plays.arm(arm)[index].status is PlayStatus.PENDING:
                yield request(config, design, round_, arm, index, plays.arm(arm)[index].attempt)


def outstanding(config: Config, state: CurriculumState) -> list[Message]:
    """Return all tickets and requests that have no outcome yet, equal to those first published."""
    tickets: dict[str, Message] = {}
    plays: list[Message] = []
    for design in state.designs.values():
        if design.status == "asked":
            issue = newest_issue(config, state, design)
            message = ticket(config, state.cohorts[design.cohort], design, issue)
            tickets[message.tail] = message
        for round_ in design.rounds:
            plays += requests(config, design, round_)
    return [*tickets.values(), *plays]
