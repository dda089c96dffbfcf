"""Named switches and lists of skills: what a recipe may say in a word instead of in settings.

``spade run configs/nano.toml corpus=off`` changes the one factor of that name and nothing else: other draws,
seeds and sections of the prompt stay what they were.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.config import Config, DesignerConfig
from engine.errors import ConfigError

GAMES = DesignerConfig().skills
TWO = ("Mathematical Reasoning", "Pattern Recognition")
TOOLS = (
    "API Orchestration",
    "Data Retrieval",
    "State Modification",
    "Error Recovery",
    "Tool Selection",
    "Multi-Step Workflows",
)
TWO_TOOLS = ("API Orchestration", "State Modification")
PRESETS: Mapping[str, tuple[str, ...]] = {
    "games": GAMES,
    "two": TWO,
    "tools": TOOLS,
    "two_tools": TWO_TOOLS,
}
"""Lists of skills by name, for ``designer.skills`` (reference spec 2.4, 10)."""

OFF = "off"


SWITCHES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "corpus": {OFF: ("designer.corpus=",)},
    "memory": {OFF: ("designer.memory=false",)},
    "designer": {"frozen": ("designer.kind=frozen",)},
    # Two skills are all active in every cohort (reference spec 15.2): rotation is part of the same factor.
    "skills": {"two": ("designer.skills=two", "designer.skills_per_cohort=0")},
}
"""Factor, value and the overrides that the two stand for."""


def expand(override: str) -> tuple[str, ...]:
    """Return the overrides that ``override`` stands for: itself when it is no switch.

    Raises ConfigError for a switch with a value that it does not have.
    """
    factor, equals, value = (part.strip() for part in override.partition("="))
    values = SWITCHES.get(factor)
    if not equals or values is None:
        return (override,)
    if value not in values:
        known = [f"{name}={word}" for name, words in SWITCHES.items() for word in words]
        raise ConfigError(
            f"The switch {factor}={value} does not exist.",
            where="the command line",
            remedy=f"Switches: {', '.join(known)}.",
        )
    return values[value]


def resolve(values: Mapping[str, Any]) -> None:
    """Replace names of settings in merged tables in place: a preset of skills, a corpus that is off.

    Descriptions of skills that are not in the preset are removed.
    """
    designer = values.get("designer")
    if not isinstance(designer, dict):
        return
    skills = designer.get("skills")
    name = skills[0] if isinstance(skills, list) and len(skills) == 1 else skills
    if name == "two" and designer.get("prompt") == "tools":
        name = "two_tools"
    if isinstance(name, str) and name in PRESETS:
        designer["skills"] = list(PRESETS[name])
        own = designer.get("custom_skills")
        if isinstance(own, list):
            designer["custom_skills"] = [
                skill for skill in own if not isinstance(skill, dict) or skill.get("name") in PRESETS[name]
            ]
    if designer.get("corpus") == OFF:
        designer["corpus"] = ""


def factors(config: Config) -> dict[str, str]:
    """Return what each factor is in a recipe, in words for people."""
    designer = config.designer
    corpus = designer.corpus
    if not isinstance(corpus, str):
        total = sum(item.weight for item in corpus)
        corpus = " + ".join(f"{item.weight / total:.0%} {item.source}" for item in corpus)
    examples = f"{designer.memory_positive} to follow, {designer.memory_negative} to avoid"
    preset = next((name for name, names in PRESETS.items() if names == designer.skills), "your own")
    active = designer.skills_per_cohort or len(designer.skills)
    return {
        "corpus": corpus or OFF,
        "memory": f"{examples}, of {designer.memory_records}" if designer.memory else OFF,
        "designer": designer.kind,
        "skills": f"{preset} ({len(designer.skills)}, {active} a cohort)",
        "prompt": designer.prompt,
    }
