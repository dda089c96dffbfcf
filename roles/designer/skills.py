"""Descriptions of the skills for the prompt, and the evenness with which a run covers them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.config import DesignerConfig

DESCRIPTIONS: dict[str, str] = {
    "Mathematical Reasoning": "finding quantities by calculation, and using each result for the next",
    "Logical Deduction": "drawing what must follow from clues, and choosing the question that rules out most",
    "Spatial Reasoning": "keeping positions, directions and shapes in mind while they change",
    "Pattern Recognition": "discovering the rule behind what is shown, and foretelling what comes next",
    "Optimization": "finding the best choice under limits by trying, comparing and trading off",
    "Causal Inference": "finding out by intervention what brings about what",
    "API Orchestration": "combining calls of several services so that the result of one feeds the next",
    "Data Retrieval": "finding the one record that is meant, by filters and look-ups",
    "State Modification": "changing exactly what was asked for and leaving everything else as it is",
    "Error Recovery": "reading what went wrong in a call and reaching the goal in another way",
    "Tool Selection": "telling apart tools that look alike, and leaving out those that do not help",
    "Multi-Step Workflows": "keeping the order and the conditions of a long task",
}


def descriptions(config: DesignerConfig) -> dict[str, str]:
    """Return one line for each skill that has one; the recipe's descriptions replace the built-in ones."""
    own = {skill.name: skill.description for skill in config.custom_skills if skill.description}
    return {**DESCRIPTIONS, **own}


class Coverage:
    """Counts accepted and rejected attempts by skill."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._accepted: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()

    def note(self, skill: str, *, accepted: bool) -> None:
        """Count one attempt at a design for ``skill``."""
        (self._accepted if accepted else self._rejected)[skill] += 1

    def statistics(self) -> dict[str, float]:
        """Return gauges of the coverage.

        They are the number of skills with an accepted design, the smallest share of a skill in the accepted
        designs (1/n when they are even), and the share of valid attempts of the least valid skill.
        """
        total = sum(self._accepted.values())
        valid = [
            self._accepted[name] / tries
            for name in self._names
            if (tries := self._accepted[name] + self._rejected[name])
        ]
        return {
            "skills_covered": sum(self._accepted[name] > 0 for name in self._names),
            "skills_smallest_share": min(self._accepted[name] for name in self._names) / total
            if total
            else 0,
            "skills_least_valid": min(valid, default=0),
        }
