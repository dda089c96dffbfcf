"""The objective on hand-made numbers."""

from __future__ import annotations

import math

import pytest
import torch

from engine.config import Learner
from engine.training.batch import MicroBatch
from engine.training.loss import SUMS, Objective, metrics, objective_loss

PLAIN = Objective.of(Learner())


def micro(
    behaviour: list[list[float]],
    advantages: list[float],
    mask: list[list[int]] | None = None,
    weight: float = 1.0,
    kind: list[int] | None = None,
) -> MicroBatch:
    values = torch.tensor(behaviour)
    bits = torch.ones_like(values, dtype=torch.bool) if mask is None else torch.tensor(mask).bool()
    return {
        "mask": bits,
        "behaviour": values * bits,
        "advantages": torch.tensor(advantages)[:, None] * bits,
        "weights": weight * bits,
        "kind": torch.tensor(kind or [0] * len(advantages)),
    }


def run(batch: MicroBatch, logps: list[list[float]], objective: Objective = PLAIN, **more: torch.Tensor):
    values = torch.tensor(logps, requires_grad=True)
    entropies = torch.full_like(values, 0.5)
    loss, sums = objective_loss(batch, values, entropies, objective, **more)
    loss.backward()
    return float(loss.detach()), metrics(sums.tolist()), values.grad


def change(**fields: float | str) -> Objective:
    return Objective(**{**PLAIN.__dict__, **fields})  # type: ignore[arg-type]


def test_on_policy_gradient_is_minus_the_advantage():
    loss, values, gradient = run(micro([[-1.0, -2.0]], [2.0]), [[-1.0, -2.0]])
    assert loss == pytest.approx(-4.0)
    assert gradient.tolist() == [[-2.0, -2.0]]
    assert values["ratio_mean"] == 1.0
    assert values["ratio_deviation"] == 0.0


def test_the_importance_weight_is_capped_at_two():
    _, values, gradient = run(micro([[-3.0, -1.5]], [1.0]), [[-1.0, -1.0]])
    assert gradient[0].tolist() == pytest.approx([-2.0, -math.exp(0.5)])
    assert values["capped_fraction"] == 0.5


def test_token_mask_drops_what_exceeds_the_cap():
    gradient = run(micro([[-3.0, -1.5]], [1.0]), [[-1.0, -1.0]], change(importance_mode="token_mask"))[2]
    assert gradient[0].tolist() == pytest.approx([0.0, -math.exp(0.5)])


def test_sequence_modes_weigh_a_row_by_its_product():
    batch = micro([[-1.2, -1.2, -9.0], [-3.0, -1.0, -9.0]], [1.0, 1.0], [[1, 1, 0], [1, 1, 0]])
    logps = [[-1.0, -1.0, -1.0]] * 2
    truncated = run(batch, logps, change(importance_mode="sequence_truncate"))
    assert truncated[2].flatten().tolist() == pytest.approx([-math.exp(0.4)] * 2 + [0.0] + [-2.0] * 2 + [0.0])
    assert truncated[1]["capped_fraction"] == 0.5
    masked = run(batch, logps, change(importance_mode="sequence_mask"))[2]
    assert masked.flatten().tolist() == pytest.approx([-math.exp(0.4)] * 2 + [0.0] * 4)


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
    batch = micro([[-1.0]], [advantage])
    now = -1.0 + math.log(ratio)
    _, values, gradient = run(batch, [[now]], proximal=torch.tensor([[-1.0]]))
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


def test_entropy_is_a_bonus():
    loss, values, _ = run(micro([[-1.0, -1.0]], [0.0], weight=0.5), [[-1.0, -1.0]], change(entropy=0.1))
    assert loss == pytest.approx(-0.1 * 0.5)
    assert values["loss_entropy"] == pytest.approx(loss)


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
