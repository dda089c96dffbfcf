"""``spade status``: the progress of a run as text and as JSON."""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.errors import SpadeError
from engine.records import history, status
from engine.records.status import RunStatus
from engine.run import RunDirectory, find, newest_first
from engine.text import duration, number, share
from engine.training.time_shares import PREFIX

LIVING = ("running", "paused")
"""States of a run that a process holds."""
_OURS = ("supervisor", "scorer", "designer", "agent", "learner", "server", "evaluator")
_BARS = " ▁▂▃▄▅▆▇█"


class RunOverview(NamedTuple):
    """The status of a run with its name, directory and process."""

    facts: dict[str, Any]
    state: RunStatus

    @property
    def healthy(self) -> bool:
        """False for a run that stopped before its end, and for one with a silent role."""
        return self.facts["state"] == "complete" or (
            self.facts["state"] in LIVING and not self.state.stale_roles
        )

    def json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(self.facts | msgspec.to_builtins(self.state), indent=2)

    def text(self) -> str:
        """Return the main fields, one per line."""
        run = f"{self.facts['run']} ({self.facts['state']})"
        rows = [
            ("run", run),
            ("directory", self.facts["directory"]),
            ("rounds trained", _rounds(self.facts, self.state)),
            ("time", _times(self.facts)),
            *figures(self.state),
        ]
        return "\n".join(f"{name:<26}{value}" for name, value in rows)


def read(run: str | None, directory: Path) -> RunOverview:
    """Return the overview of ``run`` (None: the newest run in ``directory``).

    Raises ConfigError when there is no such run, SpadeError when its database cannot be read.
    """
    found = find(run, directory)
    with reading(found) as connection:
        state = status.read(connection)
    return RunOverview(about(found, state), state)


def about(found: RunDirectory, state: RunStatus) -> dict[str, Any]:
    """Return the run's name, directory, state, rounds asked for, times, and the other process that runs it.

    ``elapsed_seconds`` counts from the last start, ``seconds_left`` is an estimate for a running run.
    """
    holder = found.holder()
    if holder is not None and holder.get("pid") == os.getpid():
        holder = None
    ended = state.notes.get("ended") or {}
    living = "paused" if state.paused else "running"
    how = living if holder is not None else "complete" if ended.get("complete") else "stopped"
    steps, left, elapsed = found.steps(), None, None
    if how == "running" and steps is not None and state.round_seconds is not None:
        left = max(steps - state.rounds, 0) * state.round_seconds
    if started := (state.notes.get("started") or {}).get("at"):
        end = time.time() if how in LIVING else max(ended.get("at", 0.0), state.last_event_at or started)
        elapsed = max(end - started, 0.0)
    return {
        "run": found.root.name,
        "directory": str(found.root),
        "state": how,
        "steps": steps,
        "elapsed_seconds": elapsed,
        "seconds_left": left,
        "pid": holder.get("pid") if holder else None,
        "host": holder.get("host") if holder else None,
    }


def farewell(found: RunDirectory) -> str:
    """Return what is said at the end of a run: what was won, how long it took, what can come next."""
    with reading(found) as connection:
        state = status.read(connection)
        first = dict(
            connection.execute("SELECT suite, win FROM evaluations ORDER BY sequence DESC").fetchall()
        )
    facts = about(found, state)
    name = found.root.name if found.root.parent == Path("runs").resolve() else found.root
    lines = [
        f"{state.rounds} of {facts['steps']} rounds, {state.episodes_finished:,} episodes, "
        f"{state.environments_accepted:,} environments; {duration(facts['elapsed_seconds'])} since the start."
    ]
    lines += [
        f"Held-out {one.suite}: {first[one.suite]:.3f} at first, "
        f"{one.win:.3f} ± {1.96 * one.stderr:.3f} at step {one.step}."
        for one in state.evaluations
    ]
    if facts["state"] == "complete":
        lines.append(f"Next: spade envs list --run {name} --sort regret_low, spade export {name} DIR.")
    else:
        lines.append("Stopped. The same command goes on from here.")
    return "\n".join(lines)


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
            remedy="It appears when the run's broker is up; see logs/ if it does not."
            if isinstance(error, sqlite3.OperationalError)
            else "It is damaged: restore the file, or start another run with run.name=NAME.",
        ) from error


def vendi(state: RunStatus) -> str:
    """Return the effective number of the last round's environments, and their number."""
    found = state.diversity or {}
    return f"{found['vendi']:.1f} of {found['environments']}" if found.get("vendi") else "-"


def server_rows(state: RunStatus) -> list[tuple[str, str]]:
    """Return (server, figures) for each server that is not lost, from its role and this host's pool."""
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
            shown = ", ".join(parts).format(**known)
            rows.append((server.server, shown if known.get("usable", 1.0) else f"not in use, {shown}"))
    return rows


def own_roles(gauges: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str]]:
    """Return (instance, figures) for each role that does not come with spade."""
    found = ((name.partition("/"), values) for name, values in gauges.items())
    return [
        (instance, ", ".join(f"{key} {value:g}" for key, value in values.items()))
        for (role, _, instance), values in found
        if values and role not in _OURS
    ]


