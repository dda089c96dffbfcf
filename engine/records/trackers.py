"""Experiment trackers: the figures of each round, sent to TensorBoard, trackio, Weights & Biases or MLflow.

``run.trackers`` names them. A tracker is an entry point of the group ``spade.trackers``: a class that is
called with a :class:`TrackedRun` and has the methods of :class:`Tracker`. The recorder calls it in its worker
thread, once per round in ascending order; after a crash the newest round may be sent a second time.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import msgspec
import structlog

from engine import registry
from engine.config import Config
from engine.errors import ConfigError
from engine.records import history

_log = structlog.get_logger()
_PROJECT = "spade"
_NOTE = "tracked_round"
_SAMPLES = """SELECT e.skill, e.title, s.win, s.regret, s.reward, e.hint, e.source FROM scores s
JOIN environments e USING (design) WHERE s.round = ?
ORDER BY json_extract(s.fields, '$.regret_low') DESC, s.reward DESC, s.design LIMIT 3"""
_PLAYS = """SELECT COUNT(*) AS episodes, SUM(tokens) AS tokens, MAX(at) - MIN(at) AS seconds,
AVG(turns) AS turns FROM episodes WHERE round = ?"""
_SCORES = """SELECT AVG(win) AS win, AVG(regret) AS regret, AVG(json_extract(fields, '$.regret_low')) AS low,
AVG(json_extract(fields, '$.noise_floor')) AS noise FROM scores WHERE round = ?"""
_UPDATES = """SELECT MAX(seconds) AS update_seconds, MAX(canary_error) AS canary_error FROM updates
WHERE version = ?"""
# Those that ended while the round was open; the last round has all that came after the one before.
_EVALUATIONS = """SELECT suite, win, stderr, step FROM evaluations
WHERE sequence > COALESCE((SELECT MAX(sequence) FROM rounds WHERE round < ?1), -1)
AND (sequence < (SELECT sequence FROM rounds WHERE round = ?1) OR ?1 = (SELECT MAX(round) FROM rounds))
ORDER BY sequence"""

Figures = Mapping[str, float]
Samples = Sequence[Mapping[str, Any]]


def require(config: Config) -> None:
    """Check that a recipe's trackers are registered and installed. Raises ConfigError."""
    for name in config.run.trackers:
        made = registry.load(registry.TRACKERS, name, where="run.trackers")
        package = getattr(made, "package", None)
        if package and find_spec(package) is None:
            raise ConfigError(
                f"run.trackers has {name!r}, but the package {package} is not installed.",
                remedy=f"Install it (pip install {package}), or take the name out.",
            )


def _public(config: Config) -> dict[str, Any]:
    """Return the resolved recipe without the tables that may hold secrets."""
    values: dict[str, Any] = msgspec.to_builtins(config)
    del values["bus"], values["server"]["environment"], values["plugins"]
    del values["designer"]["frozen"]["environment"], values["designer"]["external"]["extra"]
    return values


class TrackedRun(msgspec.Struct, frozen=True):
    """The run as a tracker sees it; ``settings`` is the resolved recipe without secrets."""

    name: str
    directory: Path
    settings: dict[str, Any]


class Tracker(Protocol):
    """Receives the figures of rounds."""

    def log(self, figures: Figures, samples: Samples, step: int) -> None:
        """Send round ``step``. A sample is an environment with skill, title, hint, source and scores."""

    def close(self) -> None:
        """Send buffered figures and end the connection."""


