"""The objective on hand-made numbers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import DesignerTraining, LearnerConfig, RoleTraining
from engine.training.batch import MicroBatch
from engine.training.loss import SUMS, Objective, metrics, objective_loss

PLAIN = Objective.of(LearnerConfig())
GOLDEN = Path(__file__).parent / "golden" / "objective.jsonl"


def micro(
    behaviour: list[list[float]],
    advantages: list[float],
    mask: list[list[int]] | None = None,
    weight: float = 1.0,
    kind: list[int] | None = None,
    proximal: list[list[float]] | None = None,
) -> MicroBatch:
    values = torch.tensor(behaviour)
    bits = torch.ones_like(values, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    batch = {
        "mask": bits,
        "behaviour": values * bits,
        "advantages": torch.tensor(advantages)[:, None] * bits,
        "weights": weight * bits,
        "kind": torch.tensor(kind or [0] * len(advantages)),
    }
    return batch if proximal is None else batch | {"proximal": torch.tensor(proximal)}


def run(batch: MicroBatch, logps: list[list[float]], objective: Objective = PLAIN, **more: torch.Tensor):
    values = torch.tensor(logps, requires_grad=True)
    entropies = torch.full_like(values, 0.5)
    loss, sums = objective_loss(batch, values, entropies, objective, **more)
    loss.backward()
    return float(loss.detach()), metrics(sums.tolist()), values.grad


def change(mode: str = "", **fields: Any) -> Objective:
    changed = replace(PLAIN, **fields)
    if mode:
        terms = replace(PLAIN.agent, importance_mode=mode)
        changed = replace(changed, agent=terms, designer=terms)
    return changed


@pytest.mark.parametrize("line", GOLDEN.read_text().splitlines())
def test_one_step_a_batch_is_what_it_always_was(line: str):
    """Losses and gradients of the objective before it knew roles and several steps."""
    case = json.loads(line)
    mask = torch.tensor(case["mask"]).bool()
    batch = {
        "mask": mask,
        "behaviour": torch.tensor(case["behaviour"]),
        "advantages": torch.tensor(case["advantages"])[:, None] * mask,
        "weights": torch.tensor(case["weights"])[:, None] * mask,
        "kind": torch.tensor(case["kind"]),
    }
    objective = change(case["mode"], kl=case["kl"], entropy=case["entropy"])
    logps = torch.tensor(case["logps"], requires_grad=True)
    reference = torch.tensor(case["reference"]) if case["kl"] else None
    loss, _ = objective_loss(batch, logps, torch.tensor(case["entropies"]), objective, reference=reference)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(case["loss"], rel=2e-6)
    torch.testing.assert_close(logps.grad, torch.tensor(case["gradient"]), rtol=2e-6, atol=1e-8)


def test_on_policy_gradient_is_minus_the_advantage():
    loss, values, gradient = run(micro([[-1.0, -2.0]], [2.0]), [[-1.0, -2.0]])
    assert loss == pytest.approx(-4.0)
    assert gradient.tolist() == [[-2.0, -2.0]]
    assert values["ratio_mean"] == 1.0
    assert values["ratio_deviation"] == 0.0


def test_each_role_has_its_own_terms():
    """The designer's cap and clip range are wider, its weight is that of whole segments."""
    learner = LearnerConfig(
        agent=RoleTraining(importance_mode="token_mask"),
        designer=DesignerTraining(
            clip_low=0.5, clip_high=4.0, importance_cap=6.0, importance_mode="sequence_truncate"
        ),
    )
    objective = Objective.of(learner)
    assert (objective.agent.clip_high, objective.agent.importance_cap) == (0.28, 2.0)
    batch = micro([[-2.0, -1.5]] * 2, [1.0, 1.0], kind=[0, 1])
    _, values, gradient = run(batch, [[-1.0, -1.0]] * 2, objective)
    assert gradient.tolist() == [
        pytest.approx([0.0, -math.exp(0.5)]),
        pytest.approx([-math.exp(1.5)] * 2),
    ]
    assert (values["capped_fraction_agent"], values["capped_fraction_designer"]) == (0.5, 0.0)
    assert values["capped_fraction"] == 0.25
    moved = micro([[-1.0]] * 2, [1.0, 1.0], kind=[0, 1], proximal=[[-1.0]] * 2)
    _, values, gradient = run(moved, [[-1.0 + math.log(1.5)]] * 2, objective)
    assert gradient[0].tolist() == [0.0]
    assert gradient[1].tolist() == pytest.approx([-1.5])
    assert (values["clip_fraction_agent"], values["clip_fraction_designer"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "flows"),
    [
        (1.27, 1.0, True),
        (1.3, 1.0, False),
        (1.3, -1.0, True),
        (0.81, -1.0, True),
        (0.7, -1.0, False),
        (0.7, 1.0, True),
    ],
)
def test_the_clip_is_asymmetric(ratio: float, advantage: float, flows: bool):
    now = -1.0 + math.log(ratio)
    _, values, gradient = run(micro([[-1.0]], [advantage], proximal=[[-1.0]]), [[now]])
    assert (abs(float(gradient)) > 0) is flows
    assert values["clip_fraction"] == (0.0 if flows else 1.0)


