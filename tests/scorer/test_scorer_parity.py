"""All cases of the delayed designer reward, as computed by the public reference implementation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import Reward, RoleTraining
from roles.scorer.advantages import designer_labels, normalise
from roles.scorer.rewards import Evidence, Rules, Tracker, raw_rewards

CASES = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data/designer_reward_parity.jsonl").read_text().splitlines()
]


def settings_of(case: dict[str, Any]) -> Reward:
    p = case["params"]
    return Reward(
        variant=case["variant"],
        plateau_weight=p.get("plateau_weight", 0.6),
        regret_weight=p.get("regret_weight", 0.4),
        micro_lp_weight=p.get("micro_lp_weight", 0.0),
        frontier_weight=p.get("frontier_weight", 0.0),
        regret_scale=p.get("regret_scale", 0.15),
        low=p.get("plateau_lo", 0.4),
        high=p.get("plateau_hi", 0.6),
        ramp=p.get("plateau_ramp", 0.25),
        fast_decay=p.get("gamma_fast", 0.98),
        slow_decay=p.get("gamma_slow", 0.85),
    )


def advantages_of(case: dict[str, Any]) -> dict[str, float | str]:
    p, settings = case["params"], settings_of(case)
    rules = Rules(
        reference=True,
        regret_floor=p.get("regret_floor", True),
        slope=p.get("micro_lp_slope", True),
        signed=p.get("micro_lp_signed", True),
        variance_bonus=p.get("variance_bonus", False),
        update_first=p.get("update_with_window", False),
    )
    tracker = Tracker()
    for skill, values in p.get("history", {}).items():
        for value in values:
            tracker.update(skill, value, fast=settings.fast_decay, slow=settings.slow_decay)
    evidence = [
        Evidence(
            skill=item["skill"],
            rounds={int(offset): returns for offset, returns in item["plain_returns"].items()},
            hinted=item["hinted_mean"],
            broken=item["step_timeout"],
        )
        for item in case["environments"]
    ]
    rewards = raw_rewards(evidence, settings, tracker, rules)
    kept = [
        (item["id"], e.skill, r)
        for item, e, r in zip(case["environments"], evidence, rewards, strict=True)
        if r is not None
    ]
    training = RoleTraining(normalise="centre", scope="skill", advantage_scale=case["advantage_scale"])
    labels = designer_labels([skill for _, skill, _ in kept], training)
    scaled = normalise([reward for _, _, reward in kept], labels, training)
    result: dict[str, float | str] = {item["id"]: "masked" for item in case["environments"]}
    return result | {name: value for (name, _, _), value in zip(kept, scaled, strict=True)}


def test_all_cases_are_there() -> None:
    assert len(CASES) == 240
    assert {case["variant"] for case in CASES} == {
        "blend",
        "solve_rate",
        "regret",
        "micro_lp",
        "learning_potential",
    }


@pytest.mark.parametrize("variant", ["blend", "solve_rate", "regret", "micro_lp", "learning_potential"])
def test_reference_parity(variant: str) -> None:
    for case in (case for case in CASES if case["variant"] == variant):
        got = advantages_of(case)
        for name, expected in case["expected"].items():
            where = f"case {case['id']} {name}"
            if expected == "masked":
                assert got[name] == "masked", where
            else:
                assert got[name] == pytest.approx(expected, abs=1e-7), where
