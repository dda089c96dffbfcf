"""A rank that is not on the bus: it builds the same trainer and does what rank 0 says, until that ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.config import LearnerConfig
from engine.training.batch import Batch
from engine.training.command_queue import Closed
from engine.training.ranks import Command, Ranks


class Plan(msgspec.Struct, frozen=True):
    """What a rank builds its trainer from. The paths must lead to the same files on all hosts."""

    learner: LearnerConfig
    model: str
    home: str
    seed: int


class Share:
    """The data loader of a follower: its share of each batch that rank 0 hands out, and rank 0's errands."""

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
            self._obey(self._ranks.hear())
            following = next(self._parts, None)
        return following

    def finish(self, metrics: dict[str, float]) -> None:
        """Rank 0 tells what a step came to."""

    def complete(self, metrics: dict[str, float]) -> None:
        """Rank 0 tells what a step came to."""

    def _obey(self, command: Command) -> None:
        match command:
            case ("idle",):
                return
            case ("close",):
                raise Closed
            case ("step",):
                batch: Batch = self._ranks.hand_out(None)
                self._parts = iter([{"batch": batch, "part": part} for part in range(len(batch.schedule))])
            case ("call", str(name), tuple(arguments)):
                getattr(self.trainer, name)(*arguments)
            case _:
                raise RuntimeError(f"unknown command {command!r}")


def lead(ranks: Ranks, plan: Plan) -> None:
    """Meet the followers and tell them what to build (rank 0). Raises RankLost."""
    ranks.join()
    ranks.say("build", msgspec.json.encode(plan))
    ranks.bound(plan.learner.step_seconds)


def follow(ranks: Ranks) -> None:
    """Work for rank 0 until it ends. Raises RankLost when it is gone, and what a step raised.

    Signals end this process until the ranks have met; from then on they are rank 0's to answer, which may
    need the others for its last checkpoint.
    """
    from engine.training.trainer import build

    ranks.join()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    command, encoded = ranks.hear()
    assert command == "build"
    plan = msgspec.json.decode(encoded, type=Plan)
    ranks.bound(plan.learner.step_seconds)
    if plan.learner.threads:
        torch.set_num_threads(plan.learner.threads)
    share = Share(ranks)
    share.trainer = build(plan.learner, Path(plan.model), Path(plan.home), share, seed=plan.seed, ranks=ranks)
    share.trainer.run()
    ranks.leave()
