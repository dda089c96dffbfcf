"""The queue of commands of the training loop: batches, and calls between two of them.

Rank 0 reads it from other threads (:class:`CommandQueue`), the other ranks from rank 0
(:class:`RankCommands`). Both are data loaders of the trainer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from engine.training.batch import Batch
from engine.training.ranks import IDLE_SECONDS, Command, Ranks, deal


class Closed(Exception):
    """No further batch follows: the training loop ends."""


@dataclass(frozen=True)
class Call:
    """A call in the training thread while no step runs."""

    function: Callable[[], Any]
    result: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True)
class Step:
    """The optimiser steps on one batch. ``build`` makes it, in the training thread."""

    build: Callable[[], Batch]
    result: Future[dict[str, float]] = field(default_factory=Future)


class CommandQueue:
    """The data loader of the trainer: an endless iterator over ``{"batch": Batch, "part": int}``.

    It yields one item per step. Commands come from other threads and are served in order. At most one batch
    is being trained, so the queue is bounded by what its one owner submits. After :meth:`fail` every command
    raises that error. The other ``ranks`` are told of every step and get their shares of its batch.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks or Ranks()
        self._commands: queue.SimpleQueue[Call | Step | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: Step | None = None
        self._parts: Iterator[dict[str, Any]] = iter(())
        self._metrics: dict[str, float] = {}
        self._error: BaseException | None = None

    def submit(self, command: Call | Step | None) -> None:
        """Queue a command; None ends the loop after what was queued before it."""
        with self._lock:
            if self._error is None:
                self._commands.put(command)
            elif command is not None:
                command.result.set_exception(self._error)

    def finish(self, metrics: dict[str, float]) -> None:
        """Set the metrics of the running batch; its result is set when the loop returns."""
        self._metrics = metrics

    def complete(self, metrics: dict[str, float]) -> None:
        """Add metrics that are known after the backward pass to those of the running batch."""
        self._metrics = self._metrics | metrics

    def fail(self, error: BaseException) -> None:
        """Answer the running batch and everything queued, now and later, with ``error``."""
        with self._lock:
            self._error = error
            waiting: list[Call | Step | None] = [self._running]
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
                self._ranks.send("close")
                raise Closed
            if not command.result.set_running_or_notify_cancel():
                continue
            try:
                if isinstance(command, Step):
                    batch = command.build()
                    self._running = command
                    if not self._ranks.alone:
                        shares = deal(batch, self._ranks.size)
                        self._ranks.send("step")
                        batch = self._ranks.scatter(shares)
                    self._parts = _parts(batch)
                    return next(self._parts)
                command.result.set_result(command.function())
            except Exception as error:
                command.result.set_exception(error)

    def _next(self) -> Call | Step | None:
        """Return the next command; send the other ranks a sign of life while there is none."""
        while not self._ranks.alone:
            try:
                return self._commands.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                self._ranks.send("idle")
        return self._commands.get()


class RankCommands:
    """The data loader of another rank: its share of each batch of rank 0, and rank 0's calls."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._parts: Iterator[dict[str, Any]] = iter(())
        self.trainer: Any = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """Raises Closed when rank 0 ends, RankLost when it is gone."""
        following = next(self._parts, None)
        while following is None:
            self._execute(self._ranks.receive())
            following = next(self._parts, None)
        return following

    def finish(self, metrics: dict[str, float]) -> None:
        """Do nothing: rank 0 reports the metrics."""

    def complete(self, metrics: dict[str, float]) -> None:
        """Do nothing: rank 0 reports the metrics."""

    def _execute(self, command: Command) -> None:
        match command:
            case ("idle",):
                return
            case ("close",):
                raise Closed
            case ("step",):
                self._parts = _parts(self._ranks.scatter(None))
            case ("call", str(name), tuple(arguments)):
                getattr(self.trainer, name)(*arguments)
            case _:
                raise RuntimeError(f"unknown command {command!r}")


def _parts(batch: Batch) -> Iterator[dict[str, Any]]:
    return ({"batch": batch, "part": part} for part in range(len(batch.schedule)))
