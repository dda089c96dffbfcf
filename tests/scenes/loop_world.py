"""The whole loop without a task or a socket: streams, queues, and everybody who reads and writes them.

Real are the curriculum, the buffer, the lineage and the rules by which scorer and learner start again. What
happens next is drawn: facts are read late and in any interleaving, work is done twice or fails, commands are
carried out in part before a crash, and whoever publishes a thing again may or may not be told that it is
there already.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec
from learner_fakes import VOCABULARY

from bus.messages import (
    BatchTrained,
    DesignSample,
    DesignTicket,
    EnvironmentScored,
    EpisodeRequest,
    EpisodeSample,
    Message,
    PolicyPublished,
    RoundClosed,
    RoundSummary,
    ServerLost,
)
from engine.config import Config
from engine.lineage import Lineage, Version
from engine.training.buffer import Buffer, BufferState, Selection
from engine.training.samples import Sampled
from roles.learner.version_claim import merge, resume
from roles.scorer.curriculum import Curriculum
from roles.scorer.role import unsaid
from roles.scorer.state import Command, MarkFlushed, Publish
from scenes.loop_cast import Cast, Luck
from scenes.scorer_world import published, serving

Work = DesignTicket | EpisodeRequest
Action = Callable[[], None]


class Trained(msgspec.Struct, frozen=True):
    """One batch along a lineage: the weights it was formed for, and what became of its samples."""

    message: RoundClosed
    current: Version
    lineage: Lineage
    selection: Selection


class Checkpoint(msgspec.Struct, frozen=True):
    version: Version = Version(0, 0)
    lineage: Lineage = Lineage()
    cursor: int = 0
    buffer: BufferState = BufferState()
    announced: BatchTrained | None = None
    history: tuple[Trained, ...] = ()


@dataclass
class Loop:
    """``events`` and ``samples`` are streams: sequence n is at n - 1. ``tasks`` maps a tail to its work.

    ``held`` is the last sample on the subject of each attempt at a design.
    """

    config: Config
    chance: random.Random
    luck: Luck = field(default_factory=Luck)
    servers: int = 1
    checkpoint_every: int = 1
    events: list[Message] = field(default_factory=list)
    samples: list[Sampled | RoundClosed] = field(default_factory=list)
    sample_keys: set[str] = field(default_factory=set)
    facts: set[str] = field(default_factory=set)
    floor: int = 1
    tasks: dict[str, Work] = field(default_factory=dict)
    in_hand: dict[str, tuple[Work, tuple[int, ...]]] = field(default_factory=dict)
    asked: dict[str, Work] = field(default_factory=dict)
    held: dict[str, DesignSample] = field(default_factory=dict)
    flushed: tuple[int, ...] = ()
    crashes: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    serving: dict[str, tuple[str, int]] = field(default_factory=dict)
    epochs: int = 0
    parents: dict[Version, Version] = field(default_factory=dict)
    most_open: int = 0
    largest_snapshot: int = 0
    most_held: int = 0

    def __post_init__(self) -> None:
        self.cast = Cast(self.config, self.chance, self.luck)
        self.machine = Curriculum(self.config)
        self.snapshot = self.machine.snapshot()
        self._start_learner(Checkpoint())
        for number in range(self.servers):
            self._serve(f"s{number}")
        self._catch_up()

    # --- what can happen -----------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        """Return whether the last batch is trained and nobody has anything left to read."""
        read = self.machine.state.position == len(self.events) and self.cursor == len(self.samples)
        return self.machine.finished and read and not self.tasks and not self.in_hand

    def run(self, *, limit: int = 20_000, until: Callable[[], bool] | None = None) -> None:
        """Let things happen; fails when the loop stands still or does not come to its end."""
        for _ in range(limit):
            if self.over or (until is not None and until()):
                return
            actions = self._actions()
            assert actions, "nobody can do anything, and the run is not over"
            self.chance.choice(actions)()
            self._watch()
        raise AssertionError("the run does not end")

    def _actions(self) -> list[Action]:
        actions: list[Action] = []
        if self.machine.state.position < len(self.events):
            actions += [self._read_fact] * 3
        if self.cursor < len(self.samples):
            actions += [self._read_sample] * 3
        actions += [partial(self._take, tail) for tail in list(self.tasks)[:4]]
        actions += [partial(self._finish, tail) for tail in list(self.in_hand)[:4]]
        newest = self._newest()
        for name, (_, version) in self.serving.items():
            if newest is not None and version != newest:
                actions.append(partial(self._serve, name))
        if len(self.serving) < self.servers:
            actions.append(partial(self._serve, f"s{len(self.serving) + self.epochs}"))
        if self._may_crash(self.luck.scorer_dies):
            actions.append(self.scorer_dies)
        if self._may_crash(self.luck.learner_dies):
            actions.append(self.learner_dies)
        if len(self.serving) and self.chance.random() < self.luck.server_lost:
            actions.append(self._lose_server)
        return actions

    def _may_crash(self, chance: float) -> bool:
        return self.crashes < self.luck.crashes and self.chance.random() < chance

    def _watch(self) -> None:
        self.most_open = max(self.most_open, len(self.tasks) + len(self.in_hand))
        self.most_held = max(self.most_held, len(self.machine.state.held))

    # --- the scorer -----------------------------------------------------------------------------------

    def _read_fact(self) -> None:
        position = self.machine.state.position
        commands = self.machine.apply(position + 1, self.events[position])
        if self._may_crash(self.luck.scorer_dies):
            self._execute(commands[: self.chance.randint(0, len(commands))])
            self.scorer_dies()
            return
        self._execute(commands)
        if self.chance.random() < 0.1:
            self._keep()

    def _keep(self) -> None:
        self.snapshot = self.machine.snapshot()
        self.largest_snapshot = max(self.largest_snapshot, len(self.snapshot))

    def scorer_dies(self) -> None:
        """Kill -9, and a new scorer that knows the last snapshot only."""
        self.crashes += 1
        self.counts["scorer died"] += 1
        self._restart_scorer()

    def drain(self) -> None:
        """Let rounds in flight end, admit nothing, start again."""
        self.machine.drain()
        self.run(until=lambda: self.machine.settled and self.machine.state.position == len(self.events))
        assert self.machine.settled
        assert not any(isinstance(work, EpisodeRequest) for work in self.machine.outstanding())
        self._keep()
        self._restart_scorer()

    def extend(self, steps: int) -> None:
        """Run the same recipe with more rounds."""
        run = msgspec.structs.replace(self.config.run, steps=steps)
        self.config = msgspec.structs.replace(self.config, run=run)
        self._keep()
        self._restart_scorer()

    def _restart_scorer(self) -> None:
        self.machine = Curriculum.restore(self.config, self.snapshot, flushed=self.flushed)
        self._catch_up()

    def _catch_up(self) -> None:
        said, commands = set[str](), self.machine.start()
        for sequence in range(self.machine.state.position + 1, len(self.events) + 1):
            message = self.events[sequence - 1]
            if isinstance(message, EnvironmentScored | RoundSummary):
                said.add(message.key)
            commands += self.machine.apply(sequence, message)
        progress = self.machine.state.progress
        self._execute([one for one in commands if unsaid(one, progress, said)])
        for work in self.machine.outstanding():
            if work.tail not in self.tasks and work.tail not in self.in_hand:
                self._execute([Publish(work)])
        self._keep()

    def _execute(self, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Publish(DesignTicket() | EpisodeRequest() as work):
                    assert self.asked.setdefault(work.tail, work) == work
                    if work.tail not in self.in_hand:
                        self.tasks[work.tail] = work
                case Publish(RoundClosed() as closed):
                    self._sample(closed)
                case Publish(message):
                    if message.key not in self.facts:
                        self.facts.add(message.key)
                        self.events.append(message)
                case MarkFlushed(steps):
                    self.flushed = steps

    def _sample(self, message: Sampled | RoundClosed) -> None:
        """Store it; one that is there already is told apart by the broker only if that still remembers."""
        known = message.key in self.sample_keys
        if known and self.chance.random() >= self.luck.twice:
            return
        if known:
            before = next(m for m in reversed(self.samples) if m.key == message.key)
            if isinstance(message, RoundClosed):
                assert before == message, "the same name says the same, whoever says it"
            else:
                assert before.segments == message.segments, "an id stands for its tokens"
        self.sample_keys.add(message.key)
        self.samples.append(message)

    # --- designers and agents -------------------------------------------------------------------------

    def _take(self, tail: str) -> None:
        if self.serving:
            work = self.tasks.pop(tail)
            _, version = self.chance.choice(list(self.serving.values()))
            self.in_hand[tail] = (work, (version,))

    def _finish(self, tail: str) -> None:
        """Answer, and acknowledge unless the answering role dies just before."""
        work, versions = self.in_hand.pop(tail)
        now = [version for _, version in self.serving.values()]
        if now and self.chance.random() < 0.3:
            versions = (*versions, self.chance.choice(now))
        if isinstance(work, DesignTicket):
            answers = [
                answer for part in work.parts() for answer in self.cast.design(part, versions, self.held)
            ]
        else:
            answers = self.cast.play(work, versions)
        again = self.chance.random() < self.luck.redelivered
        if again:
            self.tasks[tail] = work
            self.counts["redelivered"] += 1
            answers = answers[: self.chance.randint(0, len(answers))]
        for answer in answers:
            if not isinstance(answer, EpisodeSample | DesignSample):
                self.events.append(answer)
                continue
            self._sample(answer)
            if isinstance(answer, DesignSample):
                self.held[answer.tail] = answer

    # --- servers --------------------------------------------------------------------------------------

    def _newest(self) -> int | None:
        policies = (m for m in reversed(self.events) if isinstance(m, PolicyPublished))
        return next((policy.version for policy in policies), None)

    def _serve(self, name: str) -> None:
        version = self._newest()
        assert version is not None
        epoch = self.serving.get(name, (f"e{self.epochs}", 0))[0]
        self.serving[name] = (epoch, version)
        self.events.append(serving(name, Version.unpack(version), epoch))

    def _lose_server(self) -> None:
        name = self.chance.choice(list(self.serving))
        epoch, _ = self.serving.pop(name)
        self.epochs += 1
        self.events.append(ServerLost(server=name, epoch=epoch, reason="gone"))

    # --- the learner ----------------------------------------------------------------------------------

    def learner_dies(self) -> None:
        """Kill -9, and a new learner that knows the last checkpoint only."""
        self.crashes += 1
        self.counts["learner died"] += 1
        self._start_learner(self.checkpoint)

    def _start_learner(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        limits = {"agent": self.config.learner.agent, "designer": self.config.learner.designer}
        self.buffer = Buffer(limits, vocabulary=VOCABULARY, state=checkpoint.buffer)  # type: ignore[arg-type]
        for one in checkpoint.buffer.kept:
            kept = self.samples[one.sequence - 1] if one.sequence >= self.floor else None
            assert isinstance(kept, EpisodeSample | DesignSample), "a sample of a checkpoint was purged"
            self.buffer.restore(one, kept)
        assert checkpoint.cursor + 1 >= self.floor, "what the learner must read again was purged"
        self.cursor, self.announced = checkpoint.cursor, checkpoint.announced
        self.history = list(checkpoint.history)
        newest = self._newest()
        self.version, self.lineage = resume(
            checkpoint.version,
            None if newest is None else Version.unpack(newest),
            merge(checkpoint.lineage, getattr(self, "lineage", Lineage())),
        )
        if self.version != checkpoint.version:
            self.parents[self.version] = checkpoint.version
        self.events.append(published(self.version))
        if self.announced is not None:
            self.announced = msgspec.structs.replace(self.announced, version=self.version.pack())
            self.events.append(self.announced)

    def _read_sample(self) -> None:
        record, self.cursor = self.samples[self.cursor], self.cursor + 1
        if not isinstance(record, RoundClosed):
            self.buffer.admit(self.cursor, record)
            return
        if self.buffer.closed(record.round):
            if self.announced is not None and self.announced.round == record.round:
                self.events.append(self.announced)
            return
        selection = self.buffer.close(record, self.version, self.lineage)
        self.history.append(Trained(record, self.version, self.lineage, selection))
        before = self.version
        if selection.samples:
            self.version = Version(before.fence, before.step + 1)
            self.parents[self.version] = before
        self._announce(record, selection)

    def _announce(self, record: RoundClosed, selection: Selection) -> None:
        """Checkpoint, weights, news; the learner may die between any two of them."""
        stepped = bool(selection.samples)
        due = record.final or (stepped and self.version.step % self.checkpoint_every == 0)
        self.announced = BatchTrained(
            round=record.round,
            step=self.version.step,
            version=self.version.pack(),
            trained=tuple(sample.sample for sample in selection.samples),
            dropped=selection.dropped,
            agent_samples=0,
            designer_samples=0,
            max_staleness=max(selection.ages, default=0),
            mean_staleness=0.0,
            metrics={},
            seconds=0.0,
            final=record.final,
        )
        for part in (self._save if due else None, self._publish if stepped else None, self._tell):
            if self._may_crash(self.luck.learner_dies):
                self.learner_dies()
                return
            if part is not None:
                part()
        if due:
            self.floor = min(
                [self.checkpoint.cursor + 1, *(one.sequence for one in self.checkpoint.buffer.kept)]
            )

    def _save(self) -> None:
        state = self.buffer.state()
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=BufferState)
        history = tuple(self.history)
        self.checkpoint = Checkpoint(self.version, self.lineage, self.cursor, state, self.announced, history)

    def _publish(self) -> None:
        self.events.append(published(self.version))

    def _tell(self) -> None:
        assert self.announced is not None
        self.events.append(self.announced)

    # --- what can be asked ----------------------------------------------------------------------------

    def distance(self, one: Version, other: Version) -> int:
        """Optimiser steps between two versions, walked along the tree (a fork is no step)."""

        def path(version: Version) -> dict[Version, int]:
            steps, seen = 0, {version: 0}
            while version in self.parents:
                parent = self.parents[version]
                steps += version.step != parent.step
                seen[parent] = steps
                version = parent
            return seen

        mine, theirs = path(one), path(other)
        return min(mine[version] + theirs[version] for version in mine.keys() & theirs.keys())
