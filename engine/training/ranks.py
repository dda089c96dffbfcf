"""The processes of one learner: which of them this is, and what rank 0 says to the others.

``accelerate launch`` and ``torchrun`` start them and set RANK and WORLD_SIZE. Rank 0 is on the bus and leads;
the others do what it says, over a gloo group on the CPU that is there for this alone. Rank 0 says something
at least every ``IDLE_SECONDS`` while it has nothing to do, so that silence means that it is gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from engine.errors import SpadeError

T = TypeVar("T")
IDLE_SECONDS = 15.0
MEETING_SECONDS = 1800.0
"""How long the ranks wait for each other at the start, and within one collective call of the training."""
_SLACK_SECONDS = 60.0
Command = tuple[Any, ...]


class RankLost(SpadeError):
    """Another process of the learner is gone or does not answer."""


class Ranks:
    """``rank`` of ``size`` processes. Alone (``size`` 1) every method does nothing or returns its input.

    Every method but the constructor is collective: all ranks call it in the same order. Each raises
    RankLost when another rank is gone, or silent for longer than the bound.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._control: Any = None

    @classmethod
    def launched(cls) -> Ranks:
        """Return what the launcher of this process set, one process without a launcher."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def join(self) -> None:
        """Meet the other ranks; the groups of the training are made here, on this rank's own device."""
        if self.alone:
            return
        gpu = torch.cuda.is_available()
        if gpu:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        with _named("the start"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timedelta(seconds=MEETING_SECONDS)
            )
            self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=MEETING_SECONDS))

    def bound(self, seconds: float) -> None:
        """From now on a rank that hears nothing for ``seconds`` and a little more gives up."""
        if not self.alone:
            with _named("the start"):
                self._control = dist.new_group(
                    backend="gloo", timeout=timedelta(seconds=max(seconds, IDLE_SECONDS) + _SLACK_SECONDS)
                )

    def say(self, *command: Any) -> None:
        """Send a command to all others (rank 0 only)."""
        if not self.alone:
            with _named("a command"):
                dist.broadcast_object_list([command], src=0, group=self._control)

    def hear(self) -> Command:
        """Return the next command of rank 0."""
        heard: list[Any] = [None]
        with _named("a command"):
            dist.broadcast_object_list(heard, src=0, group=self._control)
        return tuple(heard[0])

    def hand_out(self, shares: Sequence[T] | None) -> T:
        """Return this rank's share; rank 0 gives ``shares``, one a rank."""
        if self.alone:
            assert shares is not None
            return shares[0]
        got: list[Any] = [None]
        with _named("a batch"):
            dist.scatter_object_list(got, list(shares) if shares else None, src=0, group=self._control)
        share: T = got[0]
        return share

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` over all ranks, on the CPU."""
        summed = values.detach().cpu().clone()
        if not self.alone:
            with _named("the statistics of a step"):
                dist.all_reduce(summed, group=self._control)
        return summed

    def leave(self) -> None:
        """End the groups; the last thing a rank does."""
        if not self.alone and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:  # torch and gloo have no class of their own for it
        raise RankLost(
            f"A process of the learner waited for {what} in vain: {error}",
            remedy="Look at the other ranks' last lines; all of them are started again together.",
        ) from error
