"""The edges of the pipeline: how much waits on each, how fast it leaves, how long ago the last one left."""

from __future__ import annotations

import sqlite3
import time
from typing import Any

from engine.records.status import RunStatus

# from, to, what waits between them, the table with a row for each that left (evaluations: for many plays)
_EDGES = (
    ("scorer", "designer", "tickets", "environments"),
    ("designer", "agent", "environments", "scores"),
    ("agent", "scorer", "episodes", "episodes"),
    ("scorer", "learner", "rounds", "batches"),
    ("learner", "server", "versions", "updates"),
    ("server", "agent", "requests", ""),
    ("server", "evaluator", "held-out plays", "evaluations"),
)
_NEWEST = "SELECT at FROM (SELECT at FROM {} ORDER BY rowid DESC LIMIT 200) WHERE at > ?"


def depths(state: RunStatus) -> dict[str, float | None]:
    """Return how much waits on each edge (work without an answer, versions not served), None if unknown."""
    closed, flying = _gauge(state, "round_closed"), _gauge(state, "pool.in_flight")
    trained, published = -1 if state.round is None else state.round, state.version_published
    behind = [] if published is None else [published - step for step in state.versions_serving]
    held_out = [max(one["in_hand"] - one["played"], 0) for one in state.gauges.values() if "played" in one]
    return {
        "tickets": _gauge(state, "open_tickets"),
        "environments": _gauge(state, "environments"),
        "episodes": _gauge(state, "open_plays"),
        "rounds": None if closed is None else max(closed - trained, 0),
        "versions": max(behind, default=None),
        "requests": None if flying is None else flying + (_gauge(state, "pool.waiting") or 0),
        "held-out plays": max(held_out, default=None),
    }


def edges(connection: sqlite3.Connection, state: RunStatus) -> list[dict[str, Any]]:
    """Return for each edge its depth, what left it per minute, and seconds since the last; None if unknown.

    Only what left since the last start counts. Raises sqlite3.Error.
    """
    now, since = time.time(), (state.notes.get("started") or {}).get("at", 0.0)
    depth, requests, found = depths(state), _gauge(state, "pool.requests_per_second"), []
    for source, target, name, table in _EDGES:
        times = [row[0] for row in connection.execute(_NEWEST.format(table), (since,))] if table else []
        rate = requests if name == "requests" else None
        if times and target != "evaluator":
            rate = (len(times) - 1) / max(now - min(times), 1e-3)
        found.append(
            {"name": name, "source": source, "target": target, "depth": depth[name],
             "per_minute": None if rate is None else 60 * rate,
             "age": max(now - max(times), 0.0) if times else None}
        )  # fmt: skip
    return found


def _gauge(state: RunStatus, name: str) -> float | None:
    """Return the highest value of a gauge: a scorer that does not lead counts nothing."""
    return max((values[name] for values in state.gauges.values() if name in values), default=None)
