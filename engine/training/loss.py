"""The objective as a pure function of log-probs. Formulas: ``docs/loss.md``, reference spec 6.3, TRL's GRPO.

Three policies meet. The *behaviour* policy sampled the tokens (its log-probs travel with them). The
*proximal* one is the policy at the start of the batch; the *current* one carries the gradient. Staleness is
corrected by an importance weight behaviour -> proximal; the PPO clip bounds proximal -> current, what the
steps on this batch have moved (the decoupled objective, arXiv:2110.00641 and arXiv:2505.24298). With one
optimiser step a batch both are the same weights, so that ratio is 1 and the clip is inactive, as in the
reference; ``outside_clip`` reports how far behaviour -> current left the range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import LearnerConfig, RoleTraining
from engine.training.batch import KINDS, MicroBatch

ROLES = ("agent", "designer")
_SHARED = ("loss_agent", "loss_designer", "loss_supervised", "loss_kl", "loss_entropy", "supervised_tokens")
_BY_ROLE = (
    "tokens",
    "ratio_excess",
    "ratio_excess_square",
    "behaviour_kl",
    "clipped",
    "outside_clip",
    "capped",
    "kl",
    "entropy",
)
SUMS = (*_SHARED, *(f"{name}_{role}" for role in ROLES for name in _BY_ROLE))


@dataclass(frozen=True)
class Terms:
    """The clip range around 1 and the importance weight of one role."""

    clip_low: float
    clip_high: float
    importance_cap: float
    importance_mode: str

    @classmethod
    def of(cls, learner: LearnerConfig, role: RoleTraining) -> Terms:
        """Return the settings of ``role``, those of ``[learner]`` where it has none."""
        return cls(
            role.clip_low or learner.clip_low,
            role.clip_high or learner.clip_high,
            role.importance_cap or learner.importance_cap,
            role.importance_mode or learner.importance_mode,
        )


@dataclass(frozen=True)
class Objective:
    """The settings of the loss (a view of the recipe's ``[learner]`` table).

    ``unbiased_kl`` multiplies the KL estimate by the ratio current / proximal, whose gradient makes it that
    of the reverse KL: TRL's default, ``use_bias_correction_kl`` in ``learner.trl``. The reference does not.
    """

    agent: Terms
    designer: Terms
    kl: float
    entropy: float
    unbiased_kl: bool = True

    @classmethod
    def of(cls, learner: LearnerConfig) -> Objective:
        return cls(
            Terms.of(learner, learner.agent),
            Terms.of(learner, learner.designer),
            learner.kl,
            learner.entropy,
            bool(learner.trl.get("use_bias_correction_kl", True)),
        )


def importance(
    log_ratio: torch.Tensor, mask: torch.Tensor, terms: Terms
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the correction weights of ``log_ratio`` (B, T) and where a ratio is above the cap.

    Shapes (B, T); (B, 1) in the sequence and geometric modes, where one ratio stands for a row (segment):
    the product of its tokens' ratios, or their geometric mean. ``truncate`` caps a ratio, ``mask`` zeroes
    one above the cap.
    """
    level, _, action = terms.importance_mode.partition("_")
    if level != "token":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True)
    if level == "geometric":
        log_ratio = log_ratio / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = torch.exp(log_ratio)
    over = ratio > terms.importance_cap
    if action == "truncate":
        return ratio.clamp(max=terms.importance_cap), over
    return ratio.masked_fill(over, 0.0), over


