"""Skills: words for each, rotation, places in the plan, coverage."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine import ablations, recipe
from engine.config import Config, CurriculumConfig, DesignerConfig, ModelConfig, RunConfig, SkillConfig
from roles.designer.prompt import DESCRIPTIONS, descriptions
from roles.designer.role import Coverage
from roles.scorer import cohort_plan


def config(designer: dict[str, Any] | None = None, **curriculum: Any) -> Config:
    return Config(
        run=RunConfig(name="t"),
        model=ModelConfig(path="m"),
        designer=DesignerConfig(**(designer or {})),
        curriculum=CurriculumConfig(**curriculum),
    )


def test_every_skill_of_a_preset_is_described() -> None:
    for names in ablations.PRESETS.values():
        assert set(names) <= DESCRIPTIONS.keys()
    assert all(text and not text.endswith(".") and len(text) < 100 for text in DESCRIPTIONS.values())


def test_a_recipe_can_describe_its_own_skills_and_ours() -> None:
    own = (SkillConfig(name="Juggling", description="three balls"), SkillConfig(name="Optimization"))
    found = descriptions(DesignerConfig(custom_skills=own))
    assert found["Juggling"] == "three balls"
    assert found["Optimization"] == DESCRIPTIONS["Optimization"]


def test_the_games_recipes_take_one_skill_after_the_other() -> None:
    games = recipe.load("configs/qwen3-4b-games.toml").config
    cohorts = [set(cohort_plan.skills(games.designer, cohort, 6)) for cohort in range(6)]
    assert cohorts == [{name} for name in games.designer.skills]


@given(
    st.sampled_from(["rolling", "epoch"]),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(1, 3),
)
def test_a_place_counts_what_comes_before(
    schedule: str, window: int, size: int, count: int, active: int, each: int
) -> None:
    names = tuple("abcdef"[:count])
    recipe_ = config(
        {"skills": names, "skills_per_cohort": min(active, count), "designs_per_ticket": each},
        schedule=schedule,
        environments=size * window,
        rounds_per_window=window,
        delay=window,
    )
    number, turns = 0, Counter[str]()
    for cohort in range(3 * count):
        skills = cohort_plan.skills(
            recipe_.designer, cohort, cohort_plan.rounds_of(recipe_.curriculum, cohort).size
        )
        for slot in range(0, len(skills), each):
            assert cohort_plan.place(recipe_.designer, recipe_.curriculum, cohort, slot) == (
                number,
                turns[skills[slot]],
            )
            number += 1
            turns[skills[slot]] += 1


def test_coverage_counts_skills_with_designs() -> None:
    coverage = Coverage(("a", "b", "c"))
    assert coverage.statistics() == {"skills_covered": 0, "skills_smallest_share": 0, "skills_least_valid": 0}
    for skill, accepted in (("a", True), ("a", True), ("a", False), ("b", True), ("b", False), ("b", False)):
        coverage.note(skill, accepted=accepted)
    found = coverage.statistics()
    assert (found["skills_covered"], found["skills_smallest_share"]) == (2, 0)
    assert abs(found["skills_least_valid"] - 1 / 3) < 1e-9
