"""Diversity: golden Vendi scores, laws it obeys, and the same figures however a run was measured."""

from __future__ import annotations

import math
import sqlite3
import weakref
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
from scenes.small_run import events, summary

from bus.messages import Message
from engine.diversity.measures import (
    Sketch,
    Vectors,
    WrittenEnvironment,
    effective,
    measure,
    near_duplicates,
    novelty,
    sampled,
    vendi,
)
from engine.diversity.similarity import HashedTfidf
from engine.records import diversity_log, history
from engine.records import status as standing
from engine.records.diversity_log import AT_ONCE, DiversityMeter
from engine.records.recorder import Recorder


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

    def test_wide_and_tall_kernels_agree(self) -> None:
        rows = unit(np.random.default_rng(3).normal(size=(40, 6)))
        padded = np.pad(rows, ((0, 0), (0, 60)))
        assert vendi(rows) == pytest.approx(vendi(padded), rel=1e-6)


class TestParts:
    def test_effective_kinds(self) -> None:
        assert effective([5, 5, 5]) == pytest.approx(3.0)
        assert effective([7]) == pytest.approx(1.0)

    def test_near_duplicates_have_one_before_them(self) -> None:
        rows = unit([[1, 0], [0, 1], [1, 0.01], [0.7, 0.7], [0, 1]])
        assert near_duplicates(rows, 0.99) == pytest.approx(2 / 5)
        assert near_duplicates(rows[:0], 0.99) is None

    def test_novelty_is_the_distance_to_the_nearest_before(self) -> None:
        before = unit([[1, 0, 0], [0, 1, 0]])
        rows = unit([[1, 0, 0], [0, 0, 1], [0.6, 0, 0.8]])
        assert novelty(rows, before) == pytest.approx((0 + 1 + 0.4) / 3, abs=1e-6)
        assert novelty(rows, None) is None

    @settings(max_examples=30)
    @given(st.lists(st.text("abcdef", min_size=1, max_size=4), max_size=30), st.randoms())
    def test_a_sketch_holds_the_smallest_names_in_any_order(self, names: list[str], rng: object) -> None:
        shuffled = list(names)
        rng.shuffle(shuffled)  # type: ignore[attr-defined]
        sketch = Sketch(5)
        for name in shuffled:
            if name in sketch.wanted([name]):
                sketch.add(name, np.array([ord(name[0])], np.float32))
        kept = sorted(set(names))[:5]
        vectors = sketch.vectors()
        assert len(sketch) == len(kept)
        assert ([] if vectors is None else vectors[:, 0].tolist()) == [ord(name[0]) for name in kept]
        assert sketch.wanted(names) == []

    def test_a_sketch_keeps_none_of_the_rows_beside_its_own(self) -> None:
        rows = np.eye(4, dtype=np.float32)
        whole = weakref.ref(rows)
        sketch = Sketch(2)
        sketch.add("a", rows[0])
        sketch.add("b", rows[1])
        del rows
        assert whole() is None
        assert sketch.get("b") is not None

    @settings(max_examples=30)
    @given(st.lists(st.text("abc", min_size=1), unique=True, max_size=30), st.randoms())
    def test_a_sample_depends_on_the_names_alone(self, names: list[str], rng: object) -> None:
        shuffled = list(names)
        rng.shuffle(shuffled)  # type: ignore[attr-defined]
        chosen = sampled(names, names, 7)
        assert set(chosen) == set(sampled(shuffled, shuffled, 7))
        assert chosen == [name for name in names if name in chosen]
        assert len(chosen) == min(7, len(names))

    def test_the_figures_of_a_round(self) -> None:
        items = [
            WrittenEnvironment("d1", "one", "a", "x"),
            WrittenEnvironment("d2", "one", "a", "x"),
            WrittenEnvironment("d3", "two", "b", ""),
            WrittenEnvironment("d4", "three", "b", "y"),
        ]
        rows = np.eye(3, 4, dtype=np.float32)[[0, 0, 1, 2]]
        found = measure(
            items,
            rows,
            near=0.97,
            new={"d3", "d4"},
            before=np.eye(3, 4, dtype=np.float32)[[1]],
            known={"two"},
            documents_so_far=9,
        )
        assert (found.environments, found.skills, found.documents, found.documents_so_far) == (4, 2, 2, 9)
        assert (found.duplicates, found.near_duplicates) == (0.25, 0.25)
        assert (found.new, found.repeats, found.novelty, found.compared) == (2, 0.5, 0.5, 1)
        assert found.effective_skills == pytest.approx(2.0)
        assert found.vendi == pytest.approx(math.exp(0.5 * math.log(2) + 0.5 * math.log(4)), abs=1e-5)

    def test_an_empty_round_has_no_figures(self) -> None:
        found = measure([], np.zeros((0, 1), np.float32), near=0.9)
        assert (found.environments, found.vendi, found.duplicates, found.novelty) == (0, None, None, None)


