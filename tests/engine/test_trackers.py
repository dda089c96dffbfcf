"""Experiment trackers: each round's figures, once, in TensorBoard, trackio and what has W&B's interface."""

from __future__ import annotations

import json
import sqlite3
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scenes.small_run import (
    batch,
    config,
    evaluation,
    events,
    finished,
    policy,
    ready,
    rejected,
    scored,
    summary,
)

from engine.config import RunConfig
from engine.errors import ConfigError
from engine.records import history, trackers
from engine.records.trackers import Trackers

STORY = {
    "round/plain": 0.4,
    "round/hinted": 0.6,
    "round/difficulty": 1.2,
    "round/valid": 0.5,
    "round/reward": 0.3,
    "scores/regret": 0.25,
    "learner/loss": 0.1,
    "learner/entropy": 1.5,
    "learner/grad_norm": 0.7,
    "learner/max_staleness": 1.0,
    "held_out/mid": 0.51,
    "held_out_step/mid": 1.0,
    "plays/tokens": 6.0,
    "plays/tokens_per_second": 6.0,
    "rejected/parse": 1.0,
}
"""Figures that the first round of :func:`database` must show."""


def tracking(*names: str) -> Any:
    return config(run=RunConfig(name="toy", steps=1, trackers=names))


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    """Two rounds, of which the first has all figures."""
    trained = batch(0, 1)
    trained = msgspec.structs.replace(trained, metrics=trained.metrics | {"entropy": 1.5, "grad_norm": 0.7})
    first = [policy(0), ready("d1"), rejected("d2"), finished("e1"), finished("e2"), scored("d1")]
    first += [evaluation(1), summary(0)]
    connection = history.create(tmp_path / "run.db")
    history.apply(connection, events([*first, trained, policy(1), evaluation(2), summary(1), evaluation(3)]))
    yield connection
    connection.close()


def send(connection: sqlite3.Connection, directory: Path, *names: str) -> None:
    made = Trackers(tracking(*names), directory)
    made.record(connection)
    made.close(connection)


def test_tensorboard_has_the_figures_and_the_environments(
    database: sqlite3.Connection, tmp_path: Path
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send(database, tmp_path, "tensorboard")
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    for name, value in STORY.items():
        (point,) = [point for point in reader.Scalars(name) if point.step == 0]
        assert point.value == pytest.approx(value), name
    assert [point.step for point in reader.Scalars("round/plain")] == [0, 1]
    assert reader.Scalars("held_out/mid")[-1].value == pytest.approx(0.53), "which came after the last round"
    (text,) = reader.Tensors("environment/0")
    assert b"class CountEnv" in text.tensor_proto.string_val[0]


def test_trackio_has_the_figures_the_settings_and_the_environments(
    database: sqlite3.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio")
    from trackio import utils

    monkeypatch.setattr(utils, "TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    send(database, tmp_path, "trackio")
    with sqlite3.connect(tmp_path / "trackio" / "spade.db") as found:
        rows = [
            (step, json.loads(metrics))
            for step, metrics in found.execute("SELECT step, metrics FROM metrics")
        ]
        (settings,) = found.execute("SELECT config FROM configs").fetchone()
    assert [step for step, _ in rows] == [0, 1]
    assert {name: rows[0][1][name] for name in STORY} == pytest.approx(STORY)
    assert "class CountEnv" in json.dumps(rows[0][1]["environments"])
    assert json.loads(settings)["run"]["name"] == "toy"
    assert "bus" not in json.loads(settings), "its token is nobody else's"


class Wandb:
    """The part of the package wandb that is used, with what it was sent."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.sent: list[tuple[int, dict[str, Any]]] = []
        self.finished = 0
        self.broken_at = -1

    def init(self, **arguments: Any) -> Wandb:
        self.begun.append(arguments)
        return self

    def log(self, values: dict[str, Any], *, step: int) -> None:
        if step == self.broken_at:
            raise ConnectionError("no route to the tracker")
        self.sent.append((step, values))

    def finish(self) -> None:
        self.finished += 1

    def Table(self, columns: list[str], data: list[list[Any]]) -> Any:
        return types.SimpleNamespace(columns=columns, data=data)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    made = Wandb()
    monkeypatch.setattr(trackers, "import_module", lambda name: {"wandb": made}[name])
    return made


def test_a_resumed_run_goes_on_behind_the_last_round_that_was_sent(
    database: sqlite3.Connection, tmp_path: Path, wandb: Wandb
) -> None:
    first = Trackers(tracking("wandb"), tmp_path)
    assert first.record(database) == 1
    assert first.record(database) == 0
    history.apply(database, events([summary(2), summary(3)], start=50))
    send(database, tmp_path, "wandb")
    assert [step for step, _ in wandb.sent] == [0, 1, 2, 3]
    assert {name: wandb.sent[0][1][name] for name in STORY} == pytest.approx(STORY)
    assert [arguments["id"] for arguments in wandb.begun] == ["spade-toy", "spade-toy"]
    assert wandb.finished == 1


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(
    database: sqlite3.Connection, tmp_path: Path, wandb: Wandb
) -> None:
    wandb.broken_at = 0
    send(database, tmp_path, "wandb", "tensorboard")
    assert wandb.sent == []
    assert list((tmp_path / "tensorboard").iterdir())


def test_without_trackers_nothing_is_written(database: sqlite3.Connection, tmp_path: Path) -> None:
    send(database, tmp_path)
    assert database.execute("SELECT COUNT(*) FROM notes").fetchone() == (0,)


def test_unknown_and_missing_trackers_are_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    trackers.require(tracking("tensorboard"))
    with pytest.raises(ConfigError, match="no tracker 'wanbd'") as caught:
        trackers.require(tracking("wanbd"))
    assert "wandb" in caught.value.remedy
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"run\.trackers has 'mlflow'") as caught:
        trackers.require(tracking("mlflow"))
    assert "pip install mlflow" in caught.value.remedy
