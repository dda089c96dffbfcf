"""Work behind the training: threads that write what the trainer's thread has copied for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from engine.training.ranks import Ranks

T = TypeVar("T")


def start(work: Callable[[], T], name: str) -> Future[T]:
    """Do ``work`` in a thread that does not hold the process."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Background:
    """One piece of work after the other; the ranks meet after each.

    Created by all ranks in the same order, and given the same pieces in the same order.
    """

    def __init__(self, ranks: Ranks, name: str) -> None:
        self._meet, self._name = ranks.meeting(name), name
        self._last = start(lambda: None, name)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Do ``work`` behind the training. The future ends when all ranks have done theirs.

        It raises what this rank's work raised, else OSError for that of another rank.
        """
        self._last = start(partial(self._do, self._last, work), self._name)
        return self._last

    def close(self) -> None:
        """Wait for the end of what was submitted."""
        wait([self._last])

    def _do(self, before: Future[None], work: Callable[[], None]) -> None:
        wait([before])
        own: Exception | None = None
        try:
            work()
        except Exception as error:
            own = error
        faults = self._meet("" if own is None else str(own) or repr(own))
        if own is not None:
            raise own
        if found := [f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault]:
            raise OSError("; ".join(found))
