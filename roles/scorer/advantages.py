"""From rewards to advantages, for each role on its own. Pure (architecture section 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev

from engine.config import LearnerConfig, RoleTraining

EPSILON = 1e-8
FLAT = 1e-12


def flat(values: Sequence[float]) -> bool:
    """Return whether the values do not differ: such a group carries no gradient."""
    return not values or max(values) - min(values) < FLAT


def idle(advantages: Iterable[float], learner: LearnerConfig) -> bool:
    """Return whether samples that were compared have no gradient: no advantage, no KL or entropy term."""
    return not (any(advantages) or learner.kl or learner.entropy)


def normalise(rewards: Sequence[float], labels: Sequence[str], settings: RoleTraining) -> list[float]:
    """Return the advantages of ``rewards``, centred among those that share a label.

    ``zscore`` divides by the population standard deviation plus 1e-8, ``centre`` does not; both are
    multiplied by ``settings.advantage_scale``. A label whose rewards do not differ, as that of one alone,
    gives zeros.
    """
    members: dict[str, list[int]] = {}
    for position, label in enumerate(labels):
        members.setdefault(label, []).append(position)
    result = [0.0] * len(rewards)
    for positions in members.values():
        values = [rewards[position] for position in positions]
        if flat(values):
            continue
        mean = fmean(values)
        spread = pstdev(values) + EPSILON if settings.normalise == "zscore" else 1.0
        for position, value in zip(positions, values, strict=True):
            result[position] = (value - mean) / spread * settings.advantage_scale
    return result


def designer_labels(skills: Sequence[str], settings: RoleTraining, groups: Sequence[str] = ()) -> list[str]:
    """Return what the designs of a cohort are centred by: their ticket (GRPO), their skill, or the cohort."""
    match settings.scope:
        case "group":
            return list(groups)
        case "skill":
            return list(skills)
        case _:
            return [""] * len(skills)


def agent_label(group: str, skill: str, arm: str, settings: RoleTraining) -> str:
    """Return what plays are centred by: their group (GRPO), or skill or round, each arm on its own."""
    match settings.scope:
        case "group":
            return group
        case "skill":
            return f"{arm}:{skill}"
        case _:
            return arm
