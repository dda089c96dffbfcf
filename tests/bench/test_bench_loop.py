"""The loop benchmark reads throughput and idle shares from a run's database."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from engine.bench import loop
from engine.bench.harness import LoadMeter
from engine.errors import ConfigError, SpadeError
from engine.records import history

RECIPE = Path(__file__).parents[2] / "configs" / "nano.toml"


def test_the_union_of_intervals() -> None:
    assert loop.covered([(1, 3), (2, 4), (2.5, 2.6), (6, 9)], 0, 8) == 5
    assert loop.covered([(-5, 1), (7, 20)], 0, 8) == 2
    assert loop.covered([], 0, 8) == 0


@pytest.fixture
def database(tmp_path: Path) -> Path:
    """A run whose training ends at 10, 14 and 20, each step 2 s, and whose episodes last from 10 to 18."""
    path = tmp_path / "run.db"
    db = history.create(path)
    for number, at in enumerate((10.0, 14.0, 20.0)):
        db.execute(
            "INSERT INTO batches (id, at, round, agent_samples, designer_samples, seconds, final)"
            " VALUES (?, ?, ?, 30, 10, 2.0, 0)",
            (str(number), at, number),
        )
    for number in range(8):
        db.execute(
            "INSERT INTO episodes (episode, at, tokens, seconds) VALUES (?, ?, 50, 1.0)",
            (str(number), 11.0 + number),
        )
    db.close()
    return path


def test_figures_of_a_run(database: Path) -> None:
    found = loop.figures(database, LoadMeter().stop())
    assert (found.rounds, found.seconds) == (2, 10.0)
    assert found.samples_per_s == 8.0
    assert found.episodes_per_s == 0.8
    assert found.tokens_per_s == 40.0
    assert found.learner_idle_share == pytest.approx(0.6)
    assert found.agent_idle_share == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("DELETE FROM batches WHERE round > 0", "trained 1 batches"),
        ("UPDATE batches SET agent_samples = 0, designer_samples = 0", "trained no sample"),
    ],
)
def test_a_run_that_trained_too_little_is_refused(database: Path, change: str, complaint: str) -> None:
    with sqlite3.connect(database) as db:
        db.execute(change)
    with pytest.raises(SpadeError, match=complaint):
        loop.figures(database, LoadMeter().stop())


def test_a_bad_override_starts_nothing(tmp_path: Path) -> None:
    options = loop.LoopOptions(recipe=RECIPE, overrides=("run.stepps=3",), directory=tmp_path)
    with pytest.raises(ConfigError, match="stepps"):
        loop.measure(options)
    assert not list(tmp_path.iterdir())
