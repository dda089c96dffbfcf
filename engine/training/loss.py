"""The objective, as a pure function of log-probs. Formulas: reference spec 6.3, TRL's GRPO.

Three policies meet. The *behaviour* policy sampled the tokens (its log-probs travel with them). The
*proximal* one is the policy at the start of the optimiser step; the *current* one carries the gradient.
Staleness is corrected by a truncated importance weight behaviour -> proximal; the PPO clip bounds
proximal -> current. With one optimiser step a batch both are the same weights, so that ratio is 1 and the
clip is inactive, as in the reference; ``outside_clip`` reports how far behaviour -> current left the range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import Learner
from engine.training.batch import KINDS, MicroBatch

SUMS = (
    "tokens",
    "ratio_excess",
    "ratio_excess_square",
    "clipped",
    "outside_clip",
    "capped",
    "kl",
    "entropy",
    "loss_agent",
    "loss_designer",
    "loss_supervised",
    "supervised_tokens",
    "loss_kl",
    "loss_entropy",
)


@dataclass(frozen=True)
class Objective:
    """The settings of the loss (a view of the recipe's ``[learner]`` table).

    ``unbiased_kl`` multiplies the KL estimate by the ratio current / proximal, whose gradient makes it that
    of the reverse KL: TRL's default, ``use_bias_correction_kl`` in ``learner.trl``. The reference does not.
    """

    clip_low: float
    clip_high: float
    importance_cap: float
    importance_mode: str
    kl: float
    entropy: float
    unbiased_kl: bool = True

    @classmethod
    def of(cls, learner: Learner) -> Objective:
        return cls(
            learner.clip_low,
            learner.clip_high,
            learner.importance_cap,
            learner.importance_mode,
            learner.kl,
            learner.entropy,
            bool(learner.trl.get("use_bias_correction_kl", True)),
        )


def importance(
    log_ratio: torch.Tensor, mask: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the correction weights of ``log_ratio`` (B, T) and where a ratio is above the cap.

    Shapes (B, T), or (B, 1) in the sequence modes, where a sequence is one row (segment). ``truncate``
    caps a ratio, ``mask`` zeroes one above the cap.
    """
    level, _, action = objective.importance_mode.partition("_")
    if level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True)
    ratio = torch.exp(log_ratio)
    over = ratio > objective.importance_cap
    if action == "truncate":
        return ratio.clamp(max=objective.importance_cap), over
    return ratio.masked_fill(over, 0.0), over


def objective_loss(
    micro: MicroBatch,
    logps: torch.Tensor,
    entropies: torch.Tensor,
    objective: Objective,
    *,
    reference: torch.Tensor | None = None,
    proximal: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a micro-batch (a scalar; the step's loss is their sum) and its statistics.

    ``logps``, ``entropies``, ``reference`` and ``proximal`` are (B, T - 1); ``proximal`` None means the
    current weights. KL is the k3 estimator towards ``reference``, entropy a bonus; both carry the same
    token weights as the policy term. The statistics are sums, a float64 vector in the order of ``SUMS``.
    """
    supervised = (micro["kind"] == KINDS.index("supervised")).unsqueeze(1)
    policy = micro["mask"] & ~supervised
    weights, advantages = micro["weights"], micro["advantages"]
    now = logps.detach()
    proximal = now if proximal is None else proximal
    correction, over = importance((proximal - micro["behaviour"]) * policy, policy, objective)
    ratio = torch.exp((logps - proximal) * policy)
    clipped = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    token_loss = -torch.minimum(ratio * advantages, clipped * advantages) * correction

    policy_weights = weights * policy
    by_row = (token_loss * policy_weights).sum(-1)
    supervised_loss = -(logps * weights * supervised).sum()
    loss = by_row.sum() + supervised_loss
    kl = torch.zeros_like(logps)
    if reference is not None:
        difference = (reference - logps) * policy
        kl = torch.exp(difference) - difference - 1.0
        weighted = kl * ratio if objective.unbiased_kl else kl
        loss = loss + objective.kl * (weighted * policy_weights).sum()
    entropy = entropies * policy
    if objective.entropy:
        loss = loss - objective.entropy * (entropy * policy_weights).sum()

    with torch.no_grad():
        excess = torch.expm1((now - micro["behaviour"]) * policy)
        low, high = ratio < 1.0 - objective.clip_low, ratio > 1.0 + objective.clip_high
        outside = (excess < -objective.clip_low) & (advantages < 0)
        outside |= (excess > objective.clip_high) & (advantages > 0)
        values = (
            policy.sum(),
            excess.sum(),
            excess.square().sum(),
            (((low & (advantages < 0)) | (high & (advantages > 0))) & policy).sum(),
            (outside & policy).sum(),
            (over & policy).sum(),
            kl.sum(),
            entropy.sum(),
            by_row[micro["kind"] == KINDS.index("agent")].sum(),
            by_row[micro["kind"] == KINDS.index("designer")].sum(),
            supervised_loss,
            (micro["mask"] & supervised).sum(),
            objective.kl * (kl * policy_weights).sum(),
            -objective.entropy * (entropy * policy_weights).sum(),
        )
        sums = torch.stack([value.detach().to(torch.float64) for value in values])
    return loss, sums


def metrics(sums: list[float]) -> dict[str, float]:
    """Return the readable metrics of a step from the statistics added over its micro-batches."""
    total = dict(zip(SUMS, sums, strict=True))
    tokens = max(total["tokens"], 1.0)
    excess = total["ratio_excess"] / tokens
    variance = max(0.0, total["ratio_excess_square"] / tokens - excess**2)
    parts = ("loss_agent", "loss_designer", "loss_supervised", "loss_kl", "loss_entropy")
    return {
        "loss": sum(total[part] for part in parts),
        **{part: total[part] for part in parts},
        "ratio_mean": 1.0 + excess,
        "ratio_deviation": variance**0.5,
        "clip_fraction": total["clipped"] / tokens,
        "outside_clip_fraction": total["outside_clip"] / tokens,
        "capped_fraction": total["capped"] / tokens,
        "kl": total["kl"] / tokens,
        "entropy": total["entropy"] / tokens,
        "trained_tokens": total["tokens"],
        "supervised_tokens": total["supervised_tokens"],
    }