class Counting:
    """An embedder that counts texts."""

    name, near = "hashed", 0.97

    def __init__(self) -> None:
        self.texts = 0
        self._inner = HashedTfidf()

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.texts += len(texts)
        return self._inner.embed(texts)


def story(rounds: int) -> list[Message]:
    """Each round has two new environments and plays those of the round before again; round 2 repeats one."""
    messages: list[Message] = []
    for number in range(rounds):
        text = source(GAMES[0]) if number == 2 else source(GAMES[number % len(GAMES)], number)
        other = source("other", number)
        messages += [
            written(f"a{number}", text, cohort=number, document=f"doc {number // 2}"),
            written(f"b{number}", other, cohort=number, skill="Optimization"),
        ]
        live = [f"{kind}{at}" for at in (number - 1, number) for kind in "ab" if at >= 0]
        messages += played(number, live)
    return messages


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = history.create(tmp_path / "run.db")
    yield connection
    connection.close()


class TestLog:
    def test_rounds_are_measured_from_what_was_played(self, database: sqlite3.Connection) -> None:
        history.apply(database, events(story(4)))
        assert DiversityMeter().record(database) == 4
        rows = diversity_log.rounds(database)
        assert [row["round"] for row in rows] == [0, 1, 2, 3]
        assert [row["environments"] for row in rows] == [2, 4, 4, 4]
        assert [row["new"] for row in rows] == [2, 2, 2, 2]
        assert [row["repeats"] for row in rows] == [0.0, 0.0, 0.5, 0.0]
        assert [row["documents_so_far"] for row in rows] == [1, 1, 2, 2]
        assert [row["compared"] for row in rows] == [0, 2, 4, 5]
        assert rows[0]["novelty"] is None
        assert 0 < rows[1]["novelty"] < 1
        assert 1 < rows[0]["vendi"] < rows[1]["vendi"] < 4

    def test_a_meter_that_starts_again_finds_the_same(self, database: sqlite3.Connection) -> None:
        messages = story(7)
        history.apply(database, events(messages))
        whole = DiversityMeter(sample=6)
        expected = [whole.measure(database, number) for number in range(7)]
        for start in range(7):
            assert DiversityMeter(sample=6).measure(database, start) == expected[start]

    def test_a_meter_keeps_little_of_what_is_long_past(
        self, database: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A run of weeks has more designs than fit: of those whose window is closed none is kept by name."""
        history.apply(database, events(story(12)))
        whole = DiversityMeter()
        expected = [whole.measure(database, number) for number in range(12)]
        assert len(whole._designs) > 16
        monkeypatch.setattr(diversity_log, "_PLAYED_ROUNDS", 3)
        meter = DiversityMeter()
        assert [meter.measure(database, number) for number in range(12)] == expected
        assert len(meter._designs) <= 8
        assert all(isinstance(program, int) for program in meter._known)

    def test_what_was_missed_is_made_up_for_little_by_little(self, database: sqlite3.Connection) -> None:
        history.apply(database, events(story(AT_ONCE + 2)))
        meter = DiversityMeter()
        assert [meter.record(database) for _ in range(3)] == [AT_ONCE, 2, 0]

    def test_each_program_is_read_once_while_it_is_played(self, database: sqlite3.Connection) -> None:
        embedder = Counting()
        meter = DiversityMeter(embedder)
        messages = story(6)
        begun = 0
        for end in [at + 1 for at, message in enumerate(messages) if type(message) is type(summary(0))]:
            history.apply(database, events(messages[begun:end], start=begun + 1))
            meter.record(database)
            begun = end
        assert embedder.texts == len(
            {message.environment for message in messages if hasattr(message, "hint")}
        )

    async def test_the_recorder_keeps_them_over_two_lives(self, tmp_path: Path) -> None:
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
        found, state = diversity_log.rounds(connection), standing.read(connection)
        connection.close()
        assert [row["round"] for row in found] == [0, 1, 2, 3]
        assert [row["repeats"] for row in found] == [0.0, 0.0, 0.5, 0.0]
        assert state.diversity == found[-1]
