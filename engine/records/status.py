"""The status of a run, read from its database: for ``spade status``, the live view and the supervisor."""

from __future__ import annotations

import itertools
import json
import sqlite3
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.lineage import Lineage, Version
from engine.records import history

RECENT_SECONDS = 60.0
RECENT_ROUNDS = 10

# Of each fence (start of a learner) the version that it published first. In SQLite a plain column beside MIN
# or MAX is that of the row which has the minimum or the maximum.
_FIRSTS = "SELECT fence, step, MIN(sequence) AS first FROM policies GROUP BY fence ORDER BY first"
_LAST_POLICY = "SELECT version, step FROM policies WHERE {alive} ORDER BY version DESC LIMIT 1"
_LAST_BATCH = (
    "SELECT mean_staleness, final FROM batches WHERE round = ? AND {alive} ORDER BY sequence DESC LIMIT 1"
)
# Of a batch that was announced twice the last announcement counts.
_KEPT = """(SELECT round, MAX(sequence), step, agent_samples, designer_samples, max_staleness, final, dropped
    FROM batches WHERE {alive} GROUP BY round)"""
_SUMS = f"""SELECT MAX(round) AS round, MAX(step) AS step, COALESCE(MAX(round) + 1 - SUM(final), 0) AS rounds,
    COALESCE(SUM(agent_samples), 0) AS agent_samples, COALESCE(SUM(designer_samples), 0) AS designer_samples,
    COALESCE(MAX(max_staleness), 0) AS max_staleness
FROM {_KEPT}"""
_DROPPED = f"""SELECT cause.key, SUM(cause.value) FROM {_KEPT} AS kept, json_each(kept.dropped) AS cause
GROUP BY cause.key"""
_LAST_EVALUATIONS = "SELECT *, MAX(sequence) FROM evaluations WHERE {alive} GROUP BY suite ORDER BY suite"

_TAILS = """SELECT round, MAX(at) - MAX(CASE WHEN rank <= (count * 9 + 9) / 10 THEN at END) AS tail FROM
    (SELECT round, at, ROW_NUMBER() OVER (PARTITION BY round ORDER BY at) AS rank,
        COUNT(*) OVER (PARTITION BY round) AS count FROM episodes
    WHERE round IN (SELECT {which}(round) FROM rounds))
GROUP BY round ORDER BY round"""


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One vLLM server: the ``step`` of the version that it serves, ``version`` with its lineage."""

    server: str
    url: str
    step: int
    version: str
    packed: int
    canary_error: float
    lost: str | None


class SuiteResult(msgspec.Struct, frozen=True, kw_only=True):
    """The last result of a held-out suite by surviving weights; ``stderr`` is the error of ``win``.

    ``overlap`` counts the designs accepted until then that repeat a program of the suite.
    """

    suite: str
    step: int
    version: int
    win: float
    stderr: float
    episodes: int
    overlap: int


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Counts are exact and along the lineage of the surviving weights; shares are None before data.

    ``judge_refusals`` are programs whose plan wins when it is replayed, and that the judge refused.
    ``versions_serving`` has one step per server that is not lost; after an orderly end, those that served
    when it began. ``lineage`` lists the forks: each fence (start of a learner) with the step at which it left
    its predecessor. ``rounds`` counts trained rounds with episodes; ``final``: windows were flushed.
    ``paused``: the scorer was ordered to begin no more rounds. ``round_seconds`` is the median time between
    the newest rounds, ``tail_seconds`` how long the newest one waited for its
    last tenth of plays.
    """

    step: int
    round: int | None
    rounds: int
    final: bool
    paused: bool
    version_published: int | None
    version_published_label: str | None
    packed_published: int | None
    lineage: tuple[tuple[int, int], ...]
    versions_serving: tuple[int, ...]
    servers: tuple[ServerStatus, ...]
    episodes_finished: int
    episodes_failed: dict[str, int]
    episodes_ended_by: dict[str, int]
    environments_accepted: int
    environments_scored: int
    designs_rejected: int
    duplicates_rejected: int
    designs_failed: int
    judge_refusals: int
    designer_samples_trained: int
    agent_samples_trained: int
    samples_dropped: dict[str, int]
    max_staleness_seen: int
    mean_staleness: float | None
    tokens_sampled: int
    tokens_per_second: float
    round_seconds: float | None
    tail_seconds: float | None
    valid_share: float | None
    summary: dict[str, Any] | None
    diversity: dict[str, Any] | None
    regret: float | None
    evaluations: tuple[SuiteResult, ...]
    gauges: dict[str, dict[str, float]]
    stale_roles: tuple[str, ...]
    events: int
    last_event_at: float | None
    notes: dict[str, Any]


def lineage(connection: sqlite3.Connection) -> Lineage:
    """Return the version tree of the published versions."""
    tree = Lineage()
    for fence, step, _ in connection.execute(_FIRSTS):
        if fence > tree.forks[-1][0]:
            tree = tree.fork(fence, step)
    return tree


