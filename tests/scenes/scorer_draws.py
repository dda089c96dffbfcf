"""Recipes drawn at random, of every shape that the scorer has a rule for. Small, so that many can be run."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from engine.config import Config, CurriculumConfig
from roles.scorer.rewards import BUILT_IN
from scenes.scorer_world import config

OWN = "own_rewards:half_won"
SCOPES = st.sampled_from(["group", "group", "skill", "global"])


@st.composite
def rewards(draw: st.DrawFn) -> dict[str, Any]:
    """Built-in rewards, the reference's, and one of somebody's own."""
    if draw(st.integers(0, 5)) == 0:
        return {"reference_parity": True, "variant": draw(st.sampled_from([*BUILT_IN]))}
    return {
        "variant": draw(st.sampled_from(["blend", "blend", *BUILT_IN, OWN])),
        "regret_estimate": draw(st.sampled_from(["mean", "shrunk", "lower"])),
        "hint_leak": draw(st.sampled_from(["flag", "floor"])),
        "lowest_return": draw(st.sampled_from([0.0, -1.0])),
        "degenerate_reward": draw(st.sampled_from([0.0, -0.1])),
    }


@st.composite
def recipes(draw: st.DrawFn) -> Config:
    """Age bounds are as tight as they may be, or a little wider."""
    window = draw(st.integers(1, 3))
    delay = draw(st.sampled_from([0, window, window + 1, window + 2]))
    in_step = draw(st.integers(0, 3)) == 0
    lead = 0 if in_step else draw(st.integers(0, 2))
    ahead = 0 if in_step else draw(st.integers(0, 2))
    plan = CurriculumConfig(rounds_per_window=window, delay=delay, lead=lead, design_ahead=ahead)
    reward = draw(rewards())
    quota = st.sampled_from([0, 0, 2])
    priority = st.sampled_from(["oldest", "newest", "largest"])
    wider = st.integers(0, 1)
    normalise = st.sampled_from(["zscore", "centre"])
    return config(
        steps=draw(st.integers(1, 4)),
        curriculum={
            "mode": "sync" if in_step else "async",
            "schedule": draw(st.sampled_from(["rolling", "epoch"])),
            "environments": draw(st.integers(1, 4)),
            "rounds_per_window": window,
            "delay": delay,
            "plays_per_round": draw(st.integers(2, 3)),
            "hinted_plays": draw(st.integers(0, 3)),
            "hinted_rounds": 1 if reward.get("reference_parity") else draw(st.integers(1, window)),
            "lead": lead,
            "design_ahead": ahead,
            "reissues": draw(st.integers(0, 2)),
        },
        learner={
            "designer": {
                "max_staleness": plan.oldest_design + draw(wider),
                "scope": draw(SCOPES),
                "quota": draw(quota),
                "priority": draw(priority),
                "normalise": draw(normalise),
            },
            "agent": {
                "max_staleness": lead + draw(wider),
                "scope": draw(SCOPES),
                "quota": draw(quota),
                "priority": draw(priority),
                "normalise": draw(normalise),
            },
            "train_hinted": draw(st.booleans()),
            "kl": draw(st.sampled_from([0.0, 0.01])),
            "supervised_mix": draw(st.sampled_from([0.0, 0.0, 1.0])),
            "supervised_source": "accepted",
        },
        designer={
            "skills": ["Logic", "Optimization", "Causal"][: draw(st.integers(1, 3))],
            "skills_per_cohort": draw(st.integers(0, 2)),
            "attempts": draw(st.integers(1, 3)),
            "invalid": draw(st.sampled_from(["penalise", "drop"])),
            "designs_per_ticket": draw(st.integers(1, 3)),
            "kind": draw(st.sampled_from(["policy", "policy", "frozen"])),
        },
        reward=reward,
        agent={"truncated": draw(st.sampled_from(["zero", "mask"]))},
    )
