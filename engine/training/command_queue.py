"""Hands batches to a training loop that runs for ever, and runs errands between two of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from engine.training.batch import Batch
from engine.training.ranks import IDLE_SECONDS, Ranks
from engine.training.shares import deal


class Closed(Exception):
    """No further batch comes: the training loop ends."""


@dataclass(frozen=True)
class Errand:
    """A call that is made in the training thread while no step runs."""

    function: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True)
class Step:
    """The optimiser steps on one batch. ``build`` makes it, in the training thread."""

    build: Callable[[], Batch]
    result: Future[dict[str, float]] = field(default_factory=Future)


class Feed:
    """The data loader of the trainer: an endless iterator over ``{"batch": Batch, "part": int}``, one a step.

    Commands come from other threads and are served in order. At most one batch is under way, so the queue
    is bounded by what its one owner submits. After :meth:`fail` every command raises that error. The other
    ``ranks`` hear of every step, and get their shares of its batch.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Ranks()
        self._commands: queue.SimpleQueue[Errand | Step | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: Step | None = None
        self._parts: Iterator[dict[str, Any]] = iter(())
        self._metrics: dict[str, float] = {}
        self._error: BaseException | None = None

    def submit(self, command: Errand | Step | None) -> None:
        """Queue a command; None ends the loop after what was queued before it."""
        with self._lock:
            if self._error is None:
                self._commands.put(command)
            elif command is not None:
                command.result.set_exception(self._error)

    def finish(self, metrics: dict[str, float]) -> None:
        """Note the metrics of the running batch; its result is set once the loop comes back."""
        self._metrics = metrics

    def complete(self, metrics: dict[str, float]) -> None:
        """Add what became known after the backward pass to the metrics of the running batch."""
        self._metrics = self._metrics | metrics

    def fail(self, error: BaseException) -> None:
        """Answer the running batch and everything queued, now and later, with ``error``."""
        with self._lock:
            self._error = error
            waiting: list[Errand | Step | None] = [self._running]
            while not self._commands.empty():
                waiting.append(self._commands.get())
        for command in waiting:
            if command is not None and not command.result.done():
                command.result.set_exception(error)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        following = next(self._parts, None)
        if following is not None:
            return following
        if self._running is not None:
            self._running.result.set_result(self._metrics)
            self._running = None
        while True:
            command = self._next()
            if command is None:
                self._ranks.say("close")
                raise Closed
            if not command.result.set_running_or_notify_cancel():
                continue
            try:
                if isinstance(command, Step):
                    shares = deal(command.build(), self._ranks.size)
                    self._running = command
                    self._ranks.say("step")
                    batch = self._ranks.hand_out(shares)
                    self._parts = iter(
                        [{"batch": batch, "part": part} for part in range(len(batch.schedule))]
                    )
                    return next(self._parts)
                command.result.set_result(command.function())
            except Exception as error:
                command.result.set_exception(error)

    def _next(self) -> Errand | Step | None:
        """Return the next command; the other ranks hear from us while there is none."""
        while not self._ranks.alone:
            try:
                return self._commands.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                self._ranks.say("idle")
        return self._commands.get()
