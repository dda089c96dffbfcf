"""The designer's delayed reward of the public implementation, written once more from its description.

Nothing of ours is imported: dictionaries as a file of cases has them go in, advantages come out. Sections are
those of the reference specification.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np

SKILLS = ("Mathematical Reasoning", "Logical Deduction", "Spatial Reasoning")
VARIANTS = ("blend", "solve_rate", "regret", "micro_lp", "learning_potential")
DEFAULTS = {
    "regret_weight": 0.4,
    "plateau_weight": 0.6,
    "micro_lp_weight": 0.0,
    "frontier_weight": 0.0,
    "regret_scale": 0.15,
    "micro_lp_scale": 0.10,
    "frontier_scale": 0.08,
    "plateau_lo": 0.4,
    "plateau_hi": 0.6,
    "plateau_ramp": 0.25,
    "regret_floor": True,
    "micro_lp_slope": True,
    "micro_lp_signed": True,
    "gamma_fast": 0.98,
    "gamma_slow": 0.85,
    "history": {},
    "variance_bonus": False,
    "update_with_window": False,
}


def average(values: list[float]) -> float:
    return sum(values) / len(values)


def expected(case: dict[str, Any]) -> dict[str, float | str]:
    """Return the advantage of every environment of a case, or "masked"."""
    params = DEFAULTS | case["params"]
    slow = slow_means(case, params) if case["variant"] == "learning_potential" else {}
    raw = {e["id"]: reward(e, case["variant"], params, slow) for e in case["environments"]}
    result: dict[str, float | str] = {}
    for one in case["environments"]:
        peers = [raw[e["id"]] for e in case["environments"] if e["skill"] == one["skill"]]
        kept = [value for value in peers if value is not None]
        mine = raw[one["id"]]
        result[one["id"]] = "masked" if mine is None else (mine - average(kept)) * case["advantage_scale"]
    return result


def slow_means(case: dict[str, Any], params: dict[str, Any]) -> dict[str, float]:
    """5.2, 5.3: the slow average of each skill after its history, and after this window if it comes first."""
    means: dict[str, float] = {}
    fed = {skill: list(values) for skill, values in params["history"].items()}
    if params["update_with_window"]:
        for skill in {e["skill"] for e in case["environments"]}:
            plays = [r for e in case["environments"] if e["skill"] == skill for r in everything(e)]
            if plays:
                fed.setdefault(skill, []).append(average(plays))
    for skill, values in fed.items():
        for value in values:
            old = means.get(skill, value)
            means[skill] = (1 - params["gamma_slow"]) * old + params["gamma_slow"] * value
    return means


def by_offset(environment: dict[str, Any]) -> list[list[float]]:
    """The returns of the offsets that have any, in order."""
    offsets = sorted((int(key), values) for key, values in environment["plain_returns"].items() if values)
    return [values for _, values in offsets]


def everything(environment: dict[str, Any]) -> list[float]:
    return [value for values in by_offset(environment) for value in values]


def reward(
    environment: dict[str, Any], variant: str, params: dict[str, Any], slow: dict[str, float]
) -> float | None:
    returns = everything(environment)
    hinted = environment["hinted_mean"] or 0.0
    if variant == "regret":  # 5.4
        if environment["step_timeout"]:
            return -0.5
        return max(0.0, hinted - (average(returns) if returns else 0.0))
    if variant == "micro_lp":  # 5.5
        return max(0.0, halves(environment))
    if variant == "learning_potential":  # 5.3
        if not returns:
            return 0.0
        mean = average(returns)
        bonus = 0.0
        if params["variance_bonus"] and len(returns) >= 2:
            variance = average([(value - mean) ** 2 for value in returns])
            bonus = math.exp(-((variance - 0.25) ** 2) / 0.02)
        return abs(mean - slow.get(environment["skill"], 0.0)) + bonus
    value = blend(environment, params, alone=variant == "solve_rate")
    return None if value < 0 else value


def blend(environment: dict[str, Any], params: dict[str, Any], *, alone: bool) -> float:
    """5.6; alone (5.7) it is the plateau with weight 1 and no regret."""
    offsets, returns = by_offset(environment), everything(environment)
    regret = ((environment["hinted_mean"] or 0.0) - (average(offsets[0]) if offsets else 0.0)) / params[
        "regret_scale"
    ]
    if params["regret_floor"]:
        regret = min(max(regret, 0.0), 1.0)
    win = average(returns) if returns else 0.0
    progress = slope(environment) if params["micro_lp_slope"] else halves(environment)
    if not params["micro_lp_signed"]:
        progress = max(0.0, progress)
    weights = (1.0, 0.0) if alone else (params["plateau_weight"], params["regret_weight"])
    return (
        weights[1] * regret
        + params["micro_lp_weight"] * (progress / params["micro_lp_scale"])
        + weights[0] * band(win, params)
        - params["frontier_weight"] * (win - 0.5) ** 2 / params["frontier_scale"]
    )


def band(win: float, params: dict[str, Any]) -> float:
    low, high, ramp = params["plateau_lo"], params["plateau_hi"], params["plateau_ramp"]
    if win < low:
        return max(0.0, 1.0 - (low - win) / ramp)
    if win > high:
        return max(0.0, 1.0 - (win - high) / ramp)
    return 1.0


def halves(environment: dict[str, Any]) -> float:
    offsets = by_offset(environment)
    if len(offsets) < 2:
        return 0.0
    middle = len(offsets) // 2
    early = [value for values in offsets[:middle] for value in values]
    late = [value for values in offsets[middle:] for value in values]
    return average(late) - average(early)


def slope(environment: dict[str, Any]) -> float:
    offsets = by_offset(environment)
    if len(offsets) < 2:
        return 0.0
    means, weights = [average(v) for v in offsets], [math.sqrt(len(v)) for v in offsets]
    return float(np.polyfit(range(len(offsets)), means, 1, w=weights)[0]) * (len(offsets) - 1)


# --- cases at random, most of them on an edge -----------------------------------------------------------


def case(number: int, chance: random.Random) -> dict[str, Any]:
    """Return a case with its expected advantages."""
    variant = VARIANTS[number % len(VARIANTS)]
    made: dict[str, Any] = {
        "id": number,
        "variant": variant,
        "params": parameters(variant, chance),
        "advantage_scale": chance.choice([1.0, 10.0, 32.0, 38.4, 50.0]),
    }
    params = DEFAULTS | made["params"]
    count = chance.choice([1, 2, 3, 6, 12])
    made["environments"] = [environment(f"e{i}", params, chance) for i in range(count)]
    made["expected"] = expected(made)
    return made


def parameters(variant: str, chance: random.Random) -> dict[str, Any]:
    if variant in ("regret", "micro_lp"):
        return {}
    if variant == "learning_potential":
        history = {
            skill: [round(chance.uniform(-1, 1), 3) for _ in range(chance.randint(1, 4))]
            for skill in SKILLS
            if chance.random() < 0.6
        }
        return {
            "gamma_fast": 0.98,
            "gamma_slow": chance.choice([0.85, 0.5, 0.0, 1.0]),
            "history": history,
            "variance_bonus": chance.random() < 0.5,
            "update_with_window": chance.random() < 0.5,
        }
    given: dict[str, Any] = {}
    if chance.random() < 0.8:
        low, high, ramp = chance.choice([(0.4, 0.6, 0.25), (0.2, 0.4, 0.2), (0.5, 0.5, 0.5), (0.0, 1.0, 0.1)])
        given |= {"plateau_lo": low, "plateau_hi": high, "plateau_ramp": ramp}
    if chance.random() < 0.6:
        given |= {
            "micro_lp_weight": chance.choice([0.0, round(chance.random(), 2)]),
            "frontier_weight": chance.choice([0.0, round(chance.random() / 2, 2)]),
            "micro_lp_slope": chance.random() < 0.5,
            "micro_lp_signed": chance.random() < 0.5,
        }
    if variant == "blend":
        given["regret_floor"] = chance.random() < 0.7
    return given


def environment(name: str, params: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    kind = chance.choice(["mixed", "mixed", "mixed", "won", "lost", "crashing", "unplayed", "edge", "tied"])
    offsets = sorted(chance.sample(range(8), chance.choice([1, 1, 2, 3, 4, 8])))
    if kind == "unplayed":
        offsets = []
    plain = {str(offset): returns(kind, params, chance) for offset in offsets}
    if plain and chance.random() < 0.1:
        plain[chance.choice(list(plain))] = []
    hinted = None if chance.random() < 0.2 else round(chance.uniform(-1, 1), 4)
    if plain and hinted is not None and chance.random() < 0.3:
        first = next(iter(plain.values()))
        start = average(first) if first else 0.0
        hinted = min(1.0, start + chance.choice([0.0, 0.15, 0.0750, 0.1500001]))
    return {
        "id": name,
        "skill": chance.choice(SKILLS),
        "step_timeout": chance.random() < 0.15,
        "hinted_mean": hinted,
        "plain_returns": plain,
    }


def returns(kind: str, params: dict[str, Any], chance: random.Random) -> list[float]:
    count = chance.choice([1, 2, 7, 8])
    match kind:
        case "won":
            return [1.0] * count
        case "lost":
            return [0.0] * count
        case "crashing":
            return [-1.0] * count
        case "tied":
            return [0.3] * count
        case "edge":
            low, high, ramp = params["plateau_lo"], params["plateau_hi"], params["plateau_ramp"]
            return [chance.choice([low, high, low - ramp, high + ramp])] * count
    return [chance.choice([-1.0, 0.0, 0.0, 0.3, 1.0, 1.0]) for _ in range(count)]
