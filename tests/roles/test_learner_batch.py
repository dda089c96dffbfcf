"""The batch of a closed round: it heeds the recipe and the counts of the round."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch
from learner_fakes import random_samples, round_closed
from msgspec.structs import replace
from scenes.memory_bus import MemoryBus

from bus.messages import Credit
from engine.config import (
    Config,
    CurriculumConfig,
    DesignerTraining,
    LearnerConfig,
    ModelConfig,
    RoleTraining,
    RunConfig,
)
from engine.context import RoleContext
from engine.training.batch import KINDS, Batch
from engine.training.buffer import Selection
from engine.training.samples import CreditedSample
from engine.training.supervised import DesignArchive
from roles.learner.role import LearnerRole as LearnerRole

PADDING = 61


def role(directory: Path, **learner: Any) -> LearnerRole:
    """A learner that has not started: of its trainer only the padding is asked for."""
    made = LearnerRole(
        RoleContext(
            config=Config(
                run=RunConfig(name="test"),
                model=ModelConfig(path="none"),
                curriculum=CurriculumConfig(environments=5, plays_per_round=4),
                learner=LearnerConfig(**learner),
            ),
            bus=MemoryBus(run="test", role="learner", instance="0"),
            directory=directory,
            instance="0",
            log=structlog.get_logger(),
        )
    )
    made._trainer = SimpleNamespace(processing_class=SimpleNamespace(pad_token_id=PADDING))
    return made


def batch(learner: LearnerRole, samples: list[CreditedSample], **counts: Any) -> Batch:
    selection = Selection(tuple(samples), (0,) * len(samples), (), 0)
    sent = counts.pop("agents", 0)
    credits = [Credit(f"{number}", "agent", "g", 0.0, 1.0) for number in range(sent)]
    return learner._batch(selection, round_closed(0, credits, **counts))


def weight(made: Batch, kind: str) -> float:
    number = KINDS.index(kind)
    micros = made.micro_batches
    return float(sum(micro["weights"][micro["kind"] == number].sum(dtype=torch.float64) for micro in micros))


def both(agents: int, designers: int) -> list[CreditedSample]:
    return random_samples(agents, seed=1) + random_samples(designers, seed=2, role="designer")


@pytest.mark.parametrize("minibatches", [False, True])
def test_steps_see_all_of_a_batch_or_each_its_part(minibatches: bool, tmp_path: Path) -> None:
    learner = role(tmp_path, steps_per_batch=2, minibatches=minibatches, micro_batch_tokens=60)
    made = batch(learner, both(6, 4))
    first, second = map(set, made.schedule)
    assert first | second == set(range(len(made.micro_batches)))
    assert made.passes == (1 if minibatches else 2)
    assert first.isdisjoint(second) if minibatches else first == second


def test_micro_batches_and_padding_are_the_recipes(tmp_path: Path) -> None:
    made = batch(role(tmp_path, micro_batch_tokens=70), both(8, 0))
    sizes = [micro["input_ids"].numel() for micro in made.micro_batches]
    assert len(sizes) > 1
    assert max(sizes) <= 70
    for micro in made.micro_batches:
        assert (micro["input_ids"][micro["attention_mask"] == 0] == PADDING).all()


def test_a_sample_weighs_by_the_counts_of_its_round(tmp_path: Path) -> None:
    learner = role(tmp_path, agent=RoleTraining(weight=0.5), designer=DesignerTraining(weight=2.0))
    made = batch(learner, both(3, 2), plays=16, designs=4)
    assert weight(made, "agent") == pytest.approx(0.5 * 3 / 20)
    assert weight(made, "designer") == pytest.approx(2.0 * 2 / 20)
    alone = batch(learner, both(0, 2), plays=0, designs=4)
    assert weight(alone, "designer") == pytest.approx(2.0 * 2 / 24), "five environments of four plays"


def test_the_supervised_mix_draws_from_its_examples(tmp_path: Path) -> None:
    learner = role(tmp_path, supervised_mix=0.25, supervised_samples=3)
    texts = random_samples(6, seed=5, role="designer")
    archive = DesignArchive(capacity=9, floor=-1.0)
    archive.note(one._replace(credit=replace(one.credit, accepted=True)) for one in texts)
    learner._examples = archive.examples()
    made = batch(learner, both(2, 0))
    assert made.rows == 2 + 3
    assert weight(made, "supervised") == pytest.approx(0.25)


def test_a_quota_takes_no_weight_from_its_role(tmp_path: Path):
    """Half of the plays that were sent: half of those that B counts."""
    whole = batch(role(tmp_path), both(8, 0), plays=16, designs=0, agents=8)
    half = batch(role(tmp_path, agent=RoleTraining(quota=4)), both(4, 0), plays=16, designs=0, agents=8)
    assert weight(half, "agent") == pytest.approx(weight(whole, "agent")) == pytest.approx(0.5)
