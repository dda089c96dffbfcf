"""Taking in the answers to tickets: environments, refused attempts, designs that failed."""

from __future__ import annotations

from bus.messages import DesignFailed, DesignRejected, EnvironmentReady
from engine.config import Config
from roles.scorer import scheduling
from roles.scorer.credit import penalises
from roles.scorer.state import Command, Design, PurgeHeld, State

_TOLD = (
    *("attempt", "environment", "source", "hint", "document", "degenerate", "flag", "hint_held"),
    *("difficulty", "family"),
)


def ready(config: Config, state: State, message: EnvironmentReady) -> list[Command]:
    """An environment can be played."""
    design = _asked(state, message.design)
    if design is None:
        return _late(state, message)
    for name in _TOLD:
        setattr(design, name, getattr(message, name))
    design.status = "ready"
    cohort = state.cohorts[design.cohort]
    cohort.asked -= 1
    # A ticket that was answered twice can have refused the attempt that was accepted in the end.
    cohort.rejected = [r for r in cohort.rejected if r[:2] != (design.design, design.attempt)]
    return scheduling.open_rounds(config, state, design)


def rejected(config: Config, state: State, message: DesignRejected) -> list[Command]:
    """One attempt was refused; the ticket may have more."""
    design = _asked(state, message.design)
    if design is None:
        return _late(state, message)
    cohort = state.cohorts[design.cohort]
    entry = (design.design, message.attempt, design.skill)
    if not penalises(config):
        # refused attempts are not held: tokens on their subject are those of a later life's valid attempt
        cohort.refused += 1
    elif entry not in cohort.rejected:
        cohort.refused += 1
        cohort.rejected.append(entry)
    return []


def failed(config: Config, state: State, message: DesignFailed) -> list[Command]:
    """A fault of the infrastructure asks for the ticket again, as long as ``reissues`` lasts."""
    design = _asked(state, message.design)
    if design is None:
        return _late(state, message)
    if message.failure == "infra":
        if message.issue != design.issue:
            return _late(state, message)
        if design.issue < config.curriculum.reissues:
            return scheduling.ticket_again(config, state, design)
    cohort = state.cohorts[design.cohort]
    cohort.asked -= 1
    design.status = "failed"
    cohort.failed[message.failure] = cohort.failed.get(message.failure, 0) + 1
    return []


def _asked(state: State, name: str) -> Design | None:
    """Return the design if its ticket still waits for an answer; the first answer counts."""
    design = state.designs.get(name)
    return design if design and design.status == "asked" else None


def _late(state: State, message: EnvironmentReady | DesignRejected | DesignFailed) -> list[Command]:
    """Tokens that came after their cohort was trained and purged would stay for ever."""
    state.late += 1
    number = message.cohort
    if number in state.cohorts or any(number in due for due in state.purges.values()):
        return []
    return [PurgeHeld(f"design.{number}.>")]