def learner_shares(state: RunStatus) -> str:
    """Return how the learner spent the time of its last round, "-" before the first."""
    for gauges in state.gauges.values():
        shares = {key.removeprefix(PREFIX): value for key, value in gauges.items() if key.startswith(PREFIX)}
        if shares:
            return ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items()))
    return "-"


_FIGURES = {
    ("in_flight", "limit"): "{in_flight:.0f} of {limit:.0f} in flight",
    ("lag",): "{lag:.0f} versions behind",
    ("idle",): "idle {idle:.0%} of its last round",
    ("cuts", "opened"): "limit cut {cuts:.0f} times, breaker opened {opened:.0f} times",
    ("update_seconds", "paused_seconds"): "last update {update_seconds:.2f} s, paused {paused_seconds:.2f} s",
}


def _rounds(facts: dict[str, Any], state: RunStatus) -> str:
    asked = "" if facts["steps"] is None else f" of {facts['steps']}"
    return f"{state.rounds}{asked}{' and the final batch' if state.final else ''}"


def _times(facts: dict[str, Any]) -> str:
    elapsed, left = facts["elapsed_seconds"], facts["seconds_left"]
    shown = "-" if elapsed is None else f"{duration(elapsed)} since the start"
    return shown if left is None else f"{shown}, about {duration(left)} left"


def listing(directory: Path) -> str:
    """Return one line per run in ``directory``, the last used first: name, state, rounds, last event."""
    rows = [("run", "state", "rounds", "last event")]
    for run in newest_first(directory):
        try:
            found = read(str(run.root), directory)
        except SpadeError as error:
            starts = run.holder() is not None and not run.database.exists()
            how = ("starting", "-", "none") if starts else ("unreadable", "-", error.what)
            rows.append((run.root.name, *how))
            continue
        at = found.state.last_event_at
        ago = f"{duration(time.time() - at)} ago" if at else "none"
        rows.append((run.root.name, found.facts["state"], _rounds(found.facts, found.state), ago))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]])
        for row in rows
    )


def _judge(state: RunStatus) -> list[tuple[str, str]]:
    """Return the line about the judge, if it was asked: all that reach it have a plan that wins."""
    asked = state.judge_refusals + state.environments_accepted
    judges = any("judge_asked" in gauges for gauges in state.gauges.values())
    if not state.judge_refusals and not judges:
        return []
    refused = share(state.judge_refusals / asked if asked else None)
    return [("judge", f"refused {state.judge_refusals} programs whose plan wins ({refused} of them)")]


def figures(state: RunStatus) -> list[tuple[str, Any]]:
    """Return the main figures of a run with their names."""
    serving = ", ".join(f"{item.server}: {item.version}" for item in state.servers if item.lost is None)
    summary, diversity = state.summary or {}, state.diversity or {}
    failed = ", ".join(f"{kind} {count}" for kind, count in sorted(state.episodes_failed.items()))
    ago = f"{duration(time.time() - state.last_event_at)} ago" if state.last_event_at else "none"
    live = max(state.environments_accepted - state.environments_scored, 0)
    rows = [
        ("step", state.step),
        ("seconds per round", number(state.round_seconds)),
        ("tail of the last round", _tail(state.tail_seconds)),
        ("last event", ago),
        ("silent roles", ", ".join(state.stale_roles) or "none"),
        ("version published", state.version_published_label or "none yet"),
        ("versions serving", serving or ", ".join(map(str, state.versions_serving)) or "none"),
        *server_rows(state),
        *own_roles(state.gauges),
        ("learner's last round", learner_shares(state)),
        ("episodes finished", state.episodes_finished),
        ("episodes failed", failed),
        ("environments accepted", f"{state.environments_accepted}, {live} live"),
        ("designs rejected", f"{state.designs_rejected} (valid {number(state.valid_share, 2)})"),
        *_judge(state),
        ("plain, hinted return", f"{number(summary.get('plain'))}, {number(summary.get('hinted'))}"),
        ("regret", number(state.regret)),
        ("win rates 0..1", histogram(summary.get("win_histogram") or ()) or "-"),
        (
            "in band, with gradient",
            f"{share(summary.get('in_band'))}, {share(summary.get('gradient_share'))}",
        ),
        ("tokens per second", f"{state.tokens_per_second:,.0f}"),
        ("Vendi score", vendi(state)),
        ("near-duplicates", share(diversity.get("near_duplicates"))),
        ("agent samples trained", state.agent_samples_trained),
        ("designer samples trained", state.designer_samples_trained),
        ("max staleness seen", state.max_staleness_seen),
    ]
    rows += [
        (
            f"held-out {item.suite}",
            f"{item.win:.3f} ± {1.96 * item.stderr:.3f} at step {item.step}, "
            f"{item.overlap} designs repeat a program of it",
        )
        for item in state.evaluations
    ]
    return rows


def _tail(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s for the last tenth of its plays"


def histogram(counts: list[int] | tuple[int, ...]) -> str:
    """Return counts as a row of bars; the highest is full."""
    top = max(counts, default=0)
    if not top:
        return ""
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // top)] for count in counts)
