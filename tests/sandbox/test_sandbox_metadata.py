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


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("", None),
        ('"""goal: a docstring declares nothing\\n    max_turns: 3"""', None),
        (
            'METADATA = {"goal": "win", "skill": "Search", "difficulty": 0.5, "max_turns": 9}',
            Metadata(goal="win", skill="Search", difficulty=0.5, max_turns=9),
        ),
        ("METADATA = {'version': '1.0', 'tags': [], 'difficulty': 'Hard'}", Metadata(difficulty="hard")),
        ("METADATA = {'difficulty': '40 %'}", Metadata(difficulty=0.4)),
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
def test_declarations_are_read_or_their_fault_is_named(source: str, read: Metadata | str | None) -> None:
    if not isinstance(read, str):
        assert metadata.read(declared(source), offered=9, observed=9) == read
        return
    with pytest.raises(MetadataError) as caught:
        metadata.read(declared(source))
    assert read in str(caught.value)


@given(
    st.text(max_size=60)
    | st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists).map(json.dumps)
)
def test_a_process_that_lies_is_answered(text: str) -> None:
    try:
        assert metadata.read(text) is None or isinstance(metadata.read(text), Metadata)
    except MetadataError:
        assert text


@pytest.mark.parametrize(("budget", "turns"), [(None, 25), (9, 9), (99, 25), ([], 25), ("few", 25), (-1, 25)])
def test_the_constructor_is_offered_what_was_declared(budget: Any, turns: int) -> None:
    found = {"fields": {} if budget is None else {"max_turns": budget}}
    assert contract.budgeted({"max_turns": 25, "x": 1}, found) == {"max_turns": turns, "x": 1}
    assert contract.budgeted({}, found) == {}