class Trackers:
    """Sends the rounds in a run's database to its trackers.

    A tracker that raises is logged and left out until the run is resumed; the run goes on. Raises ConfigError
    for a tracker that is not registered.
    """

    def __init__(self, config: Config, directory: Path) -> None:
        self._run = TrackedRun(config.run.name, directory, _public(config))
        self._classes = {
            name: registry.load(registry.TRACKERS, name, where="run.trackers") for name in config.run.trackers
        }
        self._open: dict[str, Tracker] = {}

    def record(self, connection: sqlite3.Connection) -> int:
        """Send the rounds that are summed up and not sent yet; return their number. Raises sqlite3.Error.

        A round is sent when the next one is summed up: by then its batch has been trained in most runs.
        """
        return self._send(connection, "SELECT MAX(round) - 1 FROM rounds")

    def close(self, connection: sqlite3.Connection) -> None:
        """Send the last round and close all trackers. Raises sqlite3.Error."""
        self._send(connection, "SELECT MAX(round) FROM rounds")
        for name, tracker in list(self._open.items()):
            self._guarded(name, tracker.close)
        self._open.clear()

    def _send(self, connection: sqlite3.Connection, newest: str) -> int:
        if not self._classes:
            return 0
        note = connection.execute("SELECT value FROM notes WHERE name = ?", (_NOTE,)).fetchone()
        done = int(json.loads(note[0])) if note else -1
        (last,) = connection.execute(newest).fetchone()
        rounds = range(done + 1, -1 if last is None else last + 1)
        for number in rounds:
            found, samples = figures(connection, number), history.rows(connection, _SAMPLES, number)
            for name in list(self._classes):
                self._guarded(name, self._log, name, found, samples, number)
            history.put_note(connection, _NOTE, number)
        return len(rounds)

    def _log(self, name: str, found: Figures, samples: Samples, number: int) -> None:
        if name not in self._open:
            self._open[name] = self._classes[name](self._run)
        self._open[name].log(found, samples, number)

    def _guarded(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        """Call a tracker. It is third-party code that uses a network, so its faults must not end the run."""
        try:
            call(*arguments)
        except Exception as error:
            _log.warning("tracker.failed", tracker=name, error=f"{type(error).__name__}: {error}")
            self._classes.pop(name, None)
            self._open.pop(name, None)


def figures(connection: sqlite3.Connection, number: int) -> dict[str, float]:
    """Return the figures of round ``number`` as ``group/name``. Raises sqlite3.Error."""
    groups: dict[str, dict[str, Any]] = {}
    for row in history.rows(connection, "SELECT summary FROM rounds WHERE round = ?", number):
        summary = json.loads(row["summary"])
        groups["failures"] = summary.pop("failures")
        groups["round"] = summary | {"valid": history.valid_shares(connection).get(number)}
    for row in history.rows(connection, "SELECT fields FROM diversity WHERE round = ?", number):
        groups["diversity"] = json.loads(row["fields"])
    for row in history.rows(connection, "SELECT * FROM batches WHERE round = ? ORDER BY sequence", number):
        groups["learner"] = json.loads(row.pop("metrics")) | row
    groups["scores"] = history.rows(connection, _SCORES, number)[0]
    groups["plays"] = history.rows(connection, _PLAYS, number)[0]
    if groups["plays"]["seconds"]:
        rate = groups["plays"]["tokens"] / groups["plays"]["seconds"]
        groups["plays"]["tokens_per_second"] = rate
    rejected = "SELECT rung, COUNT(*) AS n FROM rejections WHERE cohort = ? GROUP BY rung"
    groups["rejected"] = {row["rung"]: row["n"] for row in history.rows(connection, rejected, number)}
    if "learner" in groups:
        groups["weights"] = history.rows(connection, _UPDATES, groups["learner"]["version"])[0]
    suites = history.rows(connection, _EVALUATIONS, number)
    for name, column in (("held_out", "win"), ("held_out_stderr", "stderr"), ("held_out_step", "step")):
        groups[name] = {row["suite"]: row[column] for row in suites}
    return {
        f"{group}/{name}": float(value)
        for group, values in groups.items()
        for name, value in values.items()
        if isinstance(value, int | float)
    }


class TensorBoard:
    """Event files in ``RUN/tensorboard``: scalars, and the samples as text."""

    package = "tensorboard"

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(run.directory / "tensorboard"))

    def log(self, figures: Figures, samples: Samples, step: int) -> None:
        """Write one event with all figures and samples."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        values = [Summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        text = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        for index, sample in enumerate(samples):
            tensor = TensorProto(dtype=DT_STRING, string_val=[_markdown(sample).encode()])
            values.append(Summary.Value(tag=f"environment/{index}", tensor=tensor, metadata=text))
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WandbLike:
    """Trackers with the interface of Weights & Biases: module ``package``, its ``init`` and ``Table``."""

    package = "wandb"

    def __init__(self, run: TrackedRun) -> None:
        self._module = import_module(self.package)
        self._run = self._module.init(
            project=_PROJECT, name=run.name, config=run.settings, resume="allow", **self.arguments(run)
        )

    def arguments(self, run: TrackedRun) -> dict[str, Any]:
        """Return the arguments of ``init`` that only this tracker has."""
        return {"id": f"{_PROJECT}-{run.name}", "dir": str(run.directory)}

    def log(self, figures: Figures, samples: Samples, step: int) -> None:
        """Send the figures with a table of the samples."""
        sent: dict[str, Any] = dict(figures)
        if samples:
            columns = list(samples[0])
            rows = [[sample[column] for column in columns] for sample in samples]
            sent["environments"] = self.table(columns, rows)
        self._run.log(sent, step=step)

    def table(self, columns: list[str], rows: list[list[Any]]) -> Any:
        """Return the tracker's own table."""
        return self._module.Table(columns=columns, data=rows)

    def close(self) -> None:
        """Wait until all is sent."""
        self._run.finish()


class Trackio(WandbLike):
    """trackio, local by default: ``trackio show --project spade``."""

    package = "trackio"

    def arguments(self, run: TrackedRun) -> dict[str, Any]:
        """Return none: trackio knows a run by its name."""
        return {}

    def table(self, columns: list[str], rows: list[list[Any]]) -> Any:
        """Return trackio's table, which takes a data frame."""
        import pandas

        return self._module.Table(dataframe=pandas.DataFrame(rows, columns=columns))


class MLflow:
    """MLflow: figures as metrics, samples as one text artifact per round."""

    package = "mlflow"

    def __init__(self, run: TrackedRun) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(_PROJECT)
        known = mlflow.search_runs(filter_string=f"tags.spade_run = '{run.name}'", output_format="list")
        started = mlflow.start_run(run_id=known[0].info.run_id if known else None, run_name=run.name)
        self._id = started.info.run_id
        if not known:
            mlflow.set_tag("spade_run", run.name)
            mlflow.log_dict(run.settings, "recipe.json")

    def log(self, figures: Figures, samples: Samples, step: int) -> None:
        """Send the figures and the samples."""
        self._mlflow.log_metrics(dict(figures), step=step, run_id=self._id)
        if samples:
            self._mlflow.log_text("\n\n".join(map(_markdown, samples)), f"environments/{step}.md", self._id)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


def _markdown(sample: Mapping[str, Any]) -> str:
    """Return an environment as Markdown."""
    scores = ", ".join(f"{name} {sample[name]}" for name in ("skill", "win", "regret", "reward"))
    return f"**{sample['title']}** ({scores})\n\nHint: {sample['hint']}\n\n```python\n{sample['source']}\n```"
