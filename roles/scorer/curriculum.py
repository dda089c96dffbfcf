"""The curriculum: which environments are designed, played and credited when. A pure state machine.

Events are messages with their EVENT sequence, commands are data. It has no clock, no socket and no task:
the same events give the same commands (architecture I11), and what depends on the moment of admission is
when a command is given, never what it says. So a replay repeats what was published, id by id.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from bus.messages import (
    Arm,
    BatchTrained,
    DesignFailed,
    DesignRejected,
    EnvironmentReady,
    EnvironmentScored,
    EpisodeFailed,
    EpisodeFinished,
    Message,
    PolicyPublished,
    ServerLost,
    ServerServing,
    stable_id,
)
from engine.config import Config
from roles.scorer import custom, plan, work
from roles.scorer.credit import (
    Group,
    close,
    grade,
    penalises,
    settle,
    standing,
    summarise,
    worth_sending,
)
from roles.scorer.leaks import told
from roles.scorer.state import (
    Cohort,
    Command,
    Design,
    Held,
    MarkFlushed,
    Play,
    Publish,
    PublishDesigns,
    PurgeHeld,
    State,
    Status,
    Tally,
)

_TOLD = ("attempt", "environment", "source", "hint", "document", "degenerate", "flag", "hint_held")


class Curriculum:
    """Scheduler and ledger of credit for one run.

    ``flushed`` are the totals of earlier, finished segments (rounds with plays); a larger ``run.steps``
    appends one with fresh cohorts. Raises ConfigError when the recipe cannot turn.
    """

    def __init__(self, config: Config, *, flushed: tuple[int, ...] = (), state: State | None = None) -> None:
        plan.check(config)
        self.config = config
        self.state = state or State()
        self.draining = False
        known = max(flushed, tuple(self.state.flushed), key=len)
        more = (config.run.steps,) if not known or config.run.steps > known[-1] else ()
        self._totals = known + more
        self._own = custom.load(config.reward)

    @classmethod
    def restore(cls, config: Config, data: bytes, *, flushed: tuple[int, ...] = ()) -> Curriculum:
        """Return a machine that continues from :meth:`snapshot`. Raises msgspec.ValidationError."""
        return cls(config, flushed=flushed, state=msgspec.msgpack.decode(data, type=State))

    def snapshot(self) -> bytes:
        """Return the whole state as msgpack."""
        return msgspec.msgpack.encode(self.state)

    @property
    def finished(self) -> bool:
        """Whether the last batch of the last segment has been cut."""
        return len(self.state.flushed) >= len(self._totals)

    @property
    def settled(self) -> bool:
        """Whether no admitted round waits for anything."""
        return self.finished or self.state.closed == self.state.admitted

    def start(self) -> list[Command]:
        """Return what the state allows now: the first call after building or restoring a machine."""
        return self._advance()

    def drain(self) -> None:
        """Admit nothing more. Rounds in flight end as usual, windows stay open for the next start."""
        self.draining = True

    def apply(self, sequence: int, message: Message) -> list[Command]:
        """Take in the message at ``sequence`` of EVENT; one at or below the position changes nothing."""
        if sequence <= self.state.position:
            return []
        self.state.position = sequence
        progress = self.state.progress
        commands: list[Command] = []
        match message:
            case EpisodeFinished():
                commands = self._finished(sequence, message)
            case EpisodeFailed():
                commands = self._failed(message)
            case EnvironmentReady():
                commands = self._ready(message)
            case DesignRejected():
                commands = self._rejected(message)
            case DesignFailed():
                commands = self._abandoned(message)
            case BatchTrained():
                commands = self._purge(message.round) if progress.batch_trained(message) else []
            case PolicyPublished():
                progress.published(message)
            case ServerServing():
                progress.serving(message)
            case ServerLost():
                progress.lost(message)
            case _:
                return []
        return commands + self._advance()

    def outstanding(self) -> list[Message]:
        """Return the tickets and requests that have no outcome yet, equal to those first published."""
        return work.outstanding(self.config, self.state)

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
            "held_designs": len(state.held),
            "servers": len(state.progress.servers),
            "reissued": state.reissued,
            "late": state.late,
            "learning_potential": state.tracker.potential(),
        }

    def _advance(self) -> list[Command]:
        commands: list[Command] = []
        if self.finished:
            return commands
        while self._admissible(self.state.admitted + 1):
            self.state.admitted += 1
            commands += self._issue_round(self.state.admitted)
        commands += self._issue_cohorts()
        if self._in_step:
            commands += self._issue_waiting()
        while self._complete(self.state.closed + 1):
            commands += self._close(self.state.closed + 1)
        if self.state.closed >= self._last_round:
            commands += self._flush() + self._advance()
        return commands

    @property
    def _in_step(self) -> bool:
        return self.config.curriculum.mode == "sync"

    @property
    def _rounds(self) -> int:
        """Rounds with plays of the current segment."""
        number = len(self.state.flushed)
        return self._totals[number] - (self._totals[number - 1] if number else 0)

    @property
    def _last_round(self) -> int:
        """Last round with plays; rounds that were admitted before ``run.steps`` was lowered are played."""
        return max(self.state.first + self._rounds - 1, self.state.admitted)

    def _admissible(self, round_: int) -> bool:
        """The pacing rule: at most ``lead`` rounds are played beyond the last one trained and served."""
        if self.draining or round_ >= self.state.first + self._rounds:
            return False
        return self.state.progress.allows(round_ - 1 - self.config.curriculum.lead)

    def _issue_round(self, round_: int) -> list[Command]:
        self.state.tallies.setdefault(round_, Tally())
        return [] if self._in_step else self._issue_ready(round_)

    def _issue_ready(self, round_: int) -> list[Command]:
        return [
            command
            for cohort in self._alive(round_)
            for design in map(self.state.designs.__getitem__, cohort.designs)
            if design.status == "ready" and round_ not in design.rounds
            for command in self._issue_plays(cohort, design, round_)
        ]

    def _issue_waiting(self) -> list[Command]:
        """In step, a round is played once all of its tickets have their answer."""
        rounds = range(self.state.closed + 1, self.state.admitted + 1)
        return [
            command
            for round_ in rounds
            if not any(cohort.asked for cohort in self._alive(round_))
            for command in self._issue_ready(round_)
        ]

    def _issue_cohorts(self) -> list[Command]:
        """Ask for every cohort whose opening round is at most ``design_ahead`` rounds away."""
        state, settings = self.state, self.config.curriculum
        commands: list[Command] = []
        while not self.draining and state.admitted >= state.first:
            life = plan.life(settings, state.next_cohort - state.first_cohort)
            opens = state.first + life.opens
            if opens - settings.design_ahead > state.admitted or life.opens >= self._rounds:
                break
            number, run = state.next_cohort, self.config.run.name
            names = [stable_id("design", run, number, slot) for slot in range(life.size)]
            state.cohorts[number] = Cohort(
                number=number,
                opens=opens,
                last=state.first + life.last,
                due=state.first + life.due,
                asked=life.size,
                designs=names,
            )
            state.next_cohort += 1
            for slot, skill in enumerate(plan.skills(self.config, number, life.size)):
                design = Design(design=names[slot], cohort=number, slot=slot, skill=skill)
                state.designs[design.design] = design
                if slot % self.config.designer.designs_per_ticket == 0:
                    commands.append(Publish(work.ticket(self.config, state.cohorts[number], design, 0)))
        return commands

    def _issue_plays(self, cohort: Cohort, design: Design, round_: int) -> list[Command]:
        hints = round_ < cohort.opens + self.config.curriculum.hinted_rounds
        plays = work.new_plays(self.config, design, hints=hints)
        design.rounds[round_] = plays
        self.state.tallies[round_].pending += len(plays.plain) + len(plays.hinted)
        return [Publish(request) for request in work.requests(self.config, design, round_)]

    def _ready(self, message: EnvironmentReady) -> list[Command]:
        design = self._asked(message.design)
        if design is None:
            return self._late(message)
        self.state.cohorts[design.cohort].asked -= 1
        for name in _TOLD:
            setattr(design, name, getattr(message, name))
        design.status, design.difficulty, design.family = "ready", message.difficulty, message.family
        cohort = self.state.cohorts[design.cohort]
        # A ticket that was answered twice can have refused the attempt that was accepted in the end.
        cohort.rejected = [r for r in cohort.rejected if r[:2] != (design.design, design.attempt)]
        if self._in_step:
            return []
        admitted = range(cohort.opens, min(cohort.last, self.state.admitted) + 1)
        return [one for round_ in admitted for one in self._issue_plays(cohort, design, round_)]

    def _abandoned(self, message: DesignFailed) -> list[Command]:
        """A fault of the infrastructure asks for the ticket again, as long as ``reissues`` lasts."""
        design = self._asked(message.design)
        if design is None:
            return self._late(message)
        if message.failure == "infra":
            if message.issue != design.issue:
                return self._late(message)
            if design.issue < self.config.curriculum.reissues:
                return self._ask_again(design)
        cohort = self.state.cohorts[design.cohort]
        cohort.asked -= 1
        design.status = "failed"
        cohort.failed[message.failure] = cohort.failed.get(message.failure, 0) + 1
        return []

    def _ask_again(self, design: Design) -> list[Command]:
        """Of a group, the first design that failed brings the ticket of all."""
        before = work.newest_issue(self.config, self.state, design)
        design.issue += 1
        if design.issue <= before:
            return []
        self.state.reissued += 1
        cohort = self.state.cohorts[design.cohort]
        return [Publish(work.ticket(self.config, cohort, design, design.issue))]

    def _asked(self, name: str) -> Design | None:
        """Return the design if its ticket still waits for an answer; the first answer counts."""
        design = self.state.designs.get(name)
        return design if design and design.status == "asked" else None

    def _late(self, message: EnvironmentReady | DesignRejected | DesignFailed) -> list[Command]:
        """Tokens that came after their cohort was trained and purged would stay for ever."""
        self.state.late += 1
        number = message.cohort
        if number in self.state.cohorts or any(number in due for due in self.state.purges.values()):
            return []
        return [PurgeHeld(f"design.{number}.>")]

    def _rejected(self, message: DesignRejected) -> list[Command]:
        design = self._asked(message.design)
        if design is None:
            return self._late(message)
        cohort = self.state.cohorts[design.cohort]
        entry = (design.design, message.attempt, design.skill)
        if not penalises(self.config):
            # refused attempts are not held: tokens on their subject are those of a later life's valid attempt
            cohort.refused += 1
            return []
        if entry not in cohort.rejected:
            cohort.refused += 1
            cohort.rejected.append(entry)
        return []

    def _finished(self, sequence: int, message: EpisodeFinished) -> list[Command]:
        play = self._outcome(message)
        if play is None:
            return []
        if not math.isfinite(message.returned):
            return self._lose(play, message, "quarantined")
        play.status, play.sequence = Status.DONE, sequence
        play.returned = min(1.0, max(-1.0, message.returned))
        play.versions = work.versions(message)
        hint = self.state.designs[message.design].hint if message.arm == "hinted" else None
        play.told = play.returned > 0 and told(hint, message.transcript)
        play.truncated = message.outcome == "truncated"
        play.env_failed = message.failure == "env"
        play.turns = message.turns
        if message.failure:
            self._count(message.round, message.failure)
        return self._ended(message.design, message.round, message.arm)

    def _failed(self, message: EpisodeFailed) -> list[Command]:
        play = self._outcome(message)
        if play is None:
            return []
        if message.failure == "infra" and play.attempt < self.config.curriculum.reissues:
            self._count(message.round, message.failure)
            play.attempt += 1
            self.state.reissued += 1
            key = (message.round, message.arm, message.index, play.attempt)
            return [Publish(work.request(self.config, self.state.designs[message.design], *key))]
        return self._lose(play, message, message.failure)

    def _lose(self, play: Play, message: EpisodeFinished | EpisodeFailed, kind: str) -> list[Command]:
        """A play without an outcome leaves its group, which closes with what it has."""
        self._count(message.round, kind)
        play.status = Status.LOST
        return self._ended(message.design, message.round, message.arm)

    def _outcome(self, message: EpisodeFinished | EpisodeFailed) -> Play | None:
        """Return the play that ``message`` is the first outcome of."""
        design = self.state.designs.get(message.design)
        plays = design.rounds.get(message.round) if design else None
        arm = plays.arm(message.arm) if plays else []
        play = arm[message.index] if 0 <= message.index < len(arm) else None
        if play and play.status is Status.PENDING:
            key = (message.design, message.round, message.arm, message.index)
            if message.episode == work.episode(self.config, *key, play.attempt):
                return play
        self.state.late += 1
        return None

    def _count(self, round_: int, kind: str) -> None:
        failures = self.state.tallies[round_].failures
        failures[kind] = failures.get(kind, 0) + 1

    def _ended(self, name: str, round_: int, arm: Arm) -> list[Command]:
        """One play of a group is over; the last one closes the group."""
        tally, design = self.state.tallies[round_], self.state.designs[name]
        tally.pending -= 1
        plays = design.rounds[round_].arm(arm)
        if self.config.learner.agent.scope != "group" or any(p.status is Status.PENDING for p in plays):
            return []
        return [*grade(self.config, round_, [Group(design, arm, plays)], tally)]

    def _alive(self, round_: int) -> Iterator[Cohort]:
        return (c for c in self.state.cohorts.values() if c.opens <= round_ <= c.last)

    def _complete(self, round_: int) -> bool:
        if round_ > self.state.admitted or self.state.tallies[round_].pending:
            return False
        return not any(cohort.asked for cohort in self._alive(round_))

    def _close(self, round_: int) -> list[Command]:
        state, commands = self.state, list[Command]()
        tally = state.tallies[round_]
        if self.config.learner.agent.scope != "group":
            groups = [
                Group(design, arm, plays.arm(arm))
                for design in state.designs.values()
                if (plays := design.rounds.get(round_))
                for arm in work.ARMS
            ]
            commands += grade(self.config, round_, groups, tally)
        opening = [cohort for cohort in state.cohorts.values() if cohort.opens == round_]
        played = list(state.designs.values())
        ending = [c for c in state.cohorts.values() if c.last <= round_ or round_ == self._last_round]
        scores = self._settle(ending, round_)
        due = [item for item in state.held if item.due <= round_]
        going_on = [
            standing(self.config, design) for design in state.designs.values() if round_ in design.rounds
        ]
        summary = summarise(self.config, round_, tally, played, opening, scores, going_on)
        commands += [Publish(message) for message in scores]
        commands += [*self._train(round_, due, tally), Publish(summary)]
        del state.tallies[round_]
        state.closed = round_
        return commands

    def _settle(self, cohorts: list[Cohort], round_: int) -> list[EnvironmentScored]:
        """Close windows: credit goes to the held designs, the plays are forgotten."""
        scores: list[EnvironmentScored] = []
        for cohort in cohorts:
            designs = [self.state.designs.pop(name) for name in cohort.designs]
            ready = [design for design in designs if design.status == "ready"]
            scored, held = settle(self.config, self.state.tracker, cohort, ready, round_, self._own)
            self.state.held += held
            self.state.purges.setdefault(cohort.due, []).append(cohort.number)
            del self.state.cohorts[cohort.number]
            scores += scored
        return scores

    def _train(self, round_: int, due: list[Held], tally: Tally, *, final: bool = False) -> list[Command]:
        """Send the designs of a batch, and close its round."""
        sent = worth_sending(self.config, due)
        self.state.held = [item for item in self.state.held if item not in due]
        run = self.config.run.name
        samples = tuple(
            stable_id("sample", run, item.design, item.attempt, *([item.part] if item.part else []))
            for item in sent
        )
        designs: list[Command] = [PublishDesigns(round_, tuple(sent), samples)] if sent else []
        return [*designs, Publish(close(round_, tally, due, sent, final=final))]

    def _flush(self) -> list[Command]:
        """Cut the last batch of a segment from everything held, due or not, and begin the next segment."""
        state = self.state
        round_ = state.closed + 1
        total = (state.flushed[-1] if state.flushed else 0) + round_ - state.first
        scores = self._settle(list(state.cohorts.values()), state.closed)
        due, later = list(state.held), [n for numbers in state.purges.values() for n in numbers]
        state.purges = {round_: later}
        state.flushed.append(total)
        commands: list[Command] = [Publish(message) for message in scores]
        commands += [MarkFlushed(tuple(state.flushed)), *self._train(round_, due, Tally(), final=True)]
        state.admitted = state.closed = round_
        state.first, state.first_cohort = round_ + 1, state.next_cohort
        return commands

    def _purge(self, trained: int) -> list[Command]:
        """Held designs are stored as samples and trained: their subjects are no longer needed.

        They are dropped twice, with the next ones again: a ticket that was delivered twice may have been
        answered in between, by news that the broker took for a repetition.
        """
        purges, before = self.state.purges, self.state.purged
        past = sorted(due for due in purges if due <= trained)
        if not past:
            return []
        self.state.purged = [number for due in past for number in purges.pop(due)]
        return [PurgeHeld(f"design.{number}.>") for number in [*before, *self.state.purged]]
