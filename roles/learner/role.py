"""The learner role: samples in, one batch a round, checkpoint, new weights out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
import msgspec
from anyio.abc import TaskGroup

from bus import Lease, Record
from bus.concurrency import flat_task_group
from bus.messages import BatchTrained, DesignSample, EpisodeSample, PolicyPublished, RoundClosed
from bus.messages import Role as Part
from engine.checks.settings import require_packages
from engine.config import Config, RoleTraining
from engine.errors import SpadeError
from engine.lineage import Lineage, Version
from engine.training.time_shares import TimeShares
from engine.weights import ways
from roles.base import Role, RoleContext
from roles.learner.version_claim import CheckpointsMissing, VersionClaim, missing

if TYPE_CHECKING:
    import torch

    from engine.training.batch import Batch, Example
    from engine.training.buffer import Buffer, KeptSample, Selection
    from engine.training.checkpoint import Checkpoint, LearnerState
    from engine.training.command_queue import CommandQueue
    from engine.training.ranks import Ranks
    from engine.training.sample_age import SampleAges
    from engine.training.samples import Routes
    from engine.training.session import Session
    from engine.training.supervised import DesignArchive
    from engine.training.trainer import PolicyTrainer
    from engine.weights.publisher import Publisher
    from engine.weights.store import Release
    from roles.learner.checkpoint_manager import CheckpointManager

T = TypeVar("T")
_ATTEND_SECONDS = 5.0
_CHECKPOINTS_WHEN_FULL = 2  # so many may hold on to samples in a stream that gets full
_ARCHIVED = 8  # accepted designs kept for each one that the supervised mix draws


class LearnerRole(Role):
    """Follows the sample stream from its checkpoint on; a closed round is one batch.

    Order of effects: optimiser steps, copies for the checkpoint (when due) and for the servers, the new
    version's number in the state of the bus. Then, while the next batch may be trained: weights on the disk,
    ``PolicyPublished``, ``BatchTrained``; and beside them the checkpoint, and the purge of samples that no
    checkpoint needs. A resume forks the lineage when a number beyond its checkpoint's may have been seen.

    State keys: ``lineage`` holds the forks (JSON of ``engine.lineage.Lineage``); ``learner`` the holder and
    its number (``version_claim.ClaimNote``), renewed by compare-and-set before weights are written and before
    they are announced, so that a displaced learner cannot publish.
    """

    name = "learner"
    own_process = True

    _lease: Lease
    _claim: VersionClaim
    _ranks: Ranks
    _session: Session
    _trainer: PolicyTrainer
    _buffer: Buffer
    _ages: SampleAges
    _publisher: Publisher
    _checkpoints: CheckpointManager
    _publishing: Tail
    _saving: Tail

    def __init__(self, context: RoleContext) -> None:
        super().__init__(context)
        self._settings = self.config.learner
        self._training: dict[Part, RoleTraining] = {
            "agent": self._settings.agent,
            "designer": self._settings.designer,
        }
        self._version, self._lineage = Version(0, 0), Lineage()
        self._cursor = 0
        self._announced: BatchTrained | None = None
        self._canary: tuple[int, ...] = ()
        self._vocabulary_size, self._tokenizer = 0, ""
        self._routes: Routes | None = None
        self._examples: tuple[Example, ...] = ()
        self._archive: DesignArchive | None = None
        self._settled = False  # the trainer's weights are those of the announced version
        self._gauges: dict[str, float] = {}
        self._time = TimeShares(time.perf_counter())

    @classmethod
    def check(cls, config: Config) -> None:
        """Check that the recipe's packages and its way for weights are available. Raises ConfigError."""
        from engine.inference.launch import weight_backend

        weight_backend(config)
        require_packages(config.learner)

    @classmethod
    def preload(cls) -> bool:
        """Import the trainer's modules. Returns whether forks can use them: not those that may know a GPU."""
        import torch

        _import_trainer()
        return torch.version.cuda is None and torch.version.hip is None

    @classmethod
    def follow(cls) -> None:
        """Work for the learner that is on the bus, as one of the processes of its launch."""
        from engine.training.rank_worker import follow
        from engine.training.ranks import Ranks
        from engine.training.trainer import build

        follow(Ranks.launched(), build)

    async def run(self) -> None:
        # A killed predecessor keeps its lease for seconds: the trainer's modules are imported meanwhile.
        await anyio.to_thread.run_sync(_import_trainer)
        async with self.bus.lease("leader.learner") as lease, flat_task_group() as tasks:
            self._lease, self._claim = lease, VersionClaim(self.bus, lease=lease.revision)
            tasks.start_soon(_cancel_on, lease.lost, tasks.cancel_scope)
            await self._work()
            tasks.cancel_scope.cancel()
        self._require_lease()

    @property
    def version(self) -> int:
        return self._version.pack()

    def statistics(self) -> dict[str, float]:
        gauges = {"step": float(self._version.step), "cursor": float(self._cursor)} | self._gauges
        return gauges | (self._buffer.statistics() if hasattr(self, "_buffer") else {})

    def _require_lease(self) -> None:
        if self._lease.lost.is_set():
            raise SpadeError(
                "The learner lost its lease",
                remedy="Another learner may run, or the broker was away too long; start the run again.",
            )

    async def _work(self) -> None:
        from engine.inference.tokens import tokenizer_digest
        from engine.models import resolve
        from engine.training.ranks import Ranks
        from engine.training.session import Session

        model = await anyio.to_thread.run_sync(resolve, self.config, self.context.directory)
        self._tokenizer = await anyio.to_thread.run_sync(tokenizer_digest, model)
        if self._settings.supervised_mix and self._settings.supervised_source == "warmstart":
            from engine.training import supervised

            self._examples = await anyio.to_thread.run_sync(supervised.load, model)
        self._ranks = Ranks.launched()
        session = Session(
            lambda feed: self._build(model, feed), threads=self._settings.threads, ranks=self._ranks
        )
        async with session:
            self._session = session
            async with flat_task_group() as tasks:
                self._publishing, self._saving = Tail(tasks), Tail(tasks)
                await self._start()
                self._time = TimeShares(time.perf_counter())
                tasks.start_soon(self._attend)
                async with self.bus.follow("SAMPLE", start=self._cursor + 1) as records:
                    while (record := await self._next(records)) is not None:
                        await self._take(record)
                await self._publishing.wait()
                await self._keep(await self._checkpoint())
                tasks.cancel_scope.cancel()

    def _build(self, model: Path, feed: CommandQueue) -> PolicyTrainer:
        from engine.training.rank_worker import TrainerPlan, lead
        from engine.training.trainer import build

        seed = self.config.run.seed
        if not self._ranks.alone:
            lead(self._ranks, TrainerPlan(self._settings, str(model), str(self._home), seed))
        self._trainer = build(self._settings, model, self._home, feed, seed=seed, ranks=self._ranks)
        return self._trainer

    @property
    def _home(self) -> Path:
        return self.context.directory / "learner"

    async def _start(self) -> None:
        """Load the checkpoint, settle the version, and announce it."""
        from engine.training.buffer import Buffer
        from engine.training.checkpoint import LearnerState, newest
        from engine.training.supervised import DesignArchive
        from roles.learner.checkpoint_manager import CheckpointManager

        self._checkpoints = CheckpointManager(self.config, self.bus, self.context.directory)
        found: list[Checkpoint | None] = []

        def search() -> None:
            found.append(newest(self._home / "checkpoints"))

        async with flat_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, search)  # while the trainer is built
            self._canary, self._vocabulary_size, self._routes = await self._in_thread(
                self._sizes, "start of the trainer"
            )
        (checkpoint,) = found
        published = await self._published()
        if checkpoint is None:
            await self._may_begin(published)
        state = checkpoint.state if checkpoint else LearnerState()
        self._claim.checkpoint = checkpoint is not None
        if checkpoint is not None:
            step = state.version.step * self._settings.steps_per_batch  # TRL counts optimiser steps
            path = str(checkpoint.path)
            await self._in_thread(lambda: self._trainer.load(path, step), "checkpoint")
        self._buffer = Buffer(
            self._training, vocabulary=self._vocabulary_size, routes=self._routes, state=state.buffer
        )
        await self._restore(state.buffer.kept)
        self._cursor, self._announced = state.cursor, state.announced
        if self._settings.supervised_mix and self._settings.supervised_source == "accepted":
            self._archive = DesignArchive(
                capacity=_ARCHIVED * self._settings.supervised_samples,
                floor=self.config.reward.degenerate_reward,
                state=state.accepted,
            )
        await self._report_gap()
        self._version, self._lineage = await self._claim.take(state.version, published, state.lineage)
        self._ages = await self._sample_ages(state)
        self._publisher = ways.publisher(self.config, self.context.directory, self._trainer)
        await self._release()
        await self._publishing.wait()
        if self._announced is not None:
            self._announced = msgspec.structs.replace(self._announced, version=self._version.pack())
            await self.bus.publish(self._announced)
        if checkpoint is not None:
            await self._purge()
        self.log.info("learner.ready", version=str(self._version), cursor=self._cursor)

    async def _restore(self, kept: Sequence[KeptSample]) -> None:
        """Read the samples of the checkpoint's buffer from the stream; those that are gone are lost."""
        wanted = {one.sequence: one for one in kept}
        if wanted:
            async for record in self.bus.replay("SAMPLE", start=min(wanted)):
                if isinstance(record.message, EpisodeSample | DesignSample) and record.sequence in wanted:
                    self._buffer.restore(wanted.pop(record.sequence), record.message)
        for one in wanted.values():
            self._buffer.restore(one, None)

    async def _report_gap(self) -> None:
        """Log samples that are gone after the cursor: a branch without checkpoints has trained them."""
        first = (await self.bus.stream_info("SAMPLE")).first
        if first > self._cursor + 1:
            self.log.error("learner.samples_gone", first=self._cursor + 1, last=first - 1)

    async def _sample_ages(self, state: LearnerState) -> SampleAges:
        """Return how far abandoned branches are repeated, by the batches that were announced so far."""
        from engine.training.sample_age import SampleAges, settings_digest

        facts: list[BatchTrained] = []
        if len(self._lineage.forks) > 1:  # the first life has nothing to repeat
            records = self.bus.replay("EVENT", start=1, tails=(BatchTrained.tail_form,))
            messages = [record.message async for record in records]
            facts = [one for one in messages if isinstance(one, BatchTrained)]
        digest = settings_digest(self._settings)
        return SampleAges(self._version, self._lineage, state.ages, facts, settings=digest)

    async def _published(self) -> Version | None:
        last = await self.bus.last(PolicyPublished.tail_form)
        if last is None or not isinstance(last.message, PolicyPublished):
            return None
        return Version.unpack(last.message.version)

    async def _may_begin(self, published: Version | None) -> None:
        """Refuse to begin at the starting model where the run has checkpoints.

        Our first one would purge the samples that those need. Raises CheckpointsMissing.
        """
        note = await self._claim.read()
        noted = note.checkpoint if note is not None else None
        if not missing(noted, published, every=self._settings.checkpoint_every):
            return
        if not self._settings.start_over:
            raise CheckpointsMissing(self._home / "checkpoints", published)
        self.log.warning("learner.starts_over", published=str(published))

    async def _next(self, records: AsyncIterator[Record]) -> Record | None:
        """Return the next record, None at the drain."""
        record = None
        if self.context.draining.is_set():  # what was read ahead is no wait to cancel
            return None
        async with flat_task_group() as waiting:
            waiting.start_soon(_cancel_on, self.context.draining, waiting.cancel_scope)
            record = await anext(records, None)
            waiting.cancel_scope.cancel()
        return record

    async def _take(self, record: Record) -> None:
        if isinstance(record.message, EpisodeSample | DesignSample):
            cause = self._buffer.admit(record.sequence, record.message)
            if cause == "malformed":
                self.log.warning("learner.sample_refused", sample=record.message.sample, cause=cause)
        elif isinstance(record.message, RoundClosed):
            await self._close(record.sequence, record.message)
        self._cursor = record.sequence

    async def _close(self, sequence: int, message: RoundClosed) -> None:
        """Form and train the batch of a round; a repeated announcement gets the same answer."""
        if self._buffer.closed(message.round):
            await self._publishing.wait()  # its own announcement comes first
            if self._announced is not None and self._announced.round == message.round:
                await self.bus.publish(self._announced)
            return
        started = time.perf_counter()
        self._time.begin("training", started)
        selection = self._buffer.close(message, self._version, self._ages.lineage())
        if selection.missing:
            self.log.warning("learner.samples_missing", round=message.round, missing=selection.missing)
        self._cursor = sequence
        metrics = await self._train(selection, message) if selection.samples else {}
        self._announced = self._summary(message, selection, metrics, time.perf_counter() - started)
        trained = bool(selection.samples)
        due = message.final or (trained and self._version.step % self._settings.checkpoint_every == 0)
        from roles.learner.checkpoint_manager import full_stream

        full = await full_stream(self.bus)
        if full is not None:  # a checkpoint that is being written may make room
            await self._saving.wait()
            full = await full_stream(self.bus)
        if full is not None and not due:
            self.log.warning("learner.checkpoint_early", **full._asdict(), remedy="Raise bus.store_gb.")
            due = True
        finish = await self._checkpoint() if due else None
        if trained:
            await self._release()
        shares = self._time.end_round(time.perf_counter())
        if trained:
            self._announced = msgspec.structs.replace(self._announced, metrics=metrics | shares)
        self._publishing.begin(partial(self.bus.publish, self._announced))
        if finish is not None:
            self._saving.begin(partial(self._keep, finish, _CHECKPOINTS_WHEN_FULL if full else None))
        round_ = {"round": float(message.round), "round_seconds": self._announced.seconds}
        self._gauges = metrics | round_ | shares

    async def _train(self, selection: Selection, message: RoundClosed) -> dict[str, float]:
        """Take the optimiser steps on a batch, which make a new version. Returns its metrics."""
        self._settled = False
        if self._archive is not None:
            self._archive.note(selection.samples)
            self._examples = self._archive.examples()
        metrics = await self._session.step(
            lambda: self._batch(selection, message), seconds=self._settings.step_seconds
        )
        self._version = Version(self._version.fence, self._version.step + 1)
        trained = [sample.sample for sample in selection.samples]
        self._ages.trained(self._version.step, message.round, trained)
        return (
            metrics | self._buffer.lengths() | {"zero_variance_groups": float(message.zero_variance_groups)}
        )

    def _batch(self, selection: Selection, message: RoundClosed) -> Batch:
        from engine.training.batch import batch_size, build, policy_rows, share, supervised_rows
        from engine.training.supervised import draw
        from engine.training.trainer import padding_id

        settings = self._settings
        table = self.config.curriculum
        size = batch_size(
            message.plays * share(settings.agent.quota, message.agent_samples),
            message.designs * share(settings.designer.quota, message.designer_samples),
            table.environments * table.plays_per_round,
        )
        sampling: dict[Part, float] = {
            "agent": self.config.agent.sampling.temperature,
            "designer": self.config.designer.sampling.temperature,
        }
        rows = policy_rows(selection.samples, self._training, size, sampling, self._routes)
        if self._examples:
            seed, step = self.config.run.seed, self._version.step
            examples = draw(self._examples, settings.supervised_samples, seed=seed, step=step)
            rows += supervised_rows(examples, settings.supervised_mix)
        return build(
            rows,
            micro_batch_tokens=settings.micro_batch_tokens,
            padding=padding_id(self._trainer),
            steps=settings.steps_per_batch,
            minibatches=settings.minibatches,
        )

    def _summary(
        self, message: RoundClosed, selection: Selection, metrics: dict[str, float], seconds: float
    ) -> BatchTrained:
        ages, samples = selection.ages, selection.samples
        return BatchTrained(
            round=message.round,
            step=self._version.step,
            version=self._version.pack(),
            trained=tuple(sample.sample for sample in samples),
            dropped=selection.dropped,
            agent_samples=sum(sample.role == "agent" for sample in samples),
            designer_samples=sum(sample.role == "designer" for sample in samples),
            max_staleness=max(ages, default=0),
            mean_staleness=sum(ages) / len(ages) if ages else 0.0,
            metrics=metrics,
            seconds=seconds,
            final=message.final,
        )

    async def _checkpoint(self) -> Callable[[], Awaitable[None]]:
        """Begin a checkpoint; :meth:`_keep` takes what is returned."""
        from engine.training.checkpoint import LearnerState

        self._require_lease()
        self._time.begin("checkpoints", time.perf_counter())
        await self._saving.wait()
        state = LearnerState(
            version=self._version,
            lineage=self._lineage,
            cursor=self._cursor,
            buffer=self._buffer.state(),
            announced=self._announced,
            accepted=self._archive.state() if self._archive is not None else (),
            ages=self._ages.state(),
        )
        metrics = self._announced.metrics if self._announced is not None else {}
        return await self._checkpoints.begin(
            state, self._trainer.write_checkpoint, metrics, in_thread=self._in_thread, beside=self._beside
        )

    async def _keep(self, finish: Callable[[], Awaitable[None]], at_most: int | None = None) -> None:
        """Complete a checkpoint; purge the samples that none of the newest (``at_most``) needs."""
        await finish()
        await self._publishing.wait()  # samples go when their batch is announced
        self._claim.checkpoint = True
        await self._claim.renew()
        await self._purge(at_most)

    async def _release(self) -> None:
        """Begin to publish the current version. Its number is stored first: a successor may not use it."""
        self._require_lease()
        self._time.begin("publishing", time.perf_counter())
        await self._publishing.wait()
        await self._claim.renew(self._version)
        policy, finish = await self._in_thread(self._export, "copy of the weights")

        async def publish() -> None:
            release = await self._beside(finish, "publication of weights")
            await self._publisher.upload(self.bus.blobs, release)
            self._require_lease()
            await self._claim.renew()
            where = {"uri": release.uri, "sha256": release.sha256, "size": release.size}
            await self.bus.publish(msgspec.structs.replace(policy, **where))
            self._settled = True
            await self._publisher.tidy(self.bus.blobs)

        self._publishing.begin(publish)
        if not ways.WAYS[self.config.server.weights].files:
            await self._publishing.wait()  # sent by the trainer's thread

    async def _purge(self, at_most: int | None = None) -> None:
        """Purge the samples that none of the newest checkpoints needs (of ``at_most`` of them)."""
        from engine.training.checkpoint import needed

        keep = min(self._settings.checkpoints_kept, at_most or self._settings.checkpoints_kept)
        below = await anyio.to_thread.run_sync(lambda: needed(self._home / "checkpoints", keep=keep))
        if below is not None:
            await self.bus.purge("SAMPLE", below=below)

    async def _in_thread(self, function: Callable[[], T], what: str) -> T:
        return await self._session.call(function, seconds=self._settings.step_seconds, what=what)

    async def _beside(self, function: Callable[[], T], what: str) -> T:
        return await self._session.beside(function, seconds=self._settings.step_seconds, what=what)

    def _sizes(self) -> tuple[tuple[int, ...], int, Routes | None]:
        from engine.training.router_replay import routes_of
        from engine.training.trainer import canary_tokens

        model = self._trainer.model
        routes = routes_of(model) if self._settings.router_replay else None
        return canary_tokens(self._trainer), int(model.config.get_text_config().vocab_size), routes

    def _dtype(self) -> torch.dtype | None:
        import torch

        return torch.bfloat16 if self.config.model.dtype == "bfloat16" else None

    async def _attend(self) -> None:
        """Send weights to servers that were restarted and cannot fetch them (ways without files)."""
        while not ways.WAYS[self.config.server.weights].files:
            await anyio.sleep(_ATTEND_SECONDS)
            if not self._settled:
                continue
            attend = partial(self._publisher.attend, self._version)
            if found := await self._in_thread(attend, "check of the servers"):
                self.log.info("learner.servers_joined", servers=found)

    def _export(self) -> tuple[PolicyPublished, Callable[[], Release]]:
        """Copy the weights of the current version and compute its canary (in the trainer's thread)."""
        import numpy as np

        finish = self._publisher.begin(self._version, self._trainer, dtype=self._dtype())
        policy = PolicyPublished(
            version=self._version.pack(),
            step=self._version.step,
            uri="",
            sha256="",
            size=0,
            canary_tokens=np.asarray(self._canary, dtype="<i4").tobytes(),
            canary_logprobs=self._trainer.canary(self._canary).astype("<f4").tobytes(),
            vocabulary=self._vocabulary_size,
            tokenizer=self._tokenizer,
        )
        return policy, finish


class Tail:
    """One piece of work after the other, in ``tasks``: what it raises ends them, and those who wait."""

    def __init__(self, tasks: TaskGroup) -> None:
        self._tasks = tasks
        self._done = anyio.Event()
        self._done.set()

    async def wait(self) -> None:
        """Wait until nothing is under way."""
        await self._done.wait()

    def begin(self, work: Callable[[], Awaitable[object]]) -> None:
        """Do ``work`` after what was begun before."""
        before, self._done = self._done, anyio.Event()
        self._tasks.start_soon(self._do, before, work, self._done)

    async def _do(
        self, before: anyio.Event, work: Callable[[], Awaitable[object]], done: anyio.Event
    ) -> None:
        await before.wait()
        await work()
        done.set()


def _import_trainer() -> None:
    import engine.training.trainer  # noqa: F401


async def _cancel_on(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()
