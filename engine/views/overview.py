"""``spade status``: where a run stands, for people and as JSON."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import SpadeError
from engine.records import history, status
from engine.records.status import RunStatus
from engine.run import RunDirectory, find


def text(run: str | None, directory: Path, *, as_json: bool) -> str:
    """Return the status of ``run`` (the newest run in ``directory`` when None).

    Raises ConfigError when there is no such run, SpadeError when its database cannot be read.
    """
    found = find(run, directory)
    state = _read(found)
    facts = about(found, state)
    if as_json:
        return json.dumps(facts | msgspec.to_builtins(state), indent=2)
    return _lines(facts, state)


def about(found: RunDirectory, state: RunStatus) -> dict[str, Any]:
    """Return the run's name, directory, whether it runs now and in which other process."""
    holder = found.holder()
    if holder is not None and holder.get("pid") == os.getpid():
        holder = None
    ended = state.notes.get("ended") or {}
    how = "running" if holder is not None else "complete" if ended.get("complete") else "stopped"
    return {
        "run": found.root.name,
        "directory": str(found.root),
        "state": how,
        "pid": holder.get("pid") if holder else None,
        "host": holder.get("host") if holder else None,
    }


def _read(found: RunDirectory) -> RunStatus:
    with reading(found) as connection:
        return status.read(connection)


@contextmanager
def reading(found: RunDirectory) -> Iterator[sqlite3.Connection]:
    """Hold the database of a run open for reading. Raises SpadeError when it cannot be read."""
    try:
        connection = history.open_for_reading(found.database)
        try:
            yield connection
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise SpadeError(
            f"The database of run {found.root.name} cannot be read: {error}.",
            where=str(found.database),
            remedy="It is written once the run's broker is up; look into logs/ when it stays away."
            if isinstance(error, sqlite3.OperationalError)
            else "It is damaged: bring the file back, or start another run with run.name=NAME.",
        ) from error


def vendi(state: RunStatus) -> str:
    """Return how many of the last round's environments are effectively different, of how many."""
    found = state.diversity or {}
    return f"{found['vendi']:.1f} of {found['environments']}" if found.get("vendi") else "-"


def server_rows(state: RunStatus) -> list[tuple[str, str]]:
    """Return (server, how it is) for each server that is not lost, as its role and this host's pool say."""
    figures: dict[str, dict[str, float]] = {}
    for gauges in state.gauges.values():
        for key, value in gauges.items():
            name, _, figure = key.removeprefix("pool.").rpartition(".")
            figures.setdefault(name, {})[figure] = value
    rows = []
    for server in state.servers:
        known = figures.get(server.server)
        if server.lost is None and known:
            parts = [text for figure, text in _FIGURES.items() if known.keys() >= set(figure)]
            said = ", ".join(parts).format(**known)
            rows.append((server.server, said if known.get("usable", 1.0) else f"not asked now, {said}"))
    return rows


_FIGURES = {
    ("in_flight", "limit"): "{in_flight:.0f} of {limit:.0f} in flight",
    ("lag",): "{lag:.0f} versions behind",
    ("cuts", "opened"): "limit cut {cuts:.0f} times, breaker opened {opened:.0f} times",
    ("update_seconds", "paused_seconds"): "last update {update_seconds:.2f} s, paused {paused_seconds:.2f} s",
}


def _lines(facts: dict[str, Any], state: RunStatus) -> str:
    serving = ", ".join(f"{item.server}: {item.version}" for item in state.servers if item.lost is None)
    failed = ", ".join(f"{kind} {count}" for kind, count in sorted(state.episodes_failed.items()))
    rows = [
        ("run", f"{facts['run']} ({facts['state']})"),
        ("directory", facts["directory"]),
        ("step", state.step),
        ("version published", state.version_published_label or "none yet"),
        ("versions serving", serving or ", ".join(map(str, state.versions_serving)) or "none"),
        *server_rows(state),
        ("episodes finished", state.episodes_finished),
        ("episodes failed", failed),
        ("environments accepted", state.environments_accepted),
        ("designs rejected", state.designs_rejected),
        ("Vendi score", vendi(state)),
        ("agent samples trained", state.agent_samples_trained),
        ("designer samples trained", state.designer_samples_trained),
        ("max staleness seen", state.max_staleness_seen),
    ]
    rows += [
        (f"held-out {item.suite}", f"{item.win:.3f} ± {1.96 * item.stderr:.3f} at step {item.step}")
        for item in state.evaluations
    ]
    return "\n".join(f"{name:<26}{value}" for name, value in rows)
