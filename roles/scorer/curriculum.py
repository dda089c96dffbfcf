"""The curriculum: which environments are designed, played and credited when. A pure state machine.

Events are messages with their EVENT sequence, commands are data. It has no clock, no socket and no task:
the same events give the same commands (architecture I11), and what depends on the moment of admission is
when a command is given, never what it says. So a replay repeats what was published, id by id.
"""

from __future__ import annotations

import math

import msgspec

from bus.messages import (
    BatchTrained,
    DesignFailed,
    DesignRejected,
    EnvironmentReady,
    EpisodeFailed,
    EpisodeFinished,
    Message,
    PolicyPublished,
    RunOrdered,
    ServerLost,
    ServerServing,
)
from engine.config import Config
from roles.scorer import rewards, scheduling
from roles.scorer.credit import penalises
from roles.scorer.rounds import close_round, flush
from roles.scorer.state import (
    Command,
    CurriculumState,
    Design,
    Play,
    PlayStatus,
    Publish,
    RejectedAttempt,
    complete,
)


class Curriculum:
    """Scheduler and ledger of credit for one run.

    ``flushed`` are the totals of earlier, finished segments (rounds with plays); a larger ``run.steps``
    appends one with fresh cohorts. Raises ConfigError when the recipe cannot turn.
    """

    def __init__(
        self, config: Config, *, flushed: tuple[int, ...] = (), state: CurriculumState | None = None
    ) -> None:
        self.config = config
        self.state = state or CurriculumState()
        self.draining = False
        ended = max(flushed, tuple(self.state.flushed), key=len)
        more = (config.run.steps,) if not ended or config.run.steps > ended[-1] else ()
        # rounds with plays at the end of each segment
        self._totals = ended + more
        self._reward = rewards.load(config)

    @classmethod
    def restore(cls, config: Config, data: bytes, *, flushed: tuple[int, ...] = ()) -> Curriculum:
        """Return a machine that continues from :meth:`snapshot`. Raises msgspec.ValidationError."""
        return cls(config, flushed=flushed, state=msgspec.msgpack.decode(data, type=CurriculumState))

    def snapshot(self) -> bytes:
        """Return the whole state as msgpack."""
        return msgspec.msgpack.encode(self.state)

    @property
    def finished(self) -> bool:
        """Return whether the last batch of the last segment has been cut."""
        return len(self.state.flushed) >= len(self._totals)

    @property
    def settled(self) -> bool:
        """Return whether no admitted round waits for anything."""
        return self.finished or self.state.closed == self.state.admitted

    @property
    def _rounds(self) -> int:
        """Return how many rounds with plays the current segment has."""
        number = len(self.state.flushed)
        return self._totals[number] - (self._totals[number - 1] if number else 0)

    @property
    def _resting(self) -> bool:
        """Return whether no round is admitted and no cohort asked for; what is under way goes on."""
        return self.draining or self.state.paused

    def start(self) -> list[Command]:
        """Return what the state allows now: the first call after building or restoring a machine."""
        return self._advance()

    def drain(self) -> None:
        """Admit nothing more. Rounds in flight end as usual, windows stay open for the next start."""
        self.draining = True

    def apply(self, sequence: int, message: Message) -> list[Command]:
        """Take in the message at ``sequence`` of EVENT; one at or below the position changes nothing."""
        config, state, progress = self.config, self.state, self.state.progress
        if sequence <= state.position:
            return []
        state.position = sequence
        commands: list[Command] = []
        match message:
            case EpisodeFinished():
                commands = play_finished(config, state, message)
            case EpisodeFailed():
                commands = play_failed(config, state, message)
            case EnvironmentReady():
                commands = environment_ready(config, state, message)
            case DesignRejected():
                commands = design_rejected(config, state, message)
            case DesignFailed():
                commands = design_failed(config, state, message)
            case BatchTrained():
                progress.batch_trained(message)
            case PolicyPublished():
                progress.published(message)
            case ServerServing():
                progress.serving(message)
            case ServerLost():
                progress.lost(message)
            case RunOrdered(command=("pause" | "resume") as command):
                state.paused = command == "pause"
            case _:
                return []
        return commands + self._advance()

    def outstanding(self) -> list[Message]:
        """Return the tickets and requests that have no outcome yet, equal to those first published."""
        return scheduling.outstanding(self.config, self.state)

    def statistics(self) -> dict[str, float]:
        """Gauges: rounds, open work, what was dropped."""
        state = self.state
        return {
            "position": state.position,
            "round_admitted": state.admitted,
            "round_closed": state.closed,
            "environments": sum(design.status == "ready" for design in state.designs.values()),
            "open_tickets": sum(cohort.asked for cohort in state.cohorts.values()),
            "open_plays": sum(tally.pending for tally in state.tallies.values()),
            "awaited_plays": state.tallies[state.closed + 1].pending if state.closed < state.admitted else 0,
            "held_designs": len(state.held),
            "servers": len(state.progress.servers),
            "paused": float(state.paused),
            "reissued": state.reissued,
            "late": state.late,
            "learning_potential": state.tracker.potential(),
        }

    def _advance(self) -> list[Command]:
        """Admit, ask for and close whatever can be."""
        config, state, commands = self.config, self.state, list[Command]()
        if self.finished:
            return commands
        while self._admissible(state.admitted + 1):
            commands += scheduling.admit(config, state)
        if not self._resting:
            commands += scheduling.cohorts(config, state, self._rounds)
        commands += scheduling.waiting(config, state)
        # rounds that were admitted before run.steps was lowered are played
        last = max(state.first + self._rounds - 1, state.admitted)
        while complete(state, round_ := state.closed + 1):
            commands += close_round(config, state, round_, last=round_ == last, reward=self._reward)
        if state.closed >= last:
            commands += flush(config, state, reward=self._reward) + self._advance()
        return commands

    def _admissible(self, round_: int) -> bool:
        """The pacing rule: at most ``lead`` rounds are played beyond the last one trained and served."""
        if self._resting or round_ >= self.state.first + self._rounds:
            return False
        return self.state.progress.allows(round_ - 1 - self.config.curriculum.lead)


# --- outcomes of plays and answers to tickets ----------------------------------------------------------

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
    play.leaked = message.leaked
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


_COPIED = ("attempt", "environment", "hint", "document", "sample", "difficulty", "family")


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
    if penalises(config.designer) and not known:
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
