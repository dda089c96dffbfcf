"""Writes the checkpoints of a run, tracks the best, and measures how full the stream of samples is."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import msgspec
import structlog

from bus import Bus
from bus.messages import EvaluationFinished
from engine.config import Config
from engine.lineage import Lineage, Version
from engine.training.checkpoint import LearnerState, begin, name_of, places
from engine.training.retention import Retention, read_best, write_best
from engine.weights.bus_capacity import FULL_SHARE
from roles.scorer.snapshot import Snapshots

InThread = Callable[[Callable[[], Any], str], Awaitable[Any]]


class CheckpointManager:
    """Writes the checkpoints of a run (in its directory ``run``) and tracks which is the best."""

    def __init__(self, config: Config, bus: Bus, run: Path) -> None:
        self._bus = bus
        self._directory = run / "learner" / "checkpoints"
        self._keep = config.learner.checkpoints_kept
        self._snapshots = Snapshots(bus, run)
        best = read_best(self._directory)
        self._retention = Retention(config.learner.best_by, every=config.evaluator.every, best=best)
        for path in reversed(places(self._directory)):
            self._retention.saved(path.name, {})  # its score may still be to come
        self._seen = 0
        self._log = structlog.get_logger("spade.learner")

    async def begin(
        self,
        state: LearnerState,
        write: Callable[[Path], Future[None]],
        metrics: Mapping[str, float],
        *,
        in_thread: InThread,
        beside: InThread,
    ) -> Callable[[], Awaitable[None]]:
        """Begin a checkpoint; await what is returned to complete it, with the training going on.

        ``write`` is called in the trainer's thread (``engine.training.checkpoint.begin``), by ``in_thread``;
        the checkpoint is completed in another, by ``beside``. ``metrics`` are those of the last batch. Both
        raise SpadeError when it cannot be written.
        """
        await self.update_best(state.lineage)
        position, snapshot = await self._curriculum()
        state = msgspec.structs.replace(state, curriculum=position)
        before = self._retention.spared()
        best = self._retention.saved(name_of(state), dict(metrics))
        self._warn_of_unknown_metric(metrics)
        spared = before | self._retention.spared()
        settings: dict[str, Any] = {"keep": self._keep, "spared": spared, "curriculum": snapshot}
        complete = await in_thread(
            lambda: begin(self._directory, state, write, **settings), "copy for a checkpoint"
        )

        async def finish() -> None:
            await beside(complete, "checkpoint")
            if best:
                await self._note_best()

        return finish

    def _warn_of_unknown_metric(self, metrics: Mapping[str, float]) -> None:
        """Warn of a ``best_by`` metric that no batch has: no checkpoint would ever be the best."""
        wanted = self._retention.metric
        if wanted and metrics and wanted not in metrics:
            self._log.warning("learner.best_by_unknown", metric=wanted, known=sorted(metrics))

    async def update_best(self, lineage: Lineage) -> None:
        """Apply the forks of the run and the evaluator's scores since the last call."""
        changed = self._retention.settle(lineage)
        if self._retention.suite:
            changed |= await self._take_scores()
        if changed:
            await self._note_best()

    async def _take_scores(self) -> bool:
        """Return whether one of the new scores is that of the best checkpoint."""
        there = [path.name for path in places(self._directory)]
        best = False
        async for record in self._bus.replay(
            "EVENT", start=self._seen + 1, tails=(EvaluationFinished.tail_form,)
        ):
            self._seen, found = record.sequence, record.message
            if isinstance(found, EvaluationFinished) and found.suite == self._retention.suite:
                low, high = Version.unpack(found.version), Version.unpack(found.version_high)
                best |= self._retention.scored(low, high, found.win, there)
        return best

    async def _note_best(self) -> None:
        best = self._retention.best
        await anyio.to_thread.run_sync(write_best, self._directory, best)
        if best is None:
            self._log.info("learner.best_gone", reason="its score is that of abandoned weights")
        else:
            self._log.info("learner.best", checkpoint=best.checkpoint, score=best.score, by=best.by)

    async def _curriculum(self) -> tuple[int, bytes]:
        """Return the position of the scorer's newest available snapshot and the snapshot as bytes.

        It is a record: a resume does not need it, because the scorer is not rolled back with the learner.
        """
        found = await self._snapshots.find((await self._bus.stream_info("EVENT")).last)
        if not found:
            return -1, b""
        return found[0].position, zlib.compress(msgspec.msgpack.encode(found[0]), 1)


class FullStream(NamedTuple):
    """A stream that gets full: the ``bytes`` in it, of at most ``bound``."""

    stream: str
    bytes: int
    bound: int


async def full_stream(bus: Bus) -> FullStream | None:
    """Return the stream of samples when it is above its share, None below.

    Only a checkpoint lets samples go. No round can be closed in a full stream, so a learner that waited for
    its next due checkpoint would wait without end.
    """
    info = await bus.stream_info("SAMPLE")
    full = info.bound and info.bytes > FULL_SHARE * info.bound
    return FullStream("SAMPLE", info.bytes, info.bound) if full else None
