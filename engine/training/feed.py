"""Hands batches to a training loop that runs for ever, and runs errands between two of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from engine.training.batch import Batch


class Closed(Exception):
    """No further batch comes: the training loop ends."""


@dataclass(frozen=True)
class Errand:
    """A call that is made in the training thread while no step runs."""

    function: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True)
class Step:
    """One optimiser step. ``build`` makes the batch, in the training thread."""

    build: Callable[[], Batch]
    result: Future[dict[str, float]] = field(default_factory=Future)


class Feed:
    """The data loader of the trainer: an endless iterator over ``{"batch": Batch}``.

    Commands come from other threads and are served in order. At most one step is under way, so the queue
    is bounded by what its one owner submits. After :meth:`fail` every command raises that error.
    """

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[Errand | Step | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: Step | None = None
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
        """Note the metrics of the running step; its result is set once the loop comes back."""
        self._metrics = metrics

    def complete(self, metrics: dict[str, float]) -> None:
        """Add what became known after the backward pass to the metrics of the running step."""
        self._metrics = self._metrics | metrics

    def fail(self, error: BaseException) -> None:
        """Answer the running step and everything queued, now and later, with ``error``."""
        with self._lock:
            self._error = error
            waiting: list[Errand | Step | None] = [self._running]
            while not self._commands.empty():
                waiting.append(self._commands.get())
        for command in waiting:
            if command is not None and not command.result.done():
                command.result.set_exception(error)

    def __iter__(self) -> Iterator[dict[str, Batch]]:
        return self

    def __next__(self) -> dict[str, Batch]:
        if self._running is not None:
            self._running.result.set_result(self._metrics)
            self._running = None
        while True:
            command = self._commands.get()
            if command is None:
                raise Closed
            if not command.result.set_running_or_notify_cancel():
                continue
            try:
                if isinstance(command, Step):
                    batch = command.build()
                    self._running = command
                    return {"batch": batch}
                command.result.set_result(command.function())
            except Exception as error:
                command.result.set_exception(error)
