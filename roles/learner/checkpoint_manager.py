"""What a checkpoint has besides the learner's own state, and which ones are kept."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import msgspec
import structlog

from bus import Bus
from bus.messages import EvaluationFinished
from engine.config import Config
from engine.lineage import Lineage, Version
from engine.training.checkpoint import LearnerState, name_of, places, save
from engine.training.checkpoint_tensors import Capsule
from engine.training.retention import Retention, read_best, write_best
from roles.scorer.snapshot import Snapshots

_FINISHED = "event.evaluator.finished"


class Keeper:
    """Writes the checkpoints of a run (in its directory ``run``) and learns which is the best."""

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

    async def save(
        self,
        state: LearnerState,
        capture: Callable[[], Capsule],
        metrics: Mapping[str, float],
        *,
        in_thread: Callable[[Callable[[], Path], str], Awaitable[Any]],
    ) -> None:
        """Write a checkpoint with what ``capture`` returns in the trainer's thread; ``metrics`` are those of
        the last batch. Raises SpadeError when it cannot be written.
        """
        await self.look(state.lineage)
        position, snapshot = await self._curriculum()
        state = msgspec.structs.replace(state, curriculum=position)
        before = self._retention.spared()
        best = self._retention.saved(name_of(state), dict(metrics))
        self._say_what_is_unknown(metrics)
        spared = before | self._retention.spared()

        def write() -> Path:
            place = self._directory
            return save(place, state, capture(), keep=self._keep, spared=spared, curriculum=snapshot)

        await in_thread(write, "checkpoint")
        if best:
            await self._note_best()

    def _say_what_is_unknown(self, metrics: Mapping[str, float]) -> None:
        """Warn of a metric that no batch has: nothing would ever be the best."""
        wanted = self._retention.metric
        if wanted and metrics and wanted not in metrics:
            self._log.warning("learner.best_by_unknown", metric=wanted, known=sorted(metrics))

    async def look(self, lineage: Lineage) -> None:
        """Take in the forks of the run, and what the evaluator has published since the last look."""
        changed = self._retention.settle(lineage)
        if self._retention.suite:
            changed |= await self._take_scores()
        if changed:
            await self._note_best()

    async def _take_scores(self) -> bool:
        """Return whether one of the new scores is that of the best checkpoint."""
        there = [path.name for path in places(self._directory)]
        best = False
        async for record in self._bus.replay("EVENT", start=self._seen + 1, tails=(_FINISHED,)):
            self._seen, found = record.sequence, record.message
            if isinstance(found, EvaluationFinished) and found.suite == self._retention.suite:
                low, high = Version.unpack(found.version), Version.unpack(found.version_high)
                best |= self._retention.scored(low, high, found.win, there)
        return best

    async def _note_best(self) -> None:
        best = self._retention.best
        await anyio.to_thread.run_sync(write_best, self._directory, best)
        if best is None:
            self._log.info("learner.best_gone", reason="it was judged by weights that were abandoned")
        else:
            self._log.info("learner.best", checkpoint=best.checkpoint, score=best.score, by=best.by)

    async def _curriculum(self) -> tuple[int, bytes]:
        """Return the scorer's newest snapshot that can be had, as it keeps it, and its position.

        It is a record: a resume does not need it, because the scorer is not rolled back with the learner.
        """
        found = await self._snapshots.find((await self._bus.stream_info("EVENT")).last)
        if not found:
            return -1, b""
        return found[0].position, zlib.compress(msgspec.msgpack.encode(found[0]), 1)
