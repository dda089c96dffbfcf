"""The run's history in SQLite: the tables, and the effect of each event on them.

:func:`apply` writes a batch of events and the stream position in one transaction, so each event takes effect
exactly once, whenever the process dies. An event with a known logical id (published twice) changes nothing.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from engine.lineage import Version

if TYPE_CHECKING:
    # Readers of the database (`spade status`) start faster without the bus.
    from bus import messages as m

SCHEMA = """
CREATE TABLE IF NOT EXISTS position (one INTEGER PRIMARY KEY CHECK (one = 1), sequence INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value REAL NOT NULL);
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS policies (version INTEGER PRIMARY KEY, sequence INTEGER, at REAL, fence INTEGER,
    step INTEGER, uri TEXT, sha256 TEXT, size INTEGER);
CREATE TABLE IF NOT EXISTS batches (id TEXT PRIMARY KEY, sequence INTEGER, at REAL, round INTEGER,
    fence INTEGER, step INTEGER, version INTEGER, trained INTEGER, agent_samples INTEGER,
    designer_samples INTEGER, max_staleness INTEGER, mean_staleness REAL, dropped TEXT, metrics TEXT,
    seconds REAL, final INTEGER);
CREATE TABLE IF NOT EXISTS servers (server TEXT PRIMARY KEY, epoch TEXT, url TEXT, version INTEGER,
    canary_error REAL, at REAL, lost TEXT);
CREATE TABLE IF NOT EXISTS updates (id TEXT PRIMARY KEY, sequence INTEGER, at REAL, server TEXT, epoch TEXT,
    version INTEGER, canary_error REAL, seconds REAL);
CREATE TABLE IF NOT EXISTS rounds (round INTEGER PRIMARY KEY, sequence INTEGER, at REAL, summary TEXT);
CREATE TABLE IF NOT EXISTS diversity (round INTEGER PRIMARY KEY, fields TEXT);
CREATE TABLE IF NOT EXISTS environments (design TEXT PRIMARY KEY, sequence INTEGER, at REAL, cohort INTEGER,
    attempt INTEGER, skill TEXT, environment TEXT, source TEXT, hint TEXT, document TEXT, title TEXT,
    trivial_win_rate REAL, degenerate INTEGER, difficulty REAL, family TEXT);
CREATE TABLE IF NOT EXISTS labels (design TEXT PRIMARY KEY, flag TEXT, fields TEXT);
CREATE TABLE IF NOT EXISTS scores (design TEXT PRIMARY KEY, sequence INTEGER, at REAL, cohort INTEGER,
    round INTEGER, win REAL, regret REAL, reward REAL, advantage REAL, state TEXT, fields TEXT);
CREATE TABLE IF NOT EXISTS rejections (id TEXT PRIMARY KEY, sequence INTEGER, at REAL, design TEXT,
    cohort INTEGER, attempt INTEGER, skill TEXT, rung TEXT, reason TEXT, source TEXT);
CREATE TABLE IF NOT EXISTS designs_failed (design TEXT PRIMARY KEY, sequence INTEGER, at REAL, cohort INTEGER,
    skill TEXT, attempts INTEGER, failure TEXT, reason TEXT);
CREATE TABLE IF NOT EXISTS episodes (episode TEXT PRIMARY KEY, sequence INTEGER, at REAL, design TEXT,
    arm TEXT, round INTEGER, returned REAL, outcome TEXT, failure TEXT, turns INTEGER,
    tokens INTEGER, seconds REAL);
CREATE INDEX IF NOT EXISTS episodes_at ON episodes (at);
CREATE INDEX IF NOT EXISTS episodes_round ON episodes (round);
CREATE TABLE IF NOT EXISTS tool_use (episode TEXT PRIMARY KEY, round INTEGER, turns INTEGER, calls INTEGER,
    malformed INTEGER, done INTEGER, instructions INTEGER);
CREATE TABLE IF NOT EXISTS transcripts (design TEXT, arm TEXT, won INTEGER, episode TEXT, round INTEGER,
    returned REAL, reason TEXT, turns TEXT, PRIMARY KEY (design, arm, won));
CREATE TABLE IF NOT EXISTS failures (episode TEXT PRIMARY KEY, sequence INTEGER, at REAL, design TEXT,
    arm TEXT, round INTEGER, failure TEXT, reason TEXT);
CREATE TABLE IF NOT EXISTS evaluations (id TEXT PRIMARY KEY, sequence INTEGER, at REAL, suite TEXT,
    step INTEGER, version INTEGER, version_high INTEGER, episodes INTEGER, win REAL, stderr REAL,
    by_family TEXT, seconds REAL, overlap INTEGER);
CREATE INDEX IF NOT EXISTS policies_fence ON policies (fence, sequence, step);
CREATE INDEX IF NOT EXISTS batches_round ON batches (round, sequence, fence, step, agent_samples,
    designer_samples, max_staleness, final, dropped);
