"""Designs that repeat a program of a suite are counted, whatever their names and texts."""

from __future__ import annotations

from random import Random

import pytest
from scenes.small_run import ready

from engine.nano import seeds
from roles.evaluator.overlap import Overlap, fingerprint

FAMILIES = [family.name for family in seeds.families()]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_parameters_are_found_and_others_are_not(name: str) -> None:
    (family,) = seeds.families([name])
    level = family.held_levels[-1]
    held = family.draw(level, Random(3), withheld=True)
    overlap = Overlap({"easy": [family.program(held, "kites")]})
    for number in range(20):
        other = family.draw(level, Random(number), withheld=False)
        overlap.note(ready(f"other-{number}", source=family.program(other, "kites")))
    assert overlap.count("easy") == 0
    overlap.note(ready("same", source=family.program(held, "stones")))
    overlap.note(ready("same", source=family.program(held, "stones")))
    assert overlap.count("easy") == 1


@pytest.mark.parametrize(
    ("source", "equal"),
    [
        ("class BEnv:\n    '''Other words.'''\n    def reset(self, s):\n        return 'y', 3", True),
        ("class BEnv:  # a note\n    def reset(self, s): return ('y', 3)", True),
        ("class BEnv:\n    def reset(self, s):\n        return 'y', 4", False),
        ("class BEnv:\n    def reset(self, s, t):\n        return 'y', 3", False),
        ("class BEnv", False),
        ("\0", False),
        ("(" * 10_000, False),
    ],
)
def test_names_and_texts_do_not_count(source: str, equal: bool) -> None:
    known = fingerprint("class AEnv:\n    def reset(self, seed):\n        return 'x', 3")
    assert (fingerprint(source) == known) is equal


def test_programs_that_cannot_be_parsed_overlap_with_nothing() -> None:
    overlap = Overlap({"own": ["class AEnv(", "class AEnv: ..."]})
    overlap.note(ready("broken", source="class BEnv("))
    assert overlap.count("own") == 0
