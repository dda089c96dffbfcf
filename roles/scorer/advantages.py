"""From rewards to advantages, for each role on its own. Pure (architecture section 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, pstdev

from engine.config import LearnerConfig, RoleTraining

_EPSILON, _FLAT = 1e-8, 1e-12


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
        if max(values) - min(values) < _FLAT:
            continue
        mean = fmean(values)
        spread = pstdev(values) + _EPSILON if settings.normalise == "zscore" else 1.0
        for position, value in zip(positions, values, strict=True):
            result[position] = (value - mean) / spread * settings.advantage_scale
    return result


def label_of(settings: RoleTraining, group: str, skill: str, arm: str = "") -> str:
    """Return the label by which a sample is centred: its group (GRPO), its skill, or all.

    The group of a play is that of its design and round, the group of a design is its ticket. Each arm is
    centred on its own.
    """
    match settings.scope:
        case "group":
            return group
        case "skill":
            return f"{arm}:{skill}"
        case _:
            return arm