def alive(tree: Lineage, fence: str = "fence", step: str = "step") -> str:
    """Return :meth:`Lineage.survives` as an SQL condition: a row lies on the path to the current weights.

    ``fence`` and ``step`` are SQL expressions of its version.
    """
    limits, least = [], None
    for newer, left in reversed(tree.forks[1:]):
        least = left if least is None else min(least, left)
        limits.append(f"WHEN {fence} < {newer} THEN {step} <= {least}")
    return f"CASE {' '.join(reversed(limits))} ELSE 1 END" if limits else "1"


def alive_evaluation(tree: Lineage) -> str:
    """Return the SQL condition that a row of ``evaluations`` lies on the path to the current weights.

    It holds for all versions that answered.
    """
    ends = (f"({alive(tree, f'{end} >> 32', f'{end} & 4294967295')})" for end in ("version", "version_high"))
    return " AND ".join(ends)


def read(db: sqlite3.Connection, *, now: float | None = None) -> RunStatus:
    """Return the status now of the run in a database. Raises sqlite3.Error."""
    now = time.time() if now is None else now
    tree = lineage(db)
    condition = alive(tree)
    (totals,) = history.rows(db, _SUMS.format(alive=condition))
    last = _one(db, _LAST_BATCH.format(alive=condition), totals["round"])
    policy = _one(db, _LAST_POLICY.format(alive=condition))
    values = {row["name"]: row["value"] for row in history.rows(db, "SELECT * FROM counters")}
    counters = {name: int(value) for name, value in values.items() if name != history.LAST_AT}
    notes = {row["name"]: json.loads(row["value"]) for row in history.rows(db, "SELECT * FROM notes")}
    ended = _orderly_end(notes)
    gauges, stale = _gauges(db, now)
    accepted, rejected = counters.get("environments_accepted", 0), counters.get("designs_rejected", 0)
    duplicates = _scalar(db, "SELECT COUNT(*) FROM rejections WHERE rung = 'duplicate'")
    summary = _one(db, "SELECT summary FROM rounds ORDER BY round DESC LIMIT 1")
    servers = _servers(db)
    return RunStatus(
        step=totals["step"] if last else policy["step"] if policy else 0,
        round=totals["round"],
        rounds=totals["rounds"],
        final=bool(last and last["final"]),
        paused=ended is None and any(values.get("paused") for values in gauges.values()),
        version_published=policy["step"] if policy else None,
        version_published_label=str(Version.unpack(policy["version"])) if policy else None,
        packed_published=policy["version"] if policy else None,
        lineage=tree.forks,
        versions_serving=tuple(
            ended["serving"] if ended else [server.step for server in servers if server.lost is None]
        ),
        servers=servers,
        episodes_finished=counters.get("episodes_finished", 0),
        episodes_failed={"infra": 0, "quarantined": 0} | _named(counters, "episodes_failed:"),
        episodes_ended_by={"env": 0, "policy": 0} | _named(counters, "episodes_ended_by:"),
        environments_accepted=accepted,
        environments_scored=_scalar(db, "SELECT COUNT(*) FROM scores"),
        designs_rejected=rejected,
        duplicates_rejected=duplicates,
        designs_failed=_scalar(
            db,
            "SELECT COUNT(*) FROM designs_failed WHERE design NOT IN (SELECT design FROM environments)",
        ),
        judge_refusals=_scalar(db, "SELECT COUNT(*) FROM rejections WHERE rung = 'judge'"),
        designer_samples_trained=totals["designer_samples"],
        agent_samples_trained=totals["agent_samples"],
        samples_dropped=dict(map(tuple, db.execute(_DROPPED.format(alive=condition)))),
        max_staleness_seen=totals["max_staleness"],
        mean_staleness=last["mean_staleness"] if last else None,
        tokens_sampled=counters.get("tokens_sampled", 0),
        tokens_per_second=_token_rate(db, gauges, now),
        round_seconds=_round_seconds(db),
        tail_seconds=next((row["tail"] for row in tails(db, newest=True)), None),
        valid_share=(accepted + duplicates) / (accepted + rejected) if accepted + rejected else None,
        summary=json.loads(summary["summary"]) if summary else None,
        diversity=_diversity(db),
        regret=_recent_regret(db),
        evaluations=_evaluations(db, tree),
        gauges=gauges,
        stale_roles=() if ended else stale,
        events=history.position(db),
        last_event_at=values.get(history.LAST_AT),
        notes=notes,
    )


