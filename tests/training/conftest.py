"""One tiny policy for all trainer tests, and a trainer whose loop runs in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from learner_fakes import make_policy

from engine.config import LearnerConfig
from engine.training import checkpoint
from engine.training.batch import Batch
from engine.training.command_queue import Call, CommandQueue, Step


class Running:
    """A trainer at work; ``step`` and ``call`` wait for the result."""

    def __init__(self, trainer: Any, feed: CommandQueue) -> None:
        self.trainer, self._feed = trainer, feed

    def step(self, batch: Batch) -> dict[str, float]:
        command = Step(lambda: batch)
        self._feed.submit(command)
        return command.result.result(timeout=110)

    def call(self, function: Callable[[], Any]) -> Any:
        command = Call(function)
        self._feed.submit(command)
        return command.result.result(timeout=110)

    def capture(self, place: Path) -> checkpoint.CheckpointTensors:
        """Write into the new directory ``place`` as a checkpoint does, and read it again."""
        place.mkdir()
        self.call(lambda: self.trainer.write_checkpoint(place)).result(timeout=110)
        return checkpoint.read_tensors(place)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def start(policy: Path, tmp_path: Path) -> Callable[..., Any]:
    """``start(Learner(...))`` is a context manager of a :class:`Running`, of ``policy`` or another model."""

    @contextmanager
    def started(
        learner: LearnerConfig, *, model: Path = policy, callbacks: tuple[Any, ...] = ()
    ) -> Iterator[Running]:
        from engine.training.trainer import build

        feed = CommandQueue()
        trainer = build(learner, model, tmp_path / "trainer", feed, seed=3)
        for callback in callbacks:
            trainer.add_callback(callback)

        def main() -> None:
            try:
                trainer.run()
            except BaseException as error:
                feed.fail(error)

        thread = threading.Thread(target=main, daemon=True)
        thread.start()
        try:
            yield Running(trainer, feed)
        finally:
            feed.submit(None)
            thread.join(timeout=20)
            assert not thread.is_alive()

    return started
