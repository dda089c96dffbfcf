"""The processes (ranks) of one learner: commands from rank 0, and the division of batches among them.

``accelerate launch`` and ``torchrun`` start them and set RANK and WORLD_SIZE. Rank 0 is on the bus and leads;
the others execute its commands, which travel over a gloo group on the CPU of their own. An idle rank 0 sends
one at least every ``IDLE_SECONDS``, so that silence means that it is gone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from engine.errors import SpadeError
from engine.training.batch import Batch, MicroBatch

T = TypeVar("T")
IDLE_SECONDS = 15.0
MEETING_SECONDS = 1800.0
"""The longest wait of ranks for each other at the start, and within one collective call of the training."""
_SLACK_SECONDS = 60.0
Command = tuple[Any, ...]
_CARRIES_LOSS = ("mask", "advantages", "weights")


class RankLost(SpadeError):
    """Another process of the learner is gone or does not answer."""


class Ranks:
    """``rank`` of ``size`` processes. Alone (``size`` 1) a method does nothing or returns its input.

    Every method but the constructor is collective: all ranks call it in the same order. Each raises
    RankLost when another rank is gone, or silent for longer than the bound.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._control: Any = None

    @classmethod
    def launched(cls) -> Ranks:
        """Return the ranks that the launcher of this process set, one process without a launcher."""
        return cls(int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")))

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def join(self) -> None:
        """Meet the other ranks and create the groups of the training, on this rank's own device."""
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
        """Limit the wait for a command, from now on, to ``seconds`` and a little more."""
        if not self.alone:
            with _named("the start"):
                self._control = dist.new_group(
                    backend="gloo", timeout=timedelta(seconds=max(seconds, IDLE_SECONDS) + _SLACK_SECONDS)
                )

    def send(self, *command: Any) -> None:
        """Send a command to all others (rank 0 only)."""
        if not self.alone:
            with _named("a command"):
                dist.broadcast_object_list([command], src=0, group=self._control)

    def receive(self) -> Command:
        """Return the next command of rank 0."""
        received: list[Any] = [None]
        with _named("a command"):
            dist.broadcast_object_list(received, src=0, group=self._control)
        return tuple(received[0])

    def scatter(self, shares: Sequence[T] | None) -> T:
        """Return this rank's share; rank 0 gives ``shares``, one per rank."""
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

    def meeting(self, what: str) -> Callable[[str], list[str]]:
        """Return a call that gives one word of each rank to all, over a group of its own: in any thread."""
        if self.alone:
            return lambda word: [word]
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=MEETING_SECONDS))

        def meet(word: str) -> list[str]:
            words: list[str] = [""] * self.size
            with _named(what):
                dist.all_gather_object(words, word, group=group)
            return words

        return meet

    def leave(self) -> None:
        """End the groups, as the last call of a rank."""
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


def deal(batch: Batch, ranks: int) -> list[Batch]:
    """Return one batch per rank; in each optimiser step their losses add up to that of ``batch``.

    Counts (rows, tokens) stay those of the whole batch; ``padded`` also counts filling rows.
    """
    hands: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    places: dict[tuple[int, ...], tuple[int, ...]] = {}
    filling = 0
    for step in batch.schedule:
        if step in places:
            continue
        dealt, padded = _split([batch.micro_batches[index] for index in step], ranks)
        places[step] = tuple(range(len(hands[0]), len(hands[0]) + len(dealt[0])))
        filling += padded
        for hand, part in zip(hands, dealt, strict=True):
            hand += part
    schedule = tuple(places[step] for step in batch.schedule)
    padded = batch.padded + filling
    return [replace(batch, micro_batches=tuple(hand), schedule=schedule, padded=padded) for hand in hands]


def _split(micro_batches: Sequence[MicroBatch], ranks: int) -> tuple[list[list[MicroBatch]], int]:
    """Return the micro-batches of each rank, and the number of positions that only fill up.

    All ranks get the same number, because sharded weights are gathered by all ranks at once, and about the
    same number of positions: the largest goes first, to the rank with the fewest so far. So the i-th
    micro-batches of all ranks are of similar size. Missing ones are filled with rows without weight.
    """
    count = -(-len(micro_batches) // ranks)
    hands: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for micro in sorted(micro_batches, key=_size, reverse=True):
        free = [rank for rank in range(ranks) if len(hands[rank]) < count]
        rank = min(free, key=lambda rank: (loads[rank], rank))
        hands[rank].append(micro)
        loads[rank] += _size(micro)
    filling = 0
    smallest = min(micro_batches, key=_size)
    for hand in hands:
        while len(hand) < count:
            hand.append(blank(smallest))
            filling += _size(hand[-1])
    return hands, filling


def blank(micro: MicroBatch) -> MicroBatch:
    """Return the first row of ``micro`` without weight in the loss: its gradient is zero, of full shape."""
    row = {name: tensor[:1].clone() for name, tensor in micro.items() if name != "experts"}
    return {name: torch.zeros_like(row[name]) if name in _CARRIES_LOSS else row[name] for name in row}


def _size(micro: MicroBatch) -> int:
    return micro["input_ids"].numel()
