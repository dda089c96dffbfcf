"""State of the curriculum and its commands to the shell. Plain data, msgpack both ways."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Literal

import msgspec

from bus.messages import Arm, Credit, Flag, Message
from roles.scorer.pacing import TrainingProgress
from roles.scorer.rewards import Tracker

ARMS: tuple[Arm, Arm] = ("plain", "hinted")


class PlayStatus(IntEnum):
    """State of a play: asked for, with an outcome, or without one for good."""

    PENDING = 0
    DONE = 1
    LOST = 2


class Play(msgspec.Struct, array_like=True):
    """One play. ``sample`` is the id of its tokens, "" where none are trained; ``attempt`` counts re-issues.

    ``versions`` are the oldest and the newest policy version that sampled it, ``tokens`` how many tokens they
    sampled; ``leaked``: its hint named its one action.
    """

    attempt: int = 0
    status: PlayStatus = PlayStatus.PENDING
    sample: str = ""
    returned: float = 0.0
    env_failed: bool = False
    turns: int = 0
    tokens: int = 0
    versions: tuple[int, int] | None = None
    leaked: bool = False


class Plays(msgspec.Struct, array_like=True):
    """The plays of one design in one round, by index."""

    plain: list[Play]
    hinted: list[Play]

    def arm(self, arm: Arm) -> list[Play]:
        """Return the plays of one arm."""
        return self.plain if arm == "plain" else self.hinted


class Design(msgspec.Struct, kw_only=True):
    """One design; ``rounds`` holds the plays issued so far.

    ``issue`` counts how often its ticket was asked for again after infrastructure faults. ``sample`` is the
    id of the tokens of the program, "" where they are not trained.
    """

    design: str
    cohort: int
    slot: int
    skill: str
    status: Literal["asked", "ready", "failed"] = "asked"
    attempt: int = 0
    issue: int = 0
    environment: str = ""
    hint: str | None = None
    document: str = ""
    degenerate: bool = False
    flag: Flag = ""
    sample: str = ""
    difficulty: float | None = None
    family: str | None = None
    rounds: dict[int, Plays] = {}


class RejectedAttempt(msgspec.Struct, frozen=True, array_like=True):
    """An invalid attempt at a design that will be trained."""

    design: str
    attempt: int
    skill: str
    sample: str


class Cohort(msgspec.Struct, kw_only=True):
    """Designs that share a window: rounds ``opens .. last``; trained with the batch of round ``due``.

    ``refused`` counts all invalid attempts, ``asked`` open tickets, and ``failed`` closed ones without an
    environment, by kind.
    """

    number: int
    opens: int
    last: int
    due: int
    asked: int
    designs: list[str]
    rejected: list[RejectedAttempt] = []
    refused: int = 0
    failed: dict[str, int] = {}


class HeldCredit(msgspec.Struct, frozen=True, array_like=True):
    """The credit of a design until its batch is ``due``; None where it would leave the weights alone."""

    cohort: int
    due: int
    credit: Credit | None


class Tally(msgspec.Struct, kw_only=True):
    """Counts of one open round. ``pending`` plays have no outcome yet."""

    pending: int = 0
    failures: dict[str, int] = {}


class CurriculumState(msgspec.Struct, kw_only=True):
    """The whole state of the curriculum. ``position`` is the last EVENT sequence taken in.

    A run that was finished and then extended consists of segments: ``flushed`` holds the number of rounds
    with plays at the end of each finished one, ``first`` is the current one's first round,
    ``first_cohort`` its first cohort. Rounds ``<= admitted`` may be played, rounds ``<= closed`` are done.
    ``paused``: an order stopped the admission of rounds.
    """

    position: int = 0
    flushed: list[int] = []
    first: int = 0
    first_cohort: int = 0
    next_cohort: int = 0
    admitted: int = -1
    closed: int = -1
    designs: dict[str, Design] = {}
    cohorts: dict[int, Cohort] = {}
    held: list[HeldCredit] = []
    tallies: dict[int, Tally] = {}
    progress: TrainingProgress = msgspec.field(default_factory=TrainingProgress)
    tracker: Tracker = msgspec.field(default_factory=Tracker)
    reissued: int = 0
    late: int = 0
    paused: bool = False


class Publish(msgspec.Struct, frozen=True):
    """Publish this message as it is."""

    message: Message


class MarkFlushed(msgspec.Struct, frozen=True):
    """Record, before the last batch goes out, that a segment ended after ``steps`` rounds with plays."""

    steps: tuple[int, ...]


Command = Publish | MarkFlushed


def alive(state: CurriculumState, round_: int) -> Iterator[Cohort]:
    """Yield the cohorts that are played in ``round_``."""
    return (cohort for cohort in state.cohorts.values() if cohort.opens <= round_ <= cohort.last)


def designing(state: CurriculumState, round_: int) -> bool:
    """Return whether a ticket of ``round_`` has no answer yet."""
    return any(cohort.asked for cohort in alive(state, round_))


def complete(state: CurriculumState, round_: int) -> bool:
    """Return whether ``round_`` is admitted and waits for nothing any more."""
    if round_ > state.admitted or state.tallies[round_].pending:
        return False
    return not designing(state, round_)
