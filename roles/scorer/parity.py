"""Cases of the designer's reward as others computed them, beside ours (reference spec 5.2-5.9).

A file has one case a line; what a case holds is said by :class:`Case`. Advantages are compared: rewards
centred by skill and scaled, ``"masked"`` where a design is not trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from engine.config import RewardConfig, RoleTraining
from engine.errors import ConfigError
from roles.scorer.advantages import designer_labels, normalise
from roles.scorer.rewards import Evidence, Rules, Tracker, raw_rewards

TOLERANCE = 1e-9
Advantage = float | Literal["masked"]


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a case. ``gamma_fast`` and ``gamma_slow`` weigh the new value of the moving means,
    ``history`` holds a skill's mean returns before the window.
    """

    regret_weight: float = 0.4
    plateau_weight: float = 0.6
    micro_lp_weight: float = 0.0
    frontier_weight: float = 0.0
    regret_scale: float = 0.15
    micro_lp_scale: float = 0.10
    frontier_scale: float = 0.08
    plateau_lo: float = 0.4
    plateau_hi: float = 0.6
    plateau_ramp: float = 0.25
    regret_floor: bool = True
    micro_lp_slope: bool = True
    micro_lp_signed: bool = True
    gamma_fast: float = 0.98
    gamma_slow: float = 0.85
    history: dict[str, list[float]] = {}
    variance_bonus: bool = False
    update_with_window: bool = False


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One environment: ``plain_returns`` maps round within the window -> returns in [-1, 1];
    ``hinted_mean`` is None when it has no hint.
    """

    id: str
    skill: str
    step_timeout: bool
    hinted_mean: float | None
    plain_returns: dict[int, list[float]]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One window: what was played, and the advantages (or ``"masked"``) that are ``expected``."""

    id: int | str
    variant: Literal["blend", "solve_rate", "regret", "micro_lp", "learning_potential"]
    params: Parameters
    advantage_scale: float
    environments: list[Played]
    expected: dict[str, Advantage]


class Compared(msgspec.Struct, frozen=True):
    """One advantage beside the expected one; ``equal`` within :data:`TOLERANCE`."""

    case: int | str
    variant: str
    environment: str
    ours: Advantage
    expected: Advantage
    equal: bool


def read(path: Path) -> list[Case]:
    """Return the cases of a file. Raises ConfigError that names the line that is none."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", remedy="Name a JSONL file.") from error
    decoder = msgspec.json.Decoder(Case)
    cases = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            cases.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{path}, line {number} is no case of the designer's reward: {error}",
                remedy="docs/credit.md says what a case holds.",
            ) from error
    if not cases:
        raise ConfigError(f"{path} has no cases", remedy="It needs one JSON object a line.")
    return cases


def advantages(case: Case) -> dict[str, Advantage]:
    """Return what ``reward.reference_parity`` gives each environment of ``case``."""
    settings, rules = _settings(case), _rules(case.params)
    tracker = Tracker()
    for skill, values in case.params.history.items():
        for value in values:
            tracker.update(skill, value, fast=settings.fast_decay, slow=settings.slow_decay)
    evidence = [
        Evidence(skill=one.skill, rounds=one.plain_returns, hinted=one.hinted_mean, broken=one.step_timeout)
        for one in case.environments
    ]
    rewards = raw_rewards(evidence, settings, tracker, rules)
    kept = [
        (one.id, one.skill, reward)
        for one, reward in zip(case.environments, rewards, strict=True)
        if reward is not None
    ]
    training = RoleTraining(normalise="centre", scope="skill", advantage_scale=case.advantage_scale)
    labels = designer_labels([skill for _, skill, _ in kept], training)
    scaled = normalise([reward for _, _, reward in kept], labels, training)
    found: dict[str, Advantage] = {one.id: "masked" for one in case.environments}
    return found | {name: value for (name, _, _), value in zip(kept, scaled, strict=True)}


def compare(cases: list[Case]) -> Iterator[Compared]:
    """Yield every expected advantage beside ours; one that we do not know counts as masked."""
    for case in cases:
        found = advantages(case)
        for name, expected in case.expected.items():
            ours = found.get(name, "masked")
            yield Compared(case.id, case.variant, name, ours, expected, _equal(ours, expected))


def check(path: Path) -> list[Compared]:
    """Compare all cases of a file. Raises ConfigError."""
    return list(compare(read(path)))


def _equal(ours: Advantage, expected: Advantage) -> bool:
    if isinstance(ours, str) or isinstance(expected, str):
        return ours == expected
    return abs(ours - expected) <= TOLERANCE


def _settings(case: Case) -> RewardConfig:
    given = case.params
    return RewardConfig(
        variant=case.variant,
        plateau_weight=given.plateau_weight,
        regret_weight=given.regret_weight,
        micro_lp_weight=given.micro_lp_weight,
        frontier_weight=given.frontier_weight,
        regret_scale=given.regret_scale,
        micro_lp_scale=given.micro_lp_scale,
        frontier_scale=given.frontier_scale,
        low=given.plateau_lo,
        high=given.plateau_hi,
        ramp=given.plateau_ramp,
        fast_decay=given.gamma_fast,
        slow_decay=given.gamma_slow,
    )


def _rules(given: Parameters) -> Rules:
    return Rules(
        reference=True,
        regret_floor=given.regret_floor,
        slope=given.micro_lp_slope,
        signed=given.micro_lp_signed,
        variance_bonus=given.variance_bonus,
        update_first=given.update_with_window,
    )
