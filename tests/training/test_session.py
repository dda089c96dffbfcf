"""The trainer's thread and its feed: order, errors, deadlines."""

from __future__ import annotations

import threading

import pytest
import torch

from engine.errors import ConfigError, SpadeError
from engine.training.batch import Batch
from engine.training.command_queue import Closed, CommandQueue
from engine.training.session import Session

EMPTY = Batch(micro_batches=(), rows=0, tokens=0, padded=0, trained=0)


class Loop:
    """Consumes the feed like a training loop; ``fault`` is raised by its second step."""

    def __init__(self, feed: CommandQueue, fault: BaseException | None = None) -> None:
        self._feed, self._fault = feed, fault
        self.steps = 0
        self.ended = False

    def run(self) -> None:
        try:
            for _ in self._feed:
                self.steps += 1
                if self._fault is not None and self.steps == 2:
                    raise self._fault
                self._feed.finish({"steps": float(self.steps)})
                self._feed.complete({"grad_norm": 1.0})
        except Closed:
            self.ended = True


async def test_steps_and_errands_are_served_in_order():
    loops: list[Loop] = []

    def build(feed: CommandQueue) -> Loop:
        loops.append(Loop(feed))
        return loops[0]

    async with Session(build, threads=1) as session:
        name = await session.call(lambda: threading.current_thread().name, seconds=5, what="name")
        assert name == "trainer"
        assert await session.step(lambda: EMPTY, seconds=5) == {"steps": 1.0, "grad_norm": 1.0}
        assert await session.call(lambda: loops[0].steps, seconds=5, what="count") == 1
        assert await session.call(torch.get_num_threads, seconds=5, what="threads") == 1
        with pytest.raises(ZeroDivisionError):
            await session.call(lambda: 1 / 0, seconds=5, what="fault")
        assert (await session.step(lambda: EMPTY, seconds=5))["steps"] == 2.0
    assert loops[0].ended


async def test_a_step_that_fails_ends_the_thread_and_answers_everybody():
    async with Session(lambda feed: Loop(feed, SpadeError("broken")), threads=1) as session:
        await session.step(lambda: EMPTY, seconds=5)
        with pytest.raises(SpadeError, match="broken"):
            await session.step(lambda: EMPTY, seconds=5)
        with pytest.raises(SpadeError, match="broken"):
            await session.call(lambda: None, seconds=5, what="anything")


async def test_a_build_that_fails_is_the_error_of_the_first_command():
    def build(_: CommandQueue) -> Loop:
        raise ConfigError("no such model")

    async with Session(build, threads=1) as session:
        with pytest.raises(ConfigError, match="no such model"):
            await session.call(lambda: None, seconds=5, what="start")


async def test_a_batch_that_cannot_be_built_fails_its_step_only():
    def broken() -> Batch:
        raise ValueError("bad rows")

    async with Session(Loop, threads=1) as session:
        with pytest.raises(ValueError, match="bad rows"):
            await session.step(broken, seconds=5)
        assert (await session.step(lambda: EMPTY, seconds=5))["steps"] == 1.0


async def test_a_missed_deadline_has_a_name():
    release = threading.Event()
    async with Session(Loop, threads=1) as session:
        with pytest.raises(SpadeError, match=r"The slow thing took more than 0\.05 s"):
            await session.call(lambda: release.wait(5), seconds=0.05, what="slow thing")
        release.set()