def complete(status: RunStatus, suites: Sequence[str], *, steps: int, servers: bool) -> bool:
    """Return True when a run of ``steps`` is complete.

    Its final batch is trained, every server that is not lost serves the published version (when ``servers``
    are part of the run), and each of ``suites`` was evaluated at its step by surviving weights.
    """
    if not status.final or status.rounds < steps or status.packed_published is None:
        return False
    if servers:
        serving = [server.packed for server in status.servers if server.lost is None]
        if not serving or any(packed != status.packed_published for packed in serving):
            return False
    answered = {item.suite for item in status.evaluations if item.step == status.step}
    return answered.issuperset(suites)


def surviving(connection: sqlite3.Connection, tree: Lineage) -> list[dict[str, Any]]:
    """Return all batches on the path to the current weights in order, one per round.

    A learner that resumes announces its last batch again under its new version; the last one counts.
    """
    rows = history.rows(connection, "SELECT * FROM batches ORDER BY round, sequence")
    return list({row["round"]: row for row in rows if tree.survives(Version.unpack(row["version"]))}.values())


def tails(connection: sqlite3.Connection, *, newest: bool = False) -> list[dict[str, Any]]:
    """Return for each closed round, or the newest, the seconds from nine tenths of its plays to the last."""
    return history.rows(connection, _TAILS.format(which="MAX" if newest else ""))


def _one(connection: sqlite3.Connection, query: str, *parameters: Any) -> dict[str, Any] | None:
    rows = history.rows(connection, query, *parameters)
    return rows[0] if rows else None


def _scalar(connection: sqlite3.Connection, query: str) -> int:
    return int(connection.execute(query).fetchone()[0] or 0)


def _named(counters: dict[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): value for name, value in counters.items() if name.startswith(prefix)}


def _servers(connection: sqlite3.Connection) -> tuple[ServerStatus, ...]:
    found = []
    for row in history.rows(connection, "SELECT * FROM servers ORDER BY server"):
        version = Version.unpack(row["version"])
        found.append(
            ServerStatus(
                server=row["server"],
                url=row["url"],
                step=version.step,
                version=str(version),
                packed=row["version"],
                canary_error=row["canary_error"],
                lost=row["lost"],
            )
        )
    return tuple(found)


def _orderly_end(notes: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the supervisor's note of the end of the run; None while it runs or when it was killed."""
    started, ended = notes.get("started"), notes.get("ended")
    return None if ended is None or (started and started["at"] > ended["at"]) else ended


def _evaluations(connection: sqlite3.Connection, tree: Lineage) -> tuple[SuiteResult, ...]:
    rows = history.rows(connection, _LAST_EVALUATIONS.format(alive=alive_evaluation(tree)))
    return tuple(msgspec.convert(row, SuiteResult) for row in rows)


def _gauges(
    connection: sqlite3.Connection, now: float
) -> tuple[dict[str, dict[str, float]], tuple[str, ...]]:
    """Return the last gauges of each role instance, and the running instances that became silent."""
    gauges, stale = {}, []
    for row in history.rows(connection, "SELECT * FROM gauges ORDER BY role, instance"):
        name = f"{row['role']}/{row['instance']}"
        gauges[name] = json.loads(row["statistics"])
        if row["state"] in ("running", "draining") and now - row["at"] > RECENT_SECONDS:
            stale.append(name)
    return gauges, tuple(stale)


def _token_rate(
    connection: sqlite3.Connection, gauges: Mapping[str, Mapping[str, float]], now: float
) -> float:
    """Return the tokens per second of this host's pool, else of the episodes of the last minute."""
    for values in gauges.values():
        if "pool.tokens_per_second" in values:
            return values["pool.tokens_per_second"]
    row = connection.execute(
        "SELECT SUM(tokens), MIN(at) FROM episodes WHERE at > ?", (now - RECENT_SECONDS,)
    ).fetchone()
    return float(row[0]) / max(now - row[1], 1.0) if row[0] else 0.0


def _round_seconds(connection: sqlite3.Connection) -> float | None:
    """Return the median time between the newest rounds, which a stop between two of them does not change."""
    rows = connection.execute("SELECT at FROM rounds ORDER BY round DESC LIMIT ?", (RECENT_ROUNDS + 1,))
    times = [row[0] for row in rows]
    gaps = [later - earlier for later, earlier in itertools.pairwise(times)]
    return statistics.median(gaps) if gaps else None


def _diversity(connection: sqlite3.Connection) -> dict[str, Any] | None:
    """Return the last round's figures (:class:`engine.records.diversity.Diversity`)."""
    row = _one(connection, "SELECT round, fields FROM diversity ORDER BY round DESC LIMIT 1")
    return {"round": row["round"]} | json.loads(row["fields"]) if row else None


def _recent_regret(connection: sqlite3.Connection) -> float | None:
    """Return the mean regret of the environments whose windows closed last."""
    row = connection.execute(
        "SELECT AVG(regret) FROM scores "
        "WHERE round = (SELECT MAX(round) FROM scores WHERE regret IS NOT NULL)"
    ).fetchone()
    return None if row[0] is None else float(row[0])
