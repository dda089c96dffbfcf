"""Which rounds a run has, and which environments are played in one. Pure.

A run that was finished and then extended consists of segments, each with cohorts and a last batch of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

from roles.scorer.state import Cohort, State


class Segments:
    """The segments of a run, by the rounds with plays after which each ends.

    ``flushed`` are those that have ended; a larger number of ``steps`` appends one.
    """

    def __init__(self, steps: int, flushed: tuple[int, ...]) -> None:
        more = (steps,) if not flushed or steps > flushed[-1] else ()
        self._totals = flushed + more

    def finished(self, state: State) -> bool:
        """Whether the last batch of the last segment has been cut."""
        return len(state.flushed) >= len(self._totals)

    def rounds(self, state: State) -> int:
        """Return how many rounds with plays the current segment has."""
        number = len(state.flushed)
        return self._totals[number] - (self._totals[number - 1] if number else 0)

    def last_round(self, state: State) -> int:
        """Return its last round with plays; those admitted before ``run.steps`` was lowered are played."""
        return max(state.first + self.rounds(state) - 1, state.admitted)


def alive(state: State, round_: int) -> Iterator[Cohort]:
    """Yield the cohorts that are played in ``round_``."""
    return (cohort for cohort in state.cohorts.values() if cohort.opens <= round_ <= cohort.last)


def designing(state: State, round_: int) -> bool:
    """Whether a ticket of ``round_`` has no answer yet."""
    return any(cohort.asked for cohort in alive(state, round_))


def complete(state: State, round_: int) -> bool:
    """Whether ``round_`` is admitted and waits for nothing any more."""
    if round_ > state.admitted or state.tallies[round_].pending:
        return False
    return not designing(state, round_)
