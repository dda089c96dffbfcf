"""The result of one run as a JSON record: held-out results by plays, and the figures of its rounds."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from engine.files import replace
from engine.lineage import Version
from engine.records import diversity, history, status

_VALUES = {
    "level": "difficulty",
    "band": "in_band",
    "gradient": "gradient_share",
    "plain": "plain",
    "hinted": "hinted",
    "reward": "reward",
}


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation: after ``plays`` trained plays; ``overlap`` designs repeat a program of the suite."""

    suite: str
    step: int
    plays: int
    tokens: int
    episodes: int
    win: float
    stderr: float
    overlap: int
    by_family: dict[str, float]


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One finished run. ``rounds`` has a row for each round; ``processor`` are seconds of processor time."""

    cell: str
    seed: int
    steps: int
    recipe: str
    commit: str
    seconds: float
    processor: float
    load: float
    evaluations: tuple[Evaluation, ...]
    rounds: tuple[dict[str, float | None], ...]


def write(path: Path, record: Record) -> None:
    """Write ``record`` in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, msgspec.json.encode(record) + b"\n", durable=True)


def read(path: Path) -> Record:
    """Return a record. Raises msgspec.ValidationError or OSError."""
    return msgspec.json.decode(path.read_bytes(), type=Record)


def collect(database: Path) -> tuple[tuple[Evaluation, ...], tuple[dict[str, float | None], ...]]:
    """Return evaluations and rounds on the path to a run's final weights. Raises sqlite3.Error."""
    with closing(history.open_for_reading(database)) as db:
        tree = status.lineage(db)
        rounds = _rounds(db, status.surviving(db, tree))
        done = {row["round"]: row for row in rounds}
        evaluations = []
        for row in db.execute(
            f"SELECT * FROM evaluations WHERE {status.alive_evaluation(tree)} ORDER BY step, suite"
        ):
            before = [one for number, one in done.items() if number < row["step"]]
            last: dict[str, Any] = before[-1] if before else {"plays": 0, "tokens": 0}
            evaluations.append(
                Evaluation(
                    plays=last["plays"],
                    tokens=last["tokens"],
                    by_family=json.loads(row["by_family"]),
                    **{key: row[key] for key in ("suite", "step", "episodes", "win", "stderr", "overlap")},
                )
            )
        return tuple(evaluations), tuple(rounds)


def _rounds(db: sqlite3.Connection, batches: list[dict[str, Any]]) -> list[dict[str, float | None]]:
    counts = {
        row[0]: (row[1], row[2])
        for row in db.execute(
            "SELECT round, COUNT(*), SUM(tokens) FROM episodes WHERE arm = 'plain' GROUP BY round"
        )
    }
    measured_rounds = {row["round"]: row for row in diversity.rounds(db)}
    valid = history.valid_shares(db)
    levels = {batch["round"]: batch for batch in batches}
    began = db.execute("SELECT MIN(at) FROM episodes").fetchone()[0]
    found: list[dict[str, float | None]] = []
    plays = tokens = 0
    for number, summary in db.execute("SELECT round, summary FROM rounds ORDER BY round"):
        told = json.loads(summary)
        batch = levels.get(number)
        if batch is None:
            continue
        plays, tokens = plays + counts.get(number, (0, 0))[0], tokens + counts.get(number, (0, 0))[1]
        measured = measured_rounds.get(number, {})
        values: dict[str, float | None] = {
            "round": number,
            "plays": plays,
            "tokens": tokens,
            "seconds": batch["at"] - began,
            **{name: told.get(key) for name, key in _VALUES.items()},
            "valid": valid.get(number),
            "vendi": measured.get("vendi"),
            "near_duplicates": measured.get("near_duplicates"),
            "staleness": batch["mean_staleness"],
            "version": Version.unpack(batch["version"]).step,
        }
        found.append({key: round(value, 4) if value is not None else None for key, value in values.items()})
    return found
