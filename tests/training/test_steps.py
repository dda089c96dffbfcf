"""Several optimiser steps on one batch: the decoupled objective in the trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_fakes import random_samples

from engine.config import LearnerConfig, OptimizerConfig, RoleTraining
from engine.training.batch import Batch, build, policy_rows

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
ROLES: dict[Any, RoleTraining] = {"agent": RoleTraining(), "designer": RoleTraining(weight=0.7)}
RATE = 40.0
LEARNER = LearnerConfig(
    optimizer=OptimizerConfig(learning_rate=RATE, weight_decay=0.0, max_grad_norm=0.0),
    trl={"optim": "sgd"},
)


def batch_of(steps: int, *, minibatches: bool = False) -> Batch:
    samples = [*random_samples(7, seed=1), *random_samples(4, seed=2, role="designer")]
    return build(
        policy_rows(samples, ROLES, 11),
        micro_batch_tokens=90,
        padding=0,
        steps=steps,
        minibatches=minibatches,
    )


def row_logps(model: Any, micro: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=micro["input_ids"], attention_mask=micro["attention_mask"]).logits[:, :-1]
    return torch.log_softmax(logits, -1).gather(-1, micro["input_ids"][:, 1:, None])[..., 0]


def by_hand(policy: Path, batch: Batch) -> tuple[dict[str, torch.Tensor], float]:
    """The steps from the definition; returns the weights and the share of clipped tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    with torch.no_grad():
        start = [row_logps(model, micro) for micro in batch.micro_batches]
    clipped = tokens = 0.0
    for step in batch.schedule:
        model.zero_grad()
        for index in step:
            micro, proximal = batch.micro_batches[index], start[index]
            ratio = torch.exp(row_logps(model, micro) - proximal)
            weight = torch.exp(proximal - micro["behaviour"]).clamp(max=2.0)
            gain = torch.min(ratio * micro["advantages"], ratio.clamp(0.8, 1.28) * micro["advantages"])
            (-(weight * gain * micro["weights"])[micro["mask"]].sum()).backward()
            still = torch.where(micro["advantages"] > 0, ratio > 1.28, ratio < 0.8)
            clipped += float((still & micro["mask"]).sum())
            tokens += float(micro["mask"].sum())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    return model.state_dict(), clipped / tokens


@pytest.mark.parametrize(("steps", "minibatches"), [(1, False), (3, False), (3, True)])
def test_steps_on_a_batch_are_those_of_the_definition(
    steps: int, minibatches: bool, start: Callable[..., Any], policy: Path
):
    expected, clipped = by_hand(policy, batch_of(steps, minibatches=minibatches))
    forwards: list[bool] = []
    with start(LEARNER) as running:
        real = running.trainer._log_probs

        def counted(*arguments: Any, **options: Any) -> Any:
            forwards.append(torch.is_grad_enabled())
            return real(*arguments, **options)

        running.call(lambda: setattr(running.trainer, "_log_probs", counted))
        batch = batch_of(steps, minibatches=minibatches)
        values = running.step(batch)
        found = copy.deepcopy(running.call(running.trainer.model.state_dict))
        assert running.trainer.state.global_step == steps
        again = running.step(batch_of(steps, minibatches=minibatches))
        assert running.trainer.state.global_step == 2 * steps
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-4, rtol=2e-3)
    assert values["clip_fraction"] == pytest.approx(clipped, abs=0.02)
    assert (values["clip_fraction"] > 0) is (steps > 1)
    assert values["optimizer_steps"] == steps
    assert values["trained_tokens"] == batch.trained == again["trained_tokens"]
    later = sum(len(step) for step in batch.schedule[1:]) if minibatches else 0
    assert forwards[: len(forwards) // 2].count(False) == later, "the first step's own pass serves the rest"
