"""The environments of a run as a catalogue: found, filtered, compared and copied out of its database."""

from __future__ import annotations

import difflib
import itertools
import json
import re
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from engine.errors import ConfigError, SpadeError
from engine.records import history

SHORT = 8
"""Characters of a program's hash that people see; more where two programs begin alike."""
NEIGHBOURS = 5
LISTED = 6
MANIFEST = "manifest.json"
STATES = ("open", "fresh", "frontier", "mastered", "intractable", "degenerate", "off_ticket", "incoherent")
SORTS = ("step", "win", "regret", "reward", "turns", "skill", "title")

_COLUMNS = """e.design, e.environment, e.cohort AS step, e.skill, e.document, e.title, e.family, e.difficulty,
e.attempt, e.trivial_win_rate, e.degenerate, e.hint IS NOT NULL AS hinted, COALESCE(s.state, 'open') AS state,
s.round, s.win, s.regret, s.reward, s.advantage, s.fields, l.flag, l.fields AS labels"""
_FROM = "FROM environments e LEFT JOIN scores s USING (design) LEFT JOIN {labels} l USING (design)"
# Databases of older builds have no labels.
_NO_LABELS = "(SELECT '' AS design, '' AS flag, NULL AS fields)"
_TURNS = "SELECT design, AVG(turns) FROM episodes WHERE arm = 'plain' GROUP BY design"
_FROM_SCORE = (
    *("win_low", "win_high", "regret_low", "regret_high", "plays", "hinted_plays", "noise_floor"),
    *("regret_paid", "pairs", "pairs_apart", "leak"),
)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One environment of a run. ``step`` is the round it was written for, ``turns`` the mean of its plain
    plays. Figures are None until its window has closed (``state`` is ``open``) and without a hint's plays.
    ``regret_paid`` is what of the regret its reward took, over ``pairs`` of which ``pairs_apart`` have no
    policy version in common; ``leak``: its hint holds the answer.
    ``flag`` says that the design does not belong to its ticket, ``similarity`` is the cosine to the most
    similar program that the designer remembered.
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


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which environments: all conditions hold. ``steps`` is inclusive, ``skill`` a part of its name,
    ``state`` a state or a flag.
    """

    skill: str = ""
    state: str = ""
    steps: tuple[int, int] | None = None
    least_regret: float | None = None

    def admits(self, entry: Entry) -> bool:
        return (
            self.skill.casefold() in entry.skill.casefold()
            and self.state in ("", entry.state, entry.flag)
            and (self.steps is None or self.steps[0] <= entry.step <= self.steps[1])
            and (self.least_regret is None or _or_least(entry.regret) >= self.least_regret)
        )


class Program(NamedTuple):
    """What the designer wrote."""

    source: str
    hint: str | None


class Catalogue:
    """All environments of one run, in the order of their writing. Raises sqlite3.Error."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        turns = dict(connection.execute(_TURNS).fetchall())
        origin = _FROM.format(labels="labels" if history.has(connection, "labels") else _NO_LABELS)
        rows = [dict(row) for row in connection.execute(f"SELECT {_COLUMNS} {origin} ORDER BY e.sequence")]
        lengths = _lengths({row["environment"] for row in rows})
        self.entries = [_entry(row, turns, lengths) for row in rows]

    def select(self, wanted: Filter, *, sort: str = "step", limit: int = 0) -> list[Entry]:
        """Return the environments that ``wanted`` admits; the highest first for figures, ``limit`` 0 all.

        Raises ConfigError for an unknown state or sort.
        """
        self._check(wanted, sort)
        found = [entry for entry in self.entries if wanted.admits(entry)]
        if sort in ("skill", "title"):
            found.sort(key=lambda entry: (getattr(entry, sort).casefold(), entry.step))
        elif sort == "step":
            found.sort(key=lambda entry: entry.step)
        else:
            found.sort(key=lambda entry: -_or_least(getattr(entry, sort)))
        return found[:limit] if limit else found

    def _check(self, wanted: Filter, sort: str) -> None:
        states = {*STATES, *(entry.state for entry in self.entries)}
        skills = {entry.skill for entry in self.entries}
        if sort not in SORTS:
            raise ConfigError(f"Environments cannot be sorted by {sort!r}.", remedy=f"Use {_listed(SORTS)}.")
        if wanted.state and wanted.state not in states:
            raise ConfigError(f"There is no state {wanted.state!r}.", remedy=f"Use {_listed(states)}.")
        if skills and not any(wanted.skill.casefold() in skill.casefold() for skill in skills):
            raise ConfigError(
                f"No skill of this run has {wanted.skill!r} in its name.",
                remedy=f"Its skills are {_listed(skills)}.",
            )

    def _known(self, text: str) -> str:
        """Tell a person what there is in place of ``text``."""
        if not self.entries:
            return "The run has written none yet."
        near = difflib.get_close_matches(text, {entry.id for entry in self.entries}, LISTED, 0.5)
        shown = [entry for entry in self.entries if entry.id in near] or self.entries[-LISTED:]
        programs = {entry.environment: entry for entry in shown}
        return f"`spade envs list` shows all; among them: {_candidates(list(programs.values()))}."

    def find(self, name: str) -> Entry:
        """Return the environment whose program's hash or design begins with ``name``.

        Of several designs with the same program the last one that was scored, else the last one, is taken.
        Raises ConfigError, with the candidates, when there is none or when they are different programs.
        """
        text = name.strip()
        exact = [entry for entry in self.entries if text in (entry.design, entry.environment)]
        found = exact or [
            entry
            for entry in self.entries
            if text and (entry.environment.startswith(text.lower()) or entry.design.startswith(text))
        ]
        programs = {entry.environment: entry for entry in found}
        if len(programs) == 1:
            return max(found, key=lambda entry: (entry.round is not None, found.index(entry)))
        if not programs:
            raise ConfigError(f"There is no environment {name!r} in this run.", remedy=self._known(text))
        raise ConfigError(
            f"{name!r} is the beginning of {len(programs)} environments.",
            remedy=f"Give more characters: {_candidates(list(programs.values()))}.",
        )

    def program(self, entry: Entry) -> Program:
        """Return source and hint of an environment."""
        query = "SELECT source, hint FROM environments WHERE design = ?"
        return Program(*self._connection.execute(query, (entry.design,)).fetchone())

    def twins(self, entry: Entry) -> list[Entry]:
        """Return the other environments with the very same program."""
        return [
            other
            for other in self.entries
            if other.environment == entry.environment and other.design != entry.design
        ]

    def plays(self, entry: Entry) -> list[dict[str, Any]]:
        """Return the plays of an environment that were kept, the best first, of each arm at most two."""
        query = "SELECT arm, episode, round, returned, reason, turns FROM transcripts WHERE design = ?"
        rows = [dict(row) for row in self._connection.execute(query, (entry.design,))]
        rows.sort(key=lambda row: (row["arm"] != "plain", -row["returned"]))
        return [row | {"turns": json.loads(row["turns"])} for row in rows]

    def neighbours(self, entry: Entry, *, count: int = NEIGHBOURS) -> list[tuple[float, Entry]]:
        """Return the most similar other programs with their cosines, the nearest first.

        They are looked for among an even sample of ``engine.diversity.measures.SAMPLE`` programs.
        """
        from engine.diversity.measures import sampled
        from engine.diversity.similarity import HashedTfidf, nearest
        from engine.records.diversity_log import sources

        others = list({other.environment: other for other in self.entries}.values())
        others = [other for other in others if other.environment != entry.environment]
        others = sampled(others, [other.environment for other in others])
        if not others:
            return []
        texts = [self.program(entry).source, *sources(self._connection, [one.design for one in others])]
        vectors = HashedTfidf().embed(texts)
        rows, cosines = nearest(vectors[:1], vectors[1:], count)
        return [(float(cosine), others[row]) for row, cosine in zip(rows[0], cosines[0], strict=True)]


