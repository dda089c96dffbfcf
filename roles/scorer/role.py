"""The scorer role: facts in, work and credit out. The rules are in ``curriculum``; this is the shell."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from typing import NamedTuple

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from bus import Lease, Record
from bus.messages import (
    DeadLetter,
    DesignTicket,
    EnvironmentScored,
    EpisodeRequest,
    Heartbeat,
    Message,
    RoundClosed,
    RoundSummary,
    ServerLost,
)
from engine.config import Config
from engine.errors import SpadeError
from roles.base import Role, RoleContext
from roles.scorer import credit, rewards
from roles.scorer.curriculum import Curriculum
from roles.scorer.pacing import TICK_SECONDS, HeartbeatWatch, TrainingProgress
from roles.scorer.snapshot import ScorerSnapshot, Snapshots
from roles.scorer.state import Command, MarkFlushed, Publish

LEASE = "leader.scorer"
_BACKLOG = 256
_SNAPSHOT_EVENTS = 256
_QUIET_SECONDS = 2.0
_LOOKUPS = 32
_ROUNDS_WITHOUT_OUTCOME = 2
_MEND_SECONDS = 60.0


class _Step(NamedTuple):
    """The commands of one event, and the state after it, which is kept once they are done."""

    commands: list[Command]
    snapshot: ScorerSnapshot | None = None
    done: anyio.Event | None = None


class ScorerRole(Role):
    """Follows EVENT with the curriculum and carries out its commands; one at a time in a run (a lease).

    State rests in a snapshot with its EVENT position. Later facts are read again after a start, and their
    commands are carried out again under the same ids.
    """

    name = "scorer"

    def __init__(self, context: RoleContext) -> None:
        super().__init__(context)
        self._snapshots = Snapshots(self.bus, context.directory)
        self._machine = Curriculum(self.config)
        self._since_snapshot = self._queued = 0
        self._newest = ""
        self._without_outcome = 0
        self._leading = False
        self._gap, self._taken = anyio.Event(), anyio.Event()
        self._patience: anyio.CancelScope | None = None

    @classmethod
    def check(cls, config: Config) -> None:
        """Check that the recipe measures what its reward pays for. Raises ConfigError."""
        rewards.check(config)

    async def run(self) -> None:
        compared = credit.mean_group_size(self.config)
        if compared is not None and compared < credit.FEWEST_COMPARED:
            self.log.warning(
                f"Designs are compared in groups of {compared:.1f} on average: a group of two loses half of "
                "what its rewards say, and a design alone learns nothing",
                scope=self.config.learner.designer.scope,
                remedy="more curriculum.environments, fewer designer.skills_per_cohort, "
                'curriculum.schedule = "epoch", or learner.designer.scope = "global"',
            )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._on_drain, tasks.cancel_scope)
            while not self.context.draining.is_set():
                async with self.bus.lease(LEASE) as lease, anyio.create_task_group() as leading:
                    self._leading = True
                    leading.start_soon(self._until_lost, lease, leading.cancel_scope)
                    await self._work()
                    leading.cancel_scope.cancel()
                self._leading = False
            tasks.cancel_scope.cancel()

    def statistics(self) -> dict[str, float]:
        return {
            "leading": float(self._leading),
            "queued_steps": self._queued,
            **self._machine.statistics(),
        }

    async def _on_drain(self, scope: anyio.CancelScope) -> None:
        await self.context.draining.wait()
        self._machine.drain()
        if not self._leading:
            scope.cancel()
        elif self._patience is not None:
            self._patience.cancel()

    async def _until_lost(self, lease: Lease, scope: anyio.CancelScope) -> None:
        await lease.lost.wait()
        self.log.warning("lease lost, another scorer may lead", revision=lease.revision)
        scope.cancel()

    async def _work(self) -> None:
        self._machine = await self._restore()
        if self.context.draining.is_set():
            self._machine.drain()
        caught_up = await self._catch_up()
        outbox, steps = anyio.create_memory_object_stream[_Step](_BACKLOG)
        inbox, records = anyio.create_memory_object_stream[Record](_BACKLOG)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._carry_out, steps)
            async with outbox, anyio.create_task_group() as readers:
                readers.start_soon(self._pump, caught_up + 1, inbox)
                readers.start_soon(self._fail_dead_letters)
                readers.start_soon(self._watch_servers)
                readers.start_soon(self._fail_lost_work, outbox)
                async with records:
                    await self._feed(records, outbox)
                    await self._hand_over(outbox, [], keep=True)
                readers.cancel_scope.cancel()

    async def _restore(self, *, anew: bool = False) -> Curriculum:
        """Return the machine of the newest usable snapshot, or a fresh one that must see everything."""
        self._newest = ""
        info = await self.bus.stream_info("EVENT")
        flushed = await self._snapshots.flushed()
        machine = Curriculum(self.config, flushed=flushed)
        for snapshot in [] if anew else await self._snapshots.find(info.last):
            try:
                machine = Curriculum.restore(self.config, snapshot.state, flushed=flushed)
                self._newest = snapshot.key
                break
            except msgspec.DecodeError as error:
                self.log.warning("snapshot refused", position=snapshot.position, why=str(error))
        position = machine.state.position
        if info.first > position + 1:
            raise SpadeError(
                f"facts {position + 1} to {info.first - 1} of the run are gone from the bus",
                where="scorer",
                remedy="Restore scorer.snapshot in the run directory, or begin a new run with --salvage RUN.",
            )
        return machine

    async def _catch_up(self) -> int:
        """Take in the facts since the snapshot and carry out the commands that are still due.

        Returns the last EVENT sequence taken in. Work without an outcome is asked for again unless it still
        waits in its queue, so a task that the broker lost comes back. An outcome is stored before its task
        leaves the queue, so facts are read once more before a task that left it is asked for again.
        """
        closed = self._machine.state.closed
        commands, last = await self._replay()
        if lost := await self._lost(closed):
            self.log.warning("rounds lost by the broker are closed again", rounds=lost)
            self._machine = await self._restore(anew=True)
            commands, last = await self._replay()
        machine = self._machine
        await self._execute(commands)
        unqueued, fresh = await self._unqueued(machine.outstanding()), list[Command]()
        async for record in self.bus.replay("EVENT", start=last + 1):
            last = record.sequence
            self._newest = record.message.key
            fresh += machine.apply(record.sequence, record.message)
        await self._execute(fresh)
        wanted = {message.tail for message in machine.outstanding()}
        await self._execute([Publish(message) for message in unqueued if message.tail in wanted])
        await self._snapshots.save(self._snapshot())
        return last

    async def _replay(self) -> tuple[list[Command], int]:
        """Feed the machine the new facts. Returns the commands that are still due, and the last sequence."""
        machine, said = self._machine, set[str]()
        commands, last = machine.start(), machine.state.position
        async for record in self.bus.replay("EVENT", start=last + 1):
            last = record.sequence
            if isinstance(record.message, EnvironmentScored | RoundSummary):
                said.add(record.message.key)
            self._newest = record.message.key
            commands += machine.apply(record.sequence, record.message)
        return [one for one in commands if unsaid(one, machine.state.progress, said)], last

    async def _lost(self, closed: int) -> list[int]:
        """Return rounds up to ``closed`` that are neither trained nor waiting for the learner.

        They were stored before the snapshot that knows of them: a broker forgot them, its host lost power.
        """
        trained = self._machine.state.progress.is_trained
        rounds = [number for number in range(max(0, closed - _LOOKUPS), closed + 1) if not trained(number)]
        return [number for number in rounds if await self.bus.last(f"sample.credit.{number}") is None]

    async def _unqueued(self, work: Sequence[Message]) -> list[Message]:
        """Return the part of ``work`` that is in no queue."""
        queued: set[str] = set()
        limit = anyio.CapacityLimiter(_LOOKUPS)

        async def look(message: Message) -> None:
            async with limit:
                if await self.bus.last(message.tail) is not None:
                    queued.add(message.tail)

        async with anyio.create_task_group() as tasks:
            for message in work:
                tasks.start_soon(look, message)
        return [message for message in work if message.tail not in queued]

    async def _pump(self, start: int, inbox: MemoryObjectSendStream[Record]) -> None:
        expected = start
        async with inbox, self.bus.follow("EVENT", start=start) as records:
            async for record in records:
                await inbox.send(record)
                if record.sequence > expected:
                    self._gap.set()
                expected = record.sequence + 1

    async def _fail_lost_work(self, outbox: MemoryObjectSendStream[_Step]) -> None:
        """Fail tasks whose outcome was evicted from EVENT before it was read: no round waits for them.

        An outcome is stored before its task leaves the queue. A task is lost if it has left the queue and is
        still open after every event stored up to that moment was taken in.
        """
        while True:
            await self._gap.wait()
            self._gap = anyio.Event()
            asked, done = self._machine.outstanding(), anyio.Event()
            await outbox.send(_Step([], done=done))
            await done.wait()
            gone = {message.tail for message in await self._unqueued(asked)}
            last = (await self.bus.stream_info("EVENT")).last
            with anyio.move_on_after(_MEND_SECONDS):  # the last one may be forgotten, too
                while self._machine.state.position < last:
                    await self._taken.wait()
            lost = [message for message in self._machine.outstanding() if message.tail in gone]
            self.log.warning("scorer.facts_forgotten", outcomes_lost=len(lost))
            reason = "its outcome was forgotten before it was read"
            await self.bus.publish_all([one for work in lost for one in _failures(work, reason)])

    async def _feed(
        self, records: MemoryObjectReceiveStream[Record], outbox: MemoryObjectSendStream[_Step]
    ) -> None:
        """Feed facts to the machine. A drain ends it: rounds in flight are over, or nothing more comes."""
        deadline = math.inf
        while True:
            wait = math.inf
            if self.context.draining.is_set():
                if deadline == math.inf:
                    deadline = anyio.current_time() + self.config.run.drain_seconds / 2
                wait = min(_QUIET_SECONDS, deadline - anyio.current_time())
                if self._machine.settled or wait <= 0:
                    return
            with anyio.move_on_after(wait) as self._patience:
                record = await records.receive()
            if self._patience.cancelled_caught:
                if deadline < math.inf:
                    return
                continue
            self._newest = record.message.key
            commands = self._machine.apply(record.sequence, record.message)
            self._taken.set()
            self._taken = anyio.Event()
            await self._hand_over(outbox, commands)
            self._stop_without_outcomes(commands)

    def _stop_without_outcomes(self, commands: list[Command]) -> None:
        """Raise SpadeError after two rounds without an outcome because of infrastructure faults.

        Such rounds pass in seconds: an outage would run through the rest of a run and train nothing.
        """
        for command in commands:
            if not isinstance(command, Publish) or not isinstance(command.message, RoundSummary):
                continue
            summary = command.message
            faults = sum(summary.failures.get(kind, 0) for kind in ("infra", "design_infra"))
            if summary.plain is not None or summary.hinted is not None:
                self._without_outcome = 0
            elif faults:
                self._without_outcome += 1
                self.log.warning("round without an outcome", round=summary.round, faults=faults)
            if self._without_outcome >= _ROUNDS_WITHOUT_OUTCOME:
                raise SpadeError(
                    f"{self._without_outcome} rounds had no outcome at all, the last one with {faults} "
                    "faults of the inference servers or of the sandbox",
                    where=f"round {summary.round}",
                    remedy="The logs say what failed. Mend it and run the same command again.",
                )

    async def _hand_over(
        self, outbox: MemoryObjectSendStream[_Step], commands: list[Command], *, keep: bool = False
    ) -> None:
        """Queue commands in order, with the state after them every 256 facts and at the end of a round."""
        self._since_snapshot += 1
        closed = any(isinstance(one, Publish) and isinstance(one.message, RoundClosed) for one in commands)
        keep = keep or closed or self._since_snapshot >= _SNAPSHOT_EVENTS
        if keep:
            self._since_snapshot = 0
        if commands or keep:
            await outbox.send(_Step(commands, self._snapshot() if keep else None))
            self._queued = outbox.statistics().current_buffer_used

    def _snapshot(self) -> ScorerSnapshot:
        machine = self._machine
        return ScorerSnapshot(self.config.run.name, machine.state.position, machine.snapshot(), self._newest)

    async def _execute(self, commands: Sequence[Command]) -> None:
        """Publish what the curriculum asks for; returns when all of it is stored.

        Rounds are closed in order, and the end of a segment is recorded before its last batch goes out.
        """
        messages: list[Message] = []
        for command in commands:
            if isinstance(command, MarkFlushed) or isinstance(command.message, RoundClosed):
                await self.bus.publish_all(messages)
                messages = []
            if isinstance(command, MarkFlushed):
                await self._snapshots.mark_flushed(command.steps)
            else:
                messages.append(command.message)
        await self.bus.publish_all(messages)

    async def _carry_out(self, steps: MemoryObjectReceiveStream[_Step]) -> None:
        """Carry out steps in order, as many at once as wait; keep the newest snapshot once they are done."""
        async with steps:
            async for step in steps:
                batch = [step, *_waiting(steps)]
                await self._execute([command for one in batch for command in one.commands])
                kept = [one.snapshot for one in batch if one.snapshot is not None]
                if kept:
                    await self._snapshots.save(kept[-1])
                for one in batch:
                    if one.done is not None:
                        one.done.set()

    async def _fail_dead_letters(self) -> None:
        """Fail tasks that their queue gave up on, so that no round waits for them."""
        old, wanted = (await self.bus.stream_info("DLQ")).last, self._wanted()
        async with self.bus.follow("DLQ", tails=["dlq.task"]) as letters:
            async for record in letters:
                letter = record.message
                if isinstance(letter, DeadLetter):
                    # Letters that lay there at the start (up to 30 days) are about work that was known then.
                    lost = (wanted if record.sequence <= old else self._wanted()).get(letter.subject)
                    if lost is not None:
                        reason = f"given up by its queue: {letter.reason}"
                        await self.bus.publish_all(_failures(lost, reason))

    def _wanted(self) -> dict[str, Message]:
        return {work.tail: work for work in self._machine.outstanding()}

    async def _watch_servers(self) -> None:
        """Announce the loss of servers whose role has stopped sending heartbeats."""
        presence = HeartbeatWatch()
        async with self.bus.listen("hb.>") as beats, anyio.create_task_group() as tasks:
            tasks.start_soon(_listen, beats, presence)
            while True:
                await anyio.sleep(TICK_SECONDS)
                for server, epoch in presence.tick(self._machine.state.progress.servers).items():
                    self.log.warning("server lost with its role", server=server, epoch=epoch)
                    reason = "nothing is heard of its role any more"
                    await self.bus.publish(ServerLost(server=server, epoch=epoch, reason=reason))


def unsaid(command: Command, progress: TrainingProgress, said: Collection[str]) -> bool:
    """Return whether a command found while catching up must be carried out.

    ``said`` are the keys of published facts. Work is handled apart: only work without an outcome is wanted.
    """
    match command:
        case Publish(RoundClosed() as message):
            return not progress.is_trained(message.round)
        case Publish(DesignTicket() | EpisodeRequest()):
            return False
        case Publish(message):
            return message.key not in said
    return True


async def _listen(beats: AsyncIterator[Message], presence: HeartbeatWatch) -> None:
    async for beat in beats:
        if isinstance(beat, Heartbeat) and beat.state != "stopped":
            presence.heard(beat.instance)


def _waiting(steps: MemoryObjectReceiveStream[_Step]) -> Iterator[_Step]:
    while True:
        try:
            yield steps.receive_nowait()
        except (anyio.WouldBlock, anyio.EndOfStream):
            return


def _failures(work: Message, reason: str) -> list[Message]:
    """Return the news that ``work`` came to nothing, one of each design of a ticket."""
    if isinstance(work, DesignTicket):
        return list(work.failed("infra", reason))
    assert isinstance(work, EpisodeRequest)
    return [work.failed("infra", reason)]
