"""The environments of a run: listed, found by id, exported from its database."""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.errors import ConfigError, SpadeError
from engine.text import shorten

SHORT = 8
"""Characters of a program's hash that people see; more where two programs begin alike."""
NEIGHBOURS = 5
COMPARED = 1000
LISTED = 6
MANIFEST = "manifest.json"
STATES = ("open", "fresh", "frontier", "mastered", "intractable", "degenerate", "off_ticket", "incoherent")
SORTS = ("step", "win", "regret", "regret_low", "reward")

_QUERY = """SELECT e.design, e.environment, e.cohort AS step, e.skill, e.document, e.title, e.family,
e.difficulty, e.attempt, e.trivial_win_rate, e.degenerate, e.hint IS NOT NULL AS hinted,
COALESCE(s.state, 'open') AS state, s.round, s.win, s.regret, s.reward, s.advantage, s.fields,
COALESCE(l.flag, '') AS flag, l.fields AS labels, t.turns
FROM environments e LEFT JOIN scores s USING (design) LEFT JOIN labels l USING (design)
LEFT JOIN (SELECT design, AVG(turns) AS turns FROM episodes WHERE arm = 'plain' GROUP BY design) t
USING (design) ORDER BY e.sequence"""
_FROM_SCORE = (
    *("win_low", "win_high", "regret_low", "regret_high", "plays", "hinted_plays", "noise_floor"),
    *("regret_paid", "pairs", "pairs_apart", "leak"),
)


class EnvironmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One environment of a run.

    ``step`` is the round it was written for, ``turns`` the mean of its plain episodes. Figures are None until
    its window has closed (``state`` is ``open``), those of the hint also without hinted episodes.
    ``regret_paid`` is the part of the regret that its reward took, over ``pairs`` of which ``pairs_apart``
    have no policy version in common; ``leak``: its hint holds the answer. ``flag`` says that the design does
    not match its ticket; ``similarity`` is the cosine to the most similar program that the designer
    remembered.
    """

    id: str
    step: int
    skill: str
    document: str
    state: str
    win: float | None
    win_low: float | None
    win_high: float | None
    regret: float | None
    regret_low: float | None
    regret_high: float | None
    noise_floor: float | None
    plays: int | None
    hinted_plays: int | None
    reward: float | None
    advantage: float | None
    turns: float | None
    title: str
    hinted: bool
    family: str | None
    difficulty: float | None
    trivial_win_rate: float
    degenerate: bool
    flag: str
    flag_reason: str
    summary: str
    prompt: str
    similarity: float | None
    attempt: int
    round: int | None
    environment: str
    design: str
    regret_paid: float | None = None
    pairs: int | None = None
    pairs_apart: int | None = None
    leak: bool | None = None


class RecordedProgram(NamedTuple):
    """Source and hint of an environment."""

    source: str
    hint: str | None


class Catalogue:
    """All environments of one run, in the order in which they were written. Raises sqlite3.Error."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        rows = [dict(row) for row in connection.execute(_QUERY)]
        lengths = _lengths({row["environment"] for row in rows})
        self.entries = [_record(row, lengths) for row in rows]

    def select(
        self, *, skill: str = "", state: str = "", sort: str = "step", reverse: bool = False, limit: int = 0
    ) -> list[EnvironmentRecord]:
        """Return the environments with ``skill`` in the name of their skill and ``state`` as state or flag.

        They come in ascending order of steps or descending order of a figure, or the other way round with
        ``reverse``; ``limit`` 0 returns all.

        Raises ConfigError for an unknown skill, state or sort.
        """
        states = {*STATES, *(one.state for one in self.entries)}
        skills = {one.skill for one in self.entries}
        if sort not in SORTS:
            raise ConfigError(f"Environments have no order {sort!r}.", remedy=f"Use {', '.join(SORTS)}.")
        if state and state not in states:
            raise ConfigError(f"There is no state {state!r}.", remedy=f"Use {', '.join(sorted(states))}.")
        if skills and not any(skill.casefold() in one.casefold() for one in skills):
            raise ConfigError(
                f"No skill of this run has {skill!r} in its name.",
                remedy=f"Its skills are {', '.join(sorted(skills))}.",
            )
        found = [
            one
            for one in self.entries
            if skill.casefold() in one.skill.casefold() and state in ("", one.state, one.flag)
        ]
        if sort == "step":
            found.sort(key=lambda one: one.step)
        else:
            found.sort(key=lambda one: -_or_least(getattr(one, sort)))
        if reverse:
            found.reverse()
        return found[:limit] if limit else found

    def find(self, name: str) -> EnvironmentRecord:
        """Return the environment whose program's hash or design begins with ``name``.

        Of several designs with the same program the last scored one is returned, else the last one. Raises
        ConfigError, with candidates, when there is none or when several programs match.
        """
        text = name.strip()
        found = [one for one in self.entries if text in (one.design, one.environment)] or [
            one
            for one in self.entries
            if text and (one.environment.startswith(text.lower()) or one.design.startswith(text))
        ]
        programs = {one.environment: one for one in found}
        if len(programs) == 1:
            return max(found, key=lambda one: (one.round is not None, found.index(one)))
        if programs:
            raise ConfigError(
                f"{name!r} is the beginning of {len(programs)} environments.",
                remedy=f"Give more characters: {_candidates(list(programs.values()))}.",
            )
        some = _candidates(self.entries[-LISTED:])
        raise ConfigError(
            f"There is no environment {name!r} in this run.",
            remedy=f"`spade envs list` shows all; among them: {some}." if some else "It has none yet.",
        )

    def program(self, entry: EnvironmentRecord) -> RecordedProgram:
        """Return source and hint of an environment."""
        query = "SELECT source, hint FROM environments WHERE design = ?"
        return RecordedProgram(*self._connection.execute(query, (entry.design,)).fetchone())

    def plays(self, entry: EnvironmentRecord) -> list[dict[str, Any]]:
        """Return the recorded episodes of an environment, at most two per arm, the best first."""
        query = "SELECT arm, episode, round, returned, reason, turns FROM transcripts WHERE design = ?"
        rows = [dict(row) for row in self._connection.execute(query, (entry.design,))]
        rows.sort(key=lambda row: (row["arm"] != "plain", -row["returned"]))
        return [row | {"turns": json.loads(row["turns"])} for row in rows]

    def neighbours(self, entry: EnvironmentRecord) -> list[tuple[float, EnvironmentRecord]]:
        """Return the ``NEIGHBOURS`` most similar other programs with their cosines, the nearest first.

        They are taken from an even sample of at most ``COMPARED`` programs.
        """
        from engine.similarity import HashedTfidf, nearest

        others = {one.environment: one for one in self.entries if one.environment != entry.environment}
        chosen = list(others.values())[:: -(-len(others) // COMPARED) or 1]
        if not chosen:
            return []
        vectors = HashedTfidf().embed([self.program(one).source for one in (entry, *chosen)])
        rows, cosines = nearest(vectors[:1], vectors[1:], NEIGHBOURS)
        return [(float(cosine), chosen[row]) for row, cosine in zip(rows[0], cosines[0], strict=True)]


def export(catalogue: Catalogue, entries: Sequence[EnvironmentRecord], directory: Path, **facts: Any) -> int:
    """Write each program of ``entries`` once into ``directory``, with a manifest; return the number of files.

    The manifest has ``facts`` and ``environments``: one object per file, in the order of ``entries``, with
    ``file``, ``hint`` and the fields of :class:`EnvironmentRecord`. Raises ConfigError when ``directory`` is
    not empty, SpadeError when it cannot be written.
    """
    try:
        empty(directory)
        rows = []
        first: dict[str, EnvironmentRecord] = {}
        for entry in entries:
            first.setdefault(entry.environment, entry)
        for entry in first.values():
            program = catalogue.program(entry)
            name = f"{entry.step:05d}-{_slug(entry.skill)}-{entry.id}.py"
            (directory / name).write_bytes(program.source.encode())
            rows.append({"file": name, "hint": program.hint} | msgspec.to_builtins(entry))
        text = json.dumps(facts | {"environments": rows}, indent=1, ensure_ascii=False)
        (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise SpadeError(
            f"Environments cannot be written into {directory}: {error.strerror}.",
            remedy="Name a directory that can be written, on a disk with room.",
        ) from error
    return len(rows)


def empty(directory: Path) -> None:
    """Make a directory unless it is there. Raises ConfigError when it is not empty."""
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.iterdir()):
        raise ConfigError(
            f"The directory {directory} is not empty.", remedy="Name an empty or a new directory."
        )


def _record(row: dict[str, Any], lengths: dict[str, int]) -> EnvironmentRecord:
    scored, labels = json.loads(row["fields"] or "{}"), json.loads(row["labels"] or "{}")
    known = {name: row[name] for name in EnvironmentRecord.__struct_fields__ if name in row}
    known |= {name: scored.get(name) for name in _FROM_SCORE}
    known |= {name: labels.get(name, "") for name in ("flag_reason", "summary", "prompt")}
    known |= {"similarity": labels.get("similarity")}
    known |= {name: bool(row[name]) for name in ("hinted", "degenerate")}
    return EnvironmentRecord(id=row["environment"][: lengths[row["environment"]]], **known)


def _lengths(hashes: set[str]) -> dict[str, int]:
    """Return the number of characters that identify each hash, at least ``SHORT``."""
    ordered = sorted(hashes)
    lengths = dict.fromkeys(ordered, SHORT)
    for one, two in itertools.pairwise(ordered):
        shared = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(one))
        lengths[one], lengths[two] = max(lengths[one], shared + 1), max(lengths[two], shared + 1)
    return lengths


def _or_least(value: float | None) -> float:
    return float("-inf") if value is None else value


def _candidates(entries: Sequence[EnvironmentRecord]) -> str:
    """Name a few environments by id and title."""
    distinct = list({one.environment: one for one in entries}.values())
    named = [f"{one.id} ({shorten(one.title or one.skill, 40)})" for one in distinct[:LISTED]]
    more = len(distinct) - LISTED
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "environment"