def export(catalogue: Catalogue, entries: Sequence[Entry], directory: Path, **facts: Any) -> int:
    """Write each program of ``entries`` once into ``directory``, with a manifest; return how many files.

    The manifest has ``facts`` and ``environments``: one object a file, in the order of ``entries``, with
    ``file``, ``hint`` and the fields of :class:`Entry`. Raises SpadeError when ``directory`` holds something
    or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise SpadeError(
                f"The directory {directory} is not empty.", remedy="Name one that is empty or not there yet."
            )
        written, rows = set(), []
        for entry in entries:
            if entry.environment in written:
                continue
            written.add(entry.environment)
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


def difference(catalogue: Catalogue, left: Entry, right: Entry) -> list[str]:
    """Return the unified difference of two programs and of their hints, line by line without line ends."""
    before, after = catalogue.program(left), catalogue.program(right)
    lines = _unified(before.source, after.source, f"{left.id}.py", f"{right.id}.py")
    return lines + _unified(before.hint or "", after.hint or "", f"{left.id} hint", f"{right.id} hint")


def _unified(before: str, after: str, left: str, right: str) -> list[str]:
    return list(difflib.unified_diff(before.splitlines(), after.splitlines(), left, right, lineterm=""))


def _entry(row: dict[str, Any], turns: dict[str, float], lengths: dict[str, int]) -> Entry:
    fields = msgspec.json.decode(row["fields"]) if row["fields"] else {}
    known = {name: row[name] for name in Entry.__struct_fields__ if name in row}
    known |= {name: fields.get(name) for name in _FROM_SCORE}
    labels = json.loads(row["labels"]) if row["labels"] else {}
    known |= {name: labels.get(name, "") for name in ("flag_reason", "summary", "prompt")}
    known |= {"flag": row["flag"] or "", "similarity": labels.get("similarity")}
    known["hinted"], known["degenerate"] = bool(row["hinted"]), bool(row["degenerate"])
    return Entry(
        id=row["environment"][: lengths[row["environment"]]], turns=turns.get(row["design"]), **known
    )


def _lengths(hashes: set[str]) -> dict[str, int]:
    """Return how many characters name each hash and no other one, ``SHORT`` at least."""
    ordered = sorted(hashes)
    lengths = dict.fromkeys(ordered, SHORT)
    for one, two in itertools.pairwise(ordered):
        shared = next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), len(one))
        lengths[one], lengths[two] = max(lengths[one], shared + 1), max(lengths[two], shared + 1)
    return lengths


def _or_least(value: float | None) -> float:
    return float("-inf") if value is None else value


def _candidates(entries: Sequence[Entry]) -> str:
    """Name a few environments by id and title, in characters that steer no terminal."""
    from engine.views.envs_view import clean

    named = [f"{entry.id} ({clean(entry.title[:40] or entry.skill)})" for entry in entries[:LISTED]]
    more = len(entries) - LISTED
    return ", ".join(named) + (f" and {more} more" if more > 0 else "")


def _listed(words: Iterable[str]) -> str:
    return ", ".join(sorted(words))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40] or "environment"
