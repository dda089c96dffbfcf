"""The pure parts of the validator."""

from __future__ import annotations

from sandbox.frames import StepResult
from sandbox.probes import GARBAGE, Transcript, plausible
from sandbox.leak import said
from sandbox.probes import solution_actions
from sandbox.variation import differ


def test_plausible_actions() -> None:
    assert plausible("kites peak in 0..8, 2 tries")[:9] == tuple("012345678")
    assert "red" in plausible("red blue red ?")
    assert plausible("between 17 and 19")[:3] == ("17", "18", "19")
    assert len(plausible("0..40 50-90 " + " ".join(map(chr, range(97, 123))))) <= 64
    assert len(set(plausible("5 5 5"))) == len(plausible("5 5 5"))
    assert plausible("")
    assert "banana" in GARBAGE


def test_solution_actions() -> None:
    assert solution_actions("\\boxed{1} then \\boxed{2}") == ["1", "2"]
    assert solution_actions([1, "\\boxed{b}"]) == ["1", "b"]
    assert solution_actions(" up ") == ["up"]


def test_leaks() -> None:
    assert said(" 5 ", "5")
    assert said("The answer is: 5.", "5")
    assert said("Secret=red", "red")
    assert not said("Choose 5 or 6; the answer matters", "5")
    assert not said("the key is 55", "5")
    assert not said("anything", "")


def played(*pairs: tuple[str, str], first: str = "go") -> Transcript:
    steps = tuple(StepResult(observation, 0.0, False, False) for _, observation in pairs)
    return Transcript(first, tuple(action for action, _ in pairs), steps)


def test_transcripts_differ_only_for_the_same_actions() -> None:
    assert not differ([played(("1", "a"), ("2", "b")), played(("1", "a"), ("2", "b"))])
    assert not differ([played(("1", "a"), ("2", "b")), played(("1", "a"), ("3", "c"))])
    assert not differ([played(("1", "a")), played(("1", "a"), ("3", "c"))])
    assert differ([played(("1", "a"), ("2", "b")), played(("1", "a"), ("2", "c"))])
    assert differ([played(), played(), played(first="other")])
