"""The public implementation's delayed reward, edge cases and all, and cases that it computed (spec 5.2-5.9).

``reward.reference_parity`` makes the scorer pay by it; ``spade credit --parity`` compares it with the cases
of a file, one JSON object per line (docs/credit.md). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pvariance
from typing import Literal

import msgspec

from engine.config import RewardConfig, RoleTraining
from engine.errors import ConfigError
from roles.scorer.advantages import normalise
from roles.scorer.rewards import Evidence, Tracker, micro_lp, plateau

TOLERANCE = 1e-9
_HANG_REWARD = -0.5
Advantage = float | Literal["masked"]


class ReferenceRules(msgspec.Struct, frozen=True, kw_only=True):
    """Switches of the public implementation that its recipes leave as they are.

    ``micro_lp_slope``: the progress term is a regression instead of late half minus early half.
    ``micro_lp_signed``: it may be negative inside ``blend``. ``variance_bonus``: learning_potential likes
    games that are fair coins. ``update_with_window``: the slow mean has seen the window before it serves as
    the window's baseline.
    """

    regret_floor: bool = True
    micro_lp_slope: bool = True
    micro_lp_signed: bool = True
    variance_bonus: bool = False
    update_with_window: bool = True


def reference_rewards(
    evidence: Sequence[Evidence],
    settings: RewardConfig,
    tracker: Tracker,
    rules: ReferenceRules = ReferenceRules(),  # noqa: B008 - frozen
) -> list[float | None]:
    """Return the public implementation's reward of every design; None masks a blend that came out negative.

    Feeds the cohort to ``tracker``.
    """
    if rules.update_with_window:
        tracker.observe(evidence, settings)
    baseline = dict(tracker.slow)
    rewards = [_reward(item, settings, baseline.get(item.skill, 0.0), rules) for item in evidence]
    if not rules.update_with_window:
        tracker.observe(evidence, settings)
    return rewards


def _reward(item: Evidence, settings: RewardConfig, baseline: float, rules: ReferenceRules) -> float | None:
    returns = item.returns
    win = fmean(returns) if returns else 0.0
    match settings.variant:
        case "regret":
            return _HANG_REWARD if item.broken else max(0.0, (item.hinted or 0.0) - win)
        case "micro_lp":
            return max(0.0, _halves(item.rounds))
        case "learning_potential":
            if not returns:
                return 0.0
            bonus = rules.variance_bonus and len(returns) > 1
            extra = math.exp(-((pvariance(returns) - 0.25) ** 2) / 0.02) if bonus else 0.0
            return abs(win - baseline) + extra
        case _:
            value = _blend(item, win, settings, rules)
            return None if value < 0 else value


def _blend(item: Evidence, win: float, settings: RewardConfig, rules: ReferenceRules) -> float:
    solve_rate = settings.variant == "solve_rate"
    plateau_weight = 1.0 if solve_rate else settings.plateau_weight
    regret_weight = 0.0 if solve_rate else settings.regret_weight
    played = [number for number in sorted(item.rounds) if item.rounds[number]]
    first = fmean(item.rounds[played[0]]) if played else 0.0
    regret = ((item.hinted or 0.0) - first) / settings.regret_scale
    if rules.regret_floor:
        regret = min(1.0, max(0.0, regret))
    progress = micro_lp(item.rounds) if rules.micro_lp_slope else _halves(item.rounds)
    if not rules.micro_lp_signed:
        progress = max(0.0, progress)
    return (
        regret_weight * regret
        + settings.micro_lp_weight * progress / settings.micro_lp_scale
        + plateau_weight * plateau(win, settings.low, settings.high, settings.ramp)
        - settings.frontier_weight * (win - 0.5) ** 2 / settings.frontier_scale
    )


def _halves(rounds: Mapping[int, Sequence[float]]) -> float:
    """Return the late half's mean less the early half's; an odd middle round is late (spec 5.6)."""
    played = [rounds[number] for number in sorted(rounds) if rounds[number]]
    if len(played) < 2:
        return 0.0
    early = [value for values in played[: len(played) // 2] for value in values]
    late = [value for values in played[len(played) // 2 :] for value in values]
    return fmean(late) - fmean(early)


# --- cases of a file ----------------------------------------------------------------------------------


class Parameters(ReferenceRules, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a case. ``gamma_fast`` and ``gamma_slow`` weigh the new value of the moving means.

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
    gamma_fast: float = 0.98
    gamma_slow: float = 0.85
    history: dict[str, list[float]] = {}
    update_with_window: bool = False


class CaseEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """One environment: ``plain_returns`` maps round within the window -> returns in [-1, 1].

    ``hinted_mean`` is None when it has no hint.
    """

    id: str
    skill: str
    step_timeout: bool
    hinted_mean: float | None
    plain_returns: dict[int, list[float]]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One window: its outcomes, and the advantages (or ``"masked"``) that are ``expected``."""

    id: int | str
    variant: Literal["blend", "solve_rate", "regret", "micro_lp", "learning_potential"]
    params: Parameters
    advantage_scale: float
    environments: list[CaseEnvironment]
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
        try:
            cases += [decoder.decode(line)] if line.strip() else []
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"{path}, line {number} is no case of the designer's reward: {error}",
                remedy="docs/credit.md describes a case.",
            ) from error
    if not cases:
        raise ConfigError(f"{path} has no cases", remedy="It needs one JSON object a line.")
    return cases


def advantages(case: Case) -> dict[str, Advantage]:
    """Return the advantage of each environment of ``case`` by the public implementation's formulas."""
    given = case.params
    settings = RewardConfig(
        variant=case.variant,
        low=given.plateau_lo,
        high=given.plateau_hi,
        ramp=given.plateau_ramp,
        fast_decay=given.gamma_fast,
        slow_decay=given.gamma_slow,
        reference_parity=True,
        **{name: getattr(given, name) for name in RewardConfig.__struct_fields__ if hasattr(given, name)},
    )
    tracker = Tracker()
    for skill, values in given.history.items():
        for value in values:
            tracker.update(skill, value, fast=settings.fast_decay, slow=settings.slow_decay)
    evidence = [
        Evidence(skill=one.skill, rounds=one.plain_returns, hinted=one.hinted_mean, broken=one.step_timeout)
        for one in case.environments
    ]
    rewards = reference_rewards(evidence, settings, tracker, given)
    kept = [
        (one.id, one.skill, reward)
        for one, reward in zip(case.environments, rewards, strict=True)
        if reward is not None
    ]
    training = RoleTraining(normalise="centre", advantage_scale=case.advantage_scale)
    scaled = normalise([reward for *_, reward in kept], [skill for _, skill, _ in kept], training)
    found: dict[str, Advantage] = {one.id: "masked" for one in case.environments}
    return found | {name: value for (name, _, _), value in zip(kept, scaled, strict=True)}


def check(path: Path) -> list[Compared]:
    """Return every expected advantage of a file beside ours. Raises ConfigError.

    An environment that the case does not hold counts as masked.
    """
    result = []
    for case in read(path):
        found = advantages(case)
        for name, expected in case.expected.items():
            ours = found.get(name, "masked")
            if isinstance(ours, str) or isinstance(expected, str):
                equal = ours == expected
            else:
                equal = abs(ours - expected) <= TOLERANCE
            result.append(Compared(case.id, case.variant, name, ours, expected, equal))
    return result
