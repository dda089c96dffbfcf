"""METADATA of a program: found beside the program, read in the engine."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import contract, metadata
from sandbox.metadata import Metadata, MetadataError


def declared(source: str) -> str:
    made = ModuleType(contract.MODULE)
    exec(source + "\nclass AEnv:\n def reset(self, s): pass\n def step(self, a): pass\n", made.__dict__)
    found = contract.declaration(made, made.__dict__["AEnv"])
    return json.dumps(found) if found else ""


def test_nothing_declared_is_fine() -> None:
    assert declared('"""goal: a docstring declares nothing\\n    max_turns: 3"""') == ""
    assert metadata.read("") is None


def test_metadata_dict() -> None:
    source = """METADATA = {"goal": "win", "skill": "Search", "difficulty": 0.5, "max_turns": 9}"""
    assert metadata.read(declared(source)) == Metadata(
        goal="win", skill="Search", difficulty=0.5, max_turns=9
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("METADATA = [1]", "must be a dict, not list"),
        ("METADATA = {'goal': object()}", "plain values only"),
        ("METADATA = {'difficulty': float('nan')}", "plain values only"),
        ("METADATA = {'goal': 'x' * 5000}", "at most 4096"),
        ("METADATA = {'goal': ''}", "goal"),
        ("METADATA = {'goal': 5}", "goal"),
        ("METADATA = {'difficulty': 'brutal'}", "difficulty"),
        ("METADATA = {'difficulty': 1.5}", "difficulty"),
        ("METADATA = {'difficulty': True}", "difficulty"),
        ("METADATA = {'max_turns': 0}", "max_turns"),
        ("METADATA = {'max_turns': '12'}", "max_turns"),
        ("METADATA = {'max_turns': 1001}", "max_turns"),
    ],
)
def test_what_is_malformed_is_named(source: str, words: str) -> None:
    with pytest.raises(MetadataError) as caught:
        metadata.read(declared(source))
    assert words in str(caught.value)


@given(
    st.text(max_size=60)
    | st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists).map(json.dumps)
)
def test_a_process_that_lies_is_answered(text: str) -> None:
    try:
        assert metadata.read(text) is None or isinstance(metadata.read(text), Metadata)
    except MetadataError:
        assert text


def test_unknown_fields_are_ignored() -> None:
    source = "METADATA = {'goal': 'win', 'version': '1.0', 'tags': [], 'difficulty': 'Hard'}"
    assert metadata.read(declared(source)) == Metadata(goal="win", difficulty="hard")
    assert metadata.read(declared("METADATA = {'difficulty': '40 %'}")) == Metadata(difficulty=0.4)


@pytest.mark.parametrize(
    ("offered", "observed", "words"),
    [
        (5, None, ""),
        (5, 5, ""),
        (9, 5, ""),
        (4, None, "at most 4 are played"),
        (9, 6, "its max_turns is 6"),
    ],
)
def test_an_untrue_budget_is_named(offered: int, observed: int | None, words: str) -> None:
    text = declared("METADATA = {'max_turns': 5}")
    if not words:
        assert metadata.read(text, offered=offered, observed=observed) == Metadata(max_turns=5)
        return
    with pytest.raises(MetadataError, match=words):
        metadata.read(text, offered=offered, observed=observed)


@pytest.mark.parametrize(
    ("fields", "turns"),
    [
        ({}, 25),
        ({"max_turns": 9}, 9),
        ({"max_turns": 99}, 25),
        ({"max_turns": []}, 25),
        ({"max_turns": "few"}, 25),
        ({"max_turns": -1}, 25),
    ],
)
def test_the_constructor_is_offered_what_was_declared(fields: dict[str, Any], turns: int) -> None:
    assert contract.budgeted({"max_turns": 25, "x": 1}, {"fields": fields}) == {"max_turns": turns, "x": 1}
    assert contract.budgeted({}, {"fields": fields}) == {}