def test_masked_positions_count_for_nothing():
    batch = micro([[-1.0, float(-50)]], [1.0], [[1, 0]])
    _, values, gradient = run(batch, [[-1.0, -1.0]], change(kl=0.3, entropy=0.1), reference=torch.zeros(1, 2))
    assert gradient[0, 1] == 0
    assert values["trained_tokens"] == 1
    assert values["entropy"] == 0.5


def test_kl_is_k3_towards_the_reference():
    reference = torch.tensor([[-1.5]])
    loss, values, _ = run(micro([[-1.0]], [0.0]), [[-1.0]], change(kl=0.2), reference=reference)
    k3 = math.exp(-0.5) + 0.5 - 1
    assert values["kl"] == pytest.approx(k3)
    assert loss == pytest.approx(0.2 * k3) == values["loss_kl"]


def test_supervised_rows_are_nll_and_nothing_else():
    batch = micro([[0.0], [-1.0]], [0.0, 1.0], weight=0.25, kind=[2, 1])
    loss, values, gradient = run(batch, [[-3.0], [-1.0]])
    assert loss == pytest.approx(0.25 * 3.0 - 0.25)
    assert gradient.flatten().tolist() == [-0.25, -0.25]
    assert values["loss_supervised"] == 0.75
    assert values["loss_designer"] == -0.25
    assert values["loss_agent"] == 0.0
    assert (values["trained_tokens"], values["supervised_tokens"]) == (1, 1)


def test_statistics_add_up_over_micro_batches():
    torch.manual_seed(0)
    behaviour = (-torch.rand(6, 5) * 4).tolist()
    logps = (-torch.rand(6, 5) * 4).tolist()
    advantages = torch.randn(6).tolist()
    whole = micro(behaviour, advantages, kind=[0, 1, 0, 1, 0, 1])
    _, expected, _ = run(whole, logps)
    total = torch.zeros(len(SUMS), dtype=torch.float64)
    for low in (0, 2, 4):
        part = {name: tensor[low : low + 2] for name, tensor in whole.items()}
        values = torch.tensor(logps[low : low + 2])
        total += objective_loss(part, values, torch.full_like(values, 0.5), PLAIN)[1]
    assert metrics(total.tolist()) == pytest.approx(expected, rel=1e-5)


def test_the_decoupled_gradient_is_that_of_the_formula():
    """The weight behaviour -> proximal is cut at the cap, the ratio proximal -> current by the clip."""
    torch.manual_seed(4)
    behaviour, proximal = -torch.rand(5, 7) * 3, -torch.rand(5, 7) * 3
    now = (proximal + 0.3 * torch.randn(5, 7)).requires_grad_(True)
    advantages = torch.randn(5)
    batch = micro(behaviour.tolist(), advantages.tolist(), weight=0.1, proximal=proximal.tolist())
    _, values, gradient = run(batch, now.tolist())
    weight = torch.exp(proximal - behaviour).clamp(max=2.0)
    ratio = torch.exp(now - proximal)
    gain = torch.min(ratio * advantages[:, None], ratio.clamp(0.8, 1.28) * advantages[:, None])
    (-0.1 * weight * gain).sum().backward()
    torch.testing.assert_close(gradient, now.grad)
    assert 0 < values["clip_fraction"] < 1
    assert 0 < values["capped_fraction"] < 1
    alone = {name: tensor for name, tensor in batch.items() if name != "proximal"}
    assert run(alone, now.tolist())[1]["clip_fraction"] == 0.0


def test_behaviour_kl_is_k3_between_the_sampler_and_the_trainer():
    _, values, _ = run(micro([[-1.0, -2.0]], [1.0]), [[-1.5, -2.0]])
    assert values["behaviour_kl"] == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 2)


def test_metrics_of_several_steps_are_means():
    batch = micro([[-3.0, -1.5]], [1.0], kind=[1])
    values = torch.tensor([[-1.0, -1.0]])
    once, sums = objective_loss(batch, values, torch.ones(1, 2), PLAIN)
    found = metrics((3 * sums).tolist(), steps=3, passes=3)
    assert found == pytest.approx(metrics(sums.tolist()))
    assert found["loss"] == pytest.approx(float(once))
    assert "ratio_mean_agent" not in found
