"""The other ranks of a learner: each builds the same trainer and executes the commands of rank 0."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.config import LearnerConfig
from engine.training.command_queue import RankCommands
from engine.training.ranks import Ranks


class TrainerPlan(msgspec.Struct, frozen=True):
    """The arguments of a rank's trainer. The paths must name the same files on all hosts."""

    learner: LearnerConfig
    model: str
    home: str
    seed: int


def lead(ranks: Ranks, plan: TrainerPlan) -> None:
    """Meet the other ranks and send them the plan of their trainers (rank 0). Raises RankLost."""
    ranks.join()
    ranks.send("build", msgspec.json.encode(plan))
    ranks.bound(plan.learner.step_seconds)


def follow(ranks: Ranks, build: Callable[..., Any]) -> None:
    """Work for rank 0 until it ends, with the trainer that ``build`` makes (``engine.training.trainer``).

    Signals end this process until the ranks have met. From then on only rank 0 answers them, because it may
    need the others for its last checkpoint. Raises RankLost when rank 0 is gone, and errors of a step.
    """
    ranks.join()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    command, encoded = ranks.receive()
    assert command == "build"
    plan = msgspec.json.decode(encoded, type=TrainerPlan)
    ranks.bound(plan.learner.step_seconds)
    if plan.learner.threads:
        torch.set_num_threads(plan.learner.threads)
    commands = RankCommands(ranks)
    commands.trainer = build(
        plan.learner, Path(plan.model), Path(plan.home), commands, seed=plan.seed, ranks=ranks
    )
    commands.trainer.run()
    ranks.leave()
