"""The work that the curriculum asks for, as messages. Pure: ids and seeds follow from the recipe."""

from __future__ import annotations

from collections.abc import Iterator

from bus.messages import Arm, DesignTicket, EpisodeFinished, EpisodeRequest, Message, stable_id
from engine.config import Config
from roles.scorer import plan
from roles.scorer.state import Cohort, Design, Play, Plays, State, Status

ARMS: tuple[Arm, Arm] = ("plain", "hinted")


def ticket(config: Config, cohort: Cohort, design: Design, issue: int) -> DesignTicket:
    """Return the ticket that ``design`` is on, alone or with the others of its group."""
    each = config.designer.designs_per_ticket
    first = design.slot - design.slot % each
    group = cohort.designs[first : first + each]
    number, turn = plan.place(config, cohort.number, first)
    return DesignTicket(
        design=group[0],
        cohort=cohort.number,
        slot=first,
        skill=design.skill,
        seed=plan.seed(config.run.seed, group[0]),
        attempts=config.designer.attempts,
        target=config.designer.target,
        round=cohort.opens,
        number=number,
        turn=turn,
        designs=tuple(group) if each > 1 else (),
        issue=issue,
    )


def newest_issue(config: Config, state: State, design: Design) -> int:
    """Return how often the ticket of ``design`` was asked for again."""
    each = config.designer.designs_per_ticket
    first = design.slot - design.slot % each
    group = state.cohorts[design.cohort].designs[first : first + each]
    return max(state.designs[name].issue for name in group)


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
        skill=design.skill,
        arm=arm,
        round=round_,
        index=index,
        seed=plan.seed(config.run.seed, design.design, round_, index),
        source=design.source,
        hint=design.hint if arm == "hinted" else None,
        max_turns=config.agent.max_turns,
    )


def requests(config: Config, design: Design, round_: int) -> Iterator[EpisodeRequest]:
    """Yield the requests of the pending plays of a round, the arms of a pair next to each other."""
    plays = design.rounds[round_]
    for index in range(max(len(plays.plain), len(plays.hinted))):
        for arm in ARMS:
            if index < len(plays.arm(arm)) and plays.arm(arm)[index].status is Status.PENDING:
                yield request(config, design, round_, arm, index, plays.arm(arm)[index].attempt)


def new_plays(config: Config, design: Design, *, hints: bool) -> Plays:
    """Return the plays of a design in one round: hinted ones where hints are played, if it has one."""
    settings = config.curriculum
    hinted = settings.hinted_plays if hints and design.hint is not None else 0
    return Plays([Play() for _ in range(settings.plays_per_round)], [Play() for _ in range(hinted)])


def versions(outcome: EpisodeFinished) -> tuple[int, int] | None:
    """Return the oldest and the newest policy version that sampled a token of a play."""
    found = [span.version for segment in outcome.segments for span in segment.spans]
    return (min(found), max(found)) if found else None


def outstanding(config: Config, state: State) -> list[Message]:
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