CREATE INDEX IF NOT EXISTS scores_round ON scores (round, regret);
CREATE INDEX IF NOT EXISTS evaluations_suite ON evaluations (suite, sequence);
CREATE TABLE IF NOT EXISTS gauges (role TEXT, instance TEXT, state TEXT, at REAL, statistics TEXT,
    PRIMARY KEY (role, instance));
CREATE TABLE IF NOT EXISTS waits (round INTEGER PRIMARY KEY, idle REAL);
"""

_NEWEST = (
    "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = MAX(value, excluded.value)"
)
_LABELS = ("summary", "near", "similarity", "flag_reason")
"""Fields of a finding that ``labels`` keeps beside its flag."""
LAST_AT = "last_event_at"
"""The counter that holds the time of the newest event."""


class Event(msgspec.Struct, frozen=True):
    """One message of the EVENT stream. ``at`` is the author's time in seconds since the epoch."""

    sequence: int
    at: float
    message: m.Message


def create(path: Path) -> sqlite3.Connection:
    """Open the database for writing, with its tables. Raises sqlite3.Error."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.executescript(SCHEMA)
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open the database of a run, running or not, without changing it. Raises sqlite3.Error."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    return connection


def set_aside_if_damaged(path: Path) -> Path | None:
    """Rename the database of a run that does not run when it is damaged; return its new path, else None.

    The supervisor then builds a new one from the facts on the bus. Raises OSError.
    """
    try:
        with closing(open_for_reading(path)) as connection:
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:
        return None  # it cannot be opened now; what needs it reports that
    except sqlite3.DatabaseError as error:
        verdict = str(error)
    if verdict == "ok":
        return None
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    for suffix in ("-wal", "-shm", ""):
        file = path.with_name(path.name + suffix)
        if file.exists():
            file.rename(aside.with_name(aside.name + suffix))
    structlog.get_logger().warning("run.database_damaged", reason=verdict, moved_to=str(aside))
    return aside


def rows(connection: sqlite3.Connection, query: str, *parameters: Any) -> list[dict[str, Any]]:
    """Return the answer to ``query``, each row by column. Raises sqlite3.Error."""
    cursor = connection.execute(query, parameters)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def position(connection: sqlite3.Connection) -> int:
    """Return the sequence of the last event that was applied, 0 before the first."""
    row = connection.execute("SELECT sequence FROM position").fetchone()
    return int(row[0]) if row else 0


def last_trained(path: Path) -> int:
    """Return the last round with a trained batch, on any branch, or -1. Raises sqlite3.Error."""
    with closing(open_for_reading(path)) as connection:
        (found,) = connection.execute("SELECT MAX(round) FROM batches").fetchone()
    return -1 if found is None else int(found)


def valid_shares(db: sqlite3.Connection) -> dict[int, float]:
    """Return, by cohort, the share of designs that are valid; one that repeats a known program is, too."""
    found = db.execute(
        "SELECT cohort, AVG(valid) FROM (SELECT cohort, 1.0 AS valid FROM environments"
        " UNION ALL SELECT cohort, rung = 'duplicate' FROM rejections) GROUP BY cohort"
    )
    return dict(found)


def apply(connection: sqlite3.Connection, events: Sequence[Event]) -> int:
    """Write ``events`` and the new position in one transaction; return the number of new events.

    Events at or below the position are skipped. Raises sqlite3.Error, with nothing written.
    """
    fresh = 0
    connection.execute("BEGIN IMMEDIATE")
    try:
        done, newest = position(connection), None
        for event in events:
            if event.sequence <= done:
                continue
            done = event.sequence
            newest = event.at if newest is None else max(newest, event.at)
            handler = _HANDLERS.get(type(event.message).__name__)
            fresh += bool(handler and handler(connection, event, event.message))
        if newest is not None:
            connection.execute(_NEWEST, (LAST_AT, newest))
        connection.execute("INSERT OR REPLACE INTO position VALUES (1, ?)", (done,))
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return fresh


def put_gauges(connection: sqlite3.Connection, heartbeats: Sequence[tuple[float, m.Heartbeat]]) -> None:
    """Store the last heartbeat of each role instance with the time at which it came."""
    rows = [(h.role, h.instance, h.state, at, json.dumps(h.statistics)) for at, h in heartbeats]
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany("INSERT OR REPLACE INTO gauges VALUES (?, ?, ?, ?, ?)", rows)
    idle = [share for _, h in heartbeats for name, share in h.statistics.items() if name.endswith(".idle")]
    if idle:
        connection.execute(
            "INSERT OR REPLACE INTO waits SELECT MAX(round), ? FROM batches HAVING MAX(round) IS NOT NULL",
            (fmean(idle),),
        )
    connection.execute("COMMIT")


def put_note(connection: sqlite3.Connection, name: str, value: Any) -> None:
    """Store a fact about the run itself (its start, its end) as JSON."""
    connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, json.dumps(value)))


def _insert(db: sqlite3.Connection, table: str, event: Event, counter: str = "", **given: Any) -> bool:
    """Insert a row unless its id exists; return True if it was new, and count it in ``counter``.

    A column is ``given``, else it is the field of that name of the event or of its message.
    """
    values = {
        name: getattr(event if name in ("sequence", "at") else event.message, name)
        for name in _columns(table)
        if name not in given
    } | given
    columns, marks = ", ".join(values), ", ".join("?" * len(values))
    query = f"INSERT OR IGNORE INTO {table} ({columns}) VALUES ({marks})"
    new = db.execute(query, tuple(values.values())).rowcount > 0
    if new and counter:
        _count(db, counter)
    return new


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


@cache
def _columns(table: str) -> list[str]:
    with closing(sqlite3.connect(":memory:")) as scratch:
        scratch.executescript(SCHEMA)
        return [row[1] for row in scratch.execute(f"PRAGMA table_info({table})")]


def _count(connection: sqlite3.Connection, name: str, by: float = 1) -> None:
    connection.execute(
        "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
        (name, by),
    )


def _batch(db: sqlite3.Connection, event: Event, x: m.BatchTrained) -> bool:
    return _insert(
        db,
        "batches",
        event,
        id=x.key,
        fence=Version.unpack(x.version).fence,
        trained=len(x.trained),
        dropped=_json(Counter(cause for _, cause in x.dropped)),
        metrics=json.dumps(x.metrics),
    )


def _serving(db: sqlite3.Connection, event: Event, x: m.ServerServing) -> bool:
    db.execute(
        "INSERT OR REPLACE INTO servers VALUES (?, ?, ?, ?, ?, ?, NULL)",
        (x.server, x.epoch, x.url, x.version, x.canary_error, event.at),
    )
    return _insert(db, "updates", event, id=x.key)


def _lost(db: sqlite3.Connection, event: Event, x: m.ServerLost) -> bool:
    changed = db.execute(
        "UPDATE servers SET lost = ?, at = ? WHERE server = ? AND epoch = ? AND lost IS NULL",
        (x.reason, event.at, x.server, x.epoch),
    )
    return changed.rowcount > 0


def _round(db: sqlite3.Connection, event: Event, x: m.RoundSummary) -> bool:
    # Standings serve the designer's memory; scores of closed windows have their own table.
    return _insert(db, "rounds", event, summary=_json(msgspec.structs.replace(x, standings=())))


def _ready(db: sqlite3.Connection, event: Event, x: m.EnvironmentReady) -> bool:
    found = x.finding
    own = {name: getattr(found, name) for name in ("title", "trivial_win_rate", "degenerate")}
    new = _insert(db, "environments", event, "environments_accepted", **own)
    if new:
        labels = {name: getattr(found, name) for name in _LABELS} | {"prompt": x.prompt}
        db.execute("INSERT OR REPLACE INTO labels VALUES (?, ?, ?)", (x.design, found.flag, _json(labels)))
    return new


def _finished(db: sqlite3.Connection, event: Event, x: m.EpisodeFinished) -> bool:
    if not _insert(db, "episodes", event, "episodes_finished"):
        return False
    _count(db, "tokens_sampled", x.tokens)
    if x.failure is not None:
        _count(db, f"episodes_ended_by:{x.failure}")
    if x.tool_use is not None:
        used = {name: getattr(x.tool_use, name) for name in ("calls", "malformed", "done")}
        _insert(db, "tool_use", event, instructions=x.tool_use.of, **used)
    if x.transcript:
        _insert(db, "transcripts", event, won=x.returned > 0, turns=_json(x.transcript))
    return True


_HANDLERS: dict[str, Callable[[sqlite3.Connection, Event, Any], bool]] = {
    "PolicyPublished": lambda db, event, x: _insert(
        db, "policies", event, **Version.unpack(x.version)._asdict()
    ),
    "BatchTrained": _batch,
    "ServerServing": _serving,
    "ServerLost": _lost,
    "RoundSummary": _round,
    "EnvironmentReady": _ready,
    "EnvironmentScored": lambda db, event, x: _insert(db, "scores", event, fields=_json(x)),
    "DesignRejected": lambda db, event, x: _insert(db, "rejections", event, "designs_rejected", id=x.key),
    "DesignFailed": lambda db, event, x: _insert(db, "designs_failed", event),
    "EpisodeFinished": _finished,
    "EpisodeFailed": lambda db, event, x: _insert(db, "failures", event, f"episodes_failed:{x.failure}"),
    "EvaluationFinished": lambda db, event, x: _insert(
        db,
        "evaluations",
        event,
        id=f"evaluation:{x.suite}:{x.step}:{x.version}",
        by_family=_json(x.by_family),
    ),
}