def objective_loss(
    micro: MicroBatch,
    logps: torch.Tensor,
    entropies: torch.Tensor,
    objective: Objective,
    *,
    reference: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a micro-batch (a scalar; the step's loss is their sum) and its statistics.

    ``logps``, ``entropies`` and ``reference`` are (B, T - 1), as is ``micro["proximal"]``, without which the
    current weights are the proximal ones. KL is the k3 estimator towards ``reference``, entropy a bonus; both
    carry the same token weights as the policy term. The statistics are sums, a float64 vector in the order
    of ``SUMS``.
    """
    designer = (micro["kind"] == KINDS.index("designer")).unsqueeze(1)
    supervised = (micro["kind"] == KINDS.index("supervised")).unsqueeze(1)
    policy = micro["mask"] & ~supervised
    weights, advantages = micro["weights"], micro["advantages"]
    now = logps.detach()
    proximal = micro.get("proximal", now)
    correction, over = _correction(proximal - micro["behaviour"], policy, designer, objective)
    low = torch.where(designer, objective.designer.clip_low, objective.agent.clip_low)
    high = torch.where(designer, objective.designer.clip_high, objective.agent.clip_high)
    ratio = torch.exp((logps - proximal) * policy)
    clipped = ratio.clamp(1.0 - low, 1.0 + high)
    token_loss = -torch.minimum(ratio * advantages, clipped * advantages) * correction

    policy_weights = weights * policy
    by_row = (token_loss * policy_weights).sum(-1)
    supervised_loss = -(logps * weights * supervised).sum()
    loss = by_row.sum() + supervised_loss
    kl = weighted = torch.zeros_like(logps)
    if reference is not None:
        difference = (reference - logps) * policy
        kl = torch.exp(difference) - difference - 1.0
        weighted = kl * ratio if objective.unbiased_kl else kl
        loss = loss + objective.kl * (weighted * policy_weights).sum()
    entropy = entropies * policy
    if objective.entropy:
        loss = loss - objective.entropy * (entropy * policy_weights).sum()

    with torch.no_grad():
        drift = (now - micro["behaviour"]) * policy
        excess = torch.expm1(drift)
        shared = (
            by_row[micro["kind"] == KINDS.index("agent")].sum(),
            by_row[micro["kind"] == KINDS.index("designer")].sum(),
            supervised_loss,
            objective.kl * (weighted * policy_weights).sum(),
            -objective.entropy * (entropy * policy_weights).sum(),
            (micro["mask"] & supervised).sum(),
        )
        tokens = (
            policy,
            excess,
            excess.square(),
            excess - drift,
            _left(ratio - 1.0, advantages, low, high) & policy,
            _left(excess, advantages, low, high) & policy,
            over & policy,
            kl,
            entropy,
        )
        sums = torch.stack([value.detach().to(torch.float64) for value in shared])
        rows = torch.stack([value.detach().sum(-1).to(torch.float64) for value in tokens], dim=1)
        by_role = [rows[micro["kind"] == KINDS.index(role)].sum(0) for role in ROLES]
    return loss, torch.cat([sums, *by_role])


def _correction(
    log_ratio: torch.Tensor, policy: torch.Tensor, designer: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the importance weights and where one is above the cap, each row by the terms of its role."""
    log_ratio = log_ratio * policy
    weights, over = importance(log_ratio, policy, objective.agent)
    if objective.agent == objective.designer:
        return weights, over
    others, others_over = importance(log_ratio, policy, objective.designer)
    return torch.where(designer, others, weights), torch.where(designer, others_over, over)


def _left(
    excess: torch.Tensor, advantages: torch.Tensor, low: torch.Tensor, high: torch.Tensor
) -> torch.Tensor:
    """Return where the ratio 1 + ``excess`` has left the range in the direction of the advantage."""
    return ((excess < -low) & (advantages < 0)) | ((excess > high) & (advantages > 0))


def metrics(sums: list[float], *, steps: int = 1, passes: int = 1) -> dict[str, float]:
    """Return the readable metrics of a batch from the statistics added over its micro-batches and steps.

    ``steps`` optimiser steps were taken, ``passes`` times over the whole batch. Losses are means over steps,
    the rest are means over tokens; names that end in a role are that role's part.
    """
    found = dict(zip(SUMS, sums, strict=True))
    total = {name: sum(found[f"{name}_{role}"] for role in ROLES) for name in _BY_ROLE}
    parts = ("loss_agent", "loss_designer", "loss_supervised", "loss_kl", "loss_entropy")
    values = {
        "loss": sum(found[part] for part in parts) / steps,
        **{part: found[part] / steps for part in parts},
        **_means(total, ""),
        "trained_tokens": total["tokens"] / passes,
        "supervised_tokens": found["supervised_tokens"] / passes,
    }
    for role in ROLES:
        if found[f"tokens_{role}"]:
            values |= _means({name: found[f"{name}_{role}"] for name in _BY_ROLE}, f"_{role}")
    return values


def _means(sums: dict[str, float], suffix: str) -> dict[str, float]:
    tokens = max(sums["tokens"], 1.0)
    excess = sums["ratio_excess"] / tokens
    variance = max(0.0, sums["ratio_excess_square"] / tokens - excess**2)
    means = {
        "ratio_mean": 1.0 + excess,
        "ratio_deviation": variance**0.5,
        "behaviour_kl": sums["behaviour_kl"] / tokens,
        "clip_fraction": sums["clipped"] / tokens,
        "outside_clip_fraction": sums["outside_clip"] / tokens,
        "capped_fraction": sums["capped"] / tokens,
        "kl": sums["kl"] / tokens,
        "entropy": sums["entropy"] / tokens,
    }
    return {f"{name}{suffix}": value for name, value in means.items()}
