"""The thread that owns the model: torch works there, the event loop stays free."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Protocol, TypeVar

import anyio
import torch

from engine.errors import SpadeError
from engine.training import background
from engine.training.batch import Batch
from engine.training.command_queue import Call, CommandQueue, Step
from engine.training.ranks import Ranks

T = TypeVar("T")
_JOIN_SECONDS = 5.0


class Trainer(Protocol):
    """The trainer of a session: ``run`` serves the feed until it is closed."""

    def run(self) -> None: ...


class Session:
    """Builds a trainer in a thread of its own and serves it: one command at a time, each with a deadline.

    ``build`` gets the feed. ``threads`` is the number of torch's threads in this process, 0 leaves torch's
    own choice. A command that misses its deadline raises SpadeError; the thread cannot be stopped then, so
    the process should end (the thread is a daemon and does not hold it). ``ranks`` are the processes of the
    learner; ``build`` meets the others.
    """

    def __init__(
        self, build: Callable[[CommandQueue], Trainer], *, threads: int, ranks: Ranks | None = None
    ) -> None:
        self._ranks = ranks or Ranks()
        self._build = build
        self._threads = threads
        self._feed = CommandQueue(self._ranks)
        self._thread = threading.Thread(target=self._main, name="trainer", daemon=True)

    async def __aenter__(self) -> Session:
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._feed.submit(None)
        with anyio.CancelScope(shield=True):
            await asyncio.to_thread(self._thread.join, _JOIN_SECONDS)

    async def call(self, function: Callable[[], T], *, seconds: float, what: str) -> T:
        """Run ``function`` in the thread while no step runs; its exception comes out here.

        Raises SpadeError named after ``what`` when it takes longer than ``seconds``, and what made the
        thread end if it has ended.
        """
        errand = Call(function)
        self._feed.submit(errand)
        return await self._wait(errand.result, seconds, what)

    async def beside(self, function: Callable[[], T], *, seconds: float, what: str) -> T:
        """Run ``function`` in another thread, while the trainer goes on. Raises as :meth:`call`."""
        return await self._wait(background.start(function, what), seconds, what)

    async def step(self, build: Callable[[], Batch], *, seconds: float) -> dict[str, float]:
        """Take the optimiser steps on the batch that ``build`` makes. Returns its metrics."""
        step = Step(build)
        self._feed.submit(step)
        return await self._wait(step.result, seconds, "optimiser step")

    async def _wait(self, result: Future[T], seconds: float, what: str) -> T:
        try:
            with anyio.fail_after(seconds):
                return await asyncio.wrap_future(result)
        except TimeoutError as error:
            raise SpadeError(
                f"The {what} took more than {seconds:g} s",
                remedy="Raise learner.step_seconds. Lower learner.micro_batch_tokens where a step is slow; "
                "writing needs a faster disk.",
            ) from error

    def _main(self) -> None:
        try:
            if self._threads:
                torch.set_num_threads(self._threads)
            self._build(self._feed).run()
            self._ranks.leave()
        except BaseException as error:
            self._feed.fail(error)
        else:
            self._feed.fail(SpadeError("The trainer has ended"))
