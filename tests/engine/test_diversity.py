"""Diversity: golden Vendi scores, laws it obeys, and the figures of rounds in a run's database."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes.archived_run import GAMES, played, source, written
from scenes.memory_bus import MemoryBus
from scenes.small_run import events

from bus.messages import Message
from engine.records import diversity, history
from engine.records import status as standing
from engine.records.diversity import (
    AT_ONCE,
    Diversity,
    PlayedEnvironment,
    effective,
    measure,
    near_duplicates,
    vendi,
)
from engine.records.recorder import Recorder
from engine.similarity import Vectors


def unit(rows: Sequence[Sequence[float]]) -> Vectors:
    vectors = np.asarray(rows, np.float64)
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


class TestVendi:
    @pytest.mark.parametrize(
        ("rows", "expected"),
        [
            ([[3.0, 4.0]] * 7, 1.0),
            (np.eye(1, 20), 1.0),
            (np.eye(17, 20), 17.0),
            (np.eye(3, 8)[[0] * 5 + [1] * 5 + [2] * 5], 3.0),
            (np.eye(2, 4)[[0] * 9 + [1]], math.exp(-(0.9 * math.log(0.9) + 0.1 * math.log(0.1)))),
            ([[1, 0], [0.6, 0.8]], math.exp(-(0.8 * math.log(0.8) + 0.2 * math.log(0.2)))),
        ],
        ids=["all the same", "one", "nothing in common", "groups", "groups of other sizes", "two by formula"],
    )
    def test_it_is_the_exponential_of_the_kernels_entropy(self, rows: Any, expected: float) -> None:
        assert vendi(unit(rows)) == pytest.approx(expected, abs=1e-5)

    def test_nothing_has_no_diversity_and_empty_texts_are_alike(self) -> None:
        assert vendi(np.zeros((0, 4), np.float32)) == 0.0
        assert vendi(np.zeros((3, 4), np.float32)) == pytest.approx(1.0)
        assert vendi(np.array([[0, 0], [0, 0], [1, 0], [1, 0]], np.float32)) == pytest.approx(2.0)

    @given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 2**31))
    @settings(max_examples=30)
    def test_its_laws(self, count: int, places: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        rows = unit(rng.normal(size=(count, places)))
        score = vendi(rows)
        assert 1 - 1e-6 <= score <= min(count, places) + 1e-4
        assert vendi(rng.permutation(rows)) == pytest.approx(score, rel=1e-4)
        assert vendi(np.concatenate([rows, rows])) == pytest.approx(score, rel=1e-4)


def test_effective_kinds() -> None:
    assert effective([5, 5, 5]) == pytest.approx(3.0)
    assert effective([7]) == pytest.approx(1.0)


def test_near_duplicates_have_one_before_them() -> None:
    rows = unit([[1, 0], [0, 1], [1, 0.01], [0.7, 0.7], [0, 1]])
    assert near_duplicates(rows, 0.99) == pytest.approx(2 / 5)


def test_the_figures_of_a_round() -> None:
    played = [
        PlayedEnvironment("one", "lighthouse keeper", "a", "x"),
        PlayedEnvironment("one", "lighthouse keeper", "a", "x"),
        PlayedEnvironment("two", "plumbing", "b", ""),
        PlayedEnvironment("three", "violins", "b", "y"),
    ]
    found = measure(played)
    assert (found.environments, found.skills, found.documents) == (4, 2, 2)
    assert (found.duplicates, found.near_duplicates) == (0.25, 0.25)
    assert found.effective_skills == pytest.approx(2.0)
    assert found.vendi == pytest.approx(math.exp(0.5 * math.log(2) + 0.5 * math.log(4)), abs=1e-3)


def test_an_empty_round_has_no_figures() -> None:
    assert measure([]) == Diversity(
        environments=0,
        vendi=None,
        duplicates=None,
        near_duplicates=None,
        skills=0,
        effective_skills=None,
        documents=0,
    )


def story(rounds: int) -> list[Message]:
    """Each round has two new environments and plays those of the round before again; round 1 repeats one."""
    messages: list[Message] = []
    for number in range(rounds):
        text = source(GAMES[0]) if number < 2 else source(GAMES[number % len(GAMES)], number)
        messages += [
            written(f"a{number}", text, cohort=number, document=f"doc {number // 2}"),
            written(f"b{number}", source("other", number), cohort=number, skill="Optimization"),
        ]
        live = [f"{kind}{at}" for at in (number - 1, number) for kind in "ab" if at >= 0]
        messages += played(number, live)
    return messages


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = history.create(tmp_path / "run.db")
    yield connection
    connection.close()


def test_rounds_are_measured_from_what_was_played(database: sqlite3.Connection) -> None:
    history.apply(database, events(story(4)))
    assert diversity.record(database) == 4
    rows = diversity.rounds(database)
    assert [row["round"] for row in rows] == [0, 1, 2, 3]
    assert [row["environments"] for row in rows] == [2, 4, 4, 4]
    assert [row["duplicates"] for row in rows] == [0.0, 0.25, 0.0, 0.0]
    assert [row["documents"] for row in rows] == [1, 1, 2, 1]
    assert 1 < rows[0]["vendi"] < rows[2]["vendi"] < 4


def test_missed_rounds_are_measured_a_few_at_a_time(database: sqlite3.Connection) -> None:
    history.apply(database, events(story(AT_ONCE + 2)))
    assert [diversity.record(database) for _ in range(3)] == [AT_ONCE, 2, 0]


async def test_the_recorder_keeps_them_over_two_lives(tmp_path: Path) -> None:
    bus, path = MemoryBus(run="toy", role="supervisor", instance="s"), tmp_path / "run.db"
    messages = story(4)
    for part in (messages[: len(messages) // 2], messages[len(messages) // 2 :]):
        await bus.publish_all(part)
        recorder = Recorder(bus, path)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(recorder.run)
            assert await recorder.caught_up(20)
            tasks.cancel_scope.cancel()
        recorder.close()
    connection = history.open_for_reading(path)
    found, state = diversity.rounds(connection), standing.read(connection)
    connection.close()
    assert [row["round"] for row in found] == [0, 1, 2, 3]
    assert state.diversity == found[-1]
