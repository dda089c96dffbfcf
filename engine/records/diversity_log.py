"""The diversity of a run, round by round: measured from its database and stored there.

The recorder measures each round once, in its worker thread, after the round's summary has been written. The
cost does not grow with the length of the run.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from engine.diversity.measures import (
    SAMPLE,
    Diversity,
    Sketch,
    Vectors,
    WrittenEnvironment,
    measure,
    near_duplicates,
)
from engine.diversity.measures import sampled as sample_of
from engine.diversity.measures import vendi as vendi_of
from engine.diversity.similarity import Embedder, HashedTfidf

AT_ONCE = 4
"""Rounds measured per call, so that a resumed run catches up gradually."""

_PLAYED_ROUNDS = 256
_ITEM = "design, environment, skill, document"
_PLAYED = f"""SELECT {_ITEM} FROM environments WHERE design IN
(SELECT DISTINCT design FROM episodes WHERE round BETWEEN ? AND ?) ORDER BY sequence"""
_MISSING = """SELECT round FROM rounds WHERE round > (SELECT COALESCE(MAX(round), -1) FROM diversity)
ORDER BY round LIMIT ?"""


class DiversityMeter:
    """Measures rounds of one run in ascending order. Raises sqlite3.Error."""

    def __init__(self, embedder: Embedder | None = None, *, sample: int = SAMPLE) -> None:
        self._embedder: Embedder = embedder or HashedTfidf()
        self._sample = sample
        self._before = Sketch(sample)
        self._known: set[int] = set()
        self._designs: dict[str, int] = {}
        self._documents: set[str] = set()
        self._next = 0
        self._vectors: dict[str, Vectors] = {}

    def record(self, connection: sqlite3.Connection) -> int:
        """Measure up to ``AT_ONCE`` of the rounds not measured yet, store them; return their number."""
        rounds = [row[0] for row in connection.execute(_MISSING, (AT_ONCE,))]
        for number in rounds:
            found = self.measure(connection, number)
            connection.execute(
                "INSERT OR REPLACE INTO diversity VALUES (?, ?)",
                (number, msgspec.json.encode(found).decode()),
            )
        return len(rounds)

    def measure(self, connection: sqlite3.Connection, number: int) -> Diversity:
        """Return the figures of round ``number``, which must not lie before the last one measured."""
        if number > self._next:
            self._learn(connection, _items(connection, _PLAYED, self._next, number - 1), number)
            self._next = number
        played = _items(connection, _PLAYED, number, number)
        some = sample_of(played, [item.design for item in played], self._sample)
        self._embed(connection, some)
        found = measure(
            some,
            self._rows(some),
            near=self._embedder.near,
            new={item.design for item in some} - self._designs.keys(),
            before=self._before.vectors(),
            known={item.environment for item in some if _brief(item.environment) in self._known},
            documents_so_far=len(self._documents | {item.document for item in played} - {""}),
        )
        return msgspec.structs.replace(found, environments=len(played))

    def _learn(
        self, connection: sqlite3.Connection, items: Sequence[WrittenEnvironment], number: int
    ) -> None:
        """Count ``items``, played before round ``number``, as known.

        A program costs eight bytes; designs are forgotten ``_PLAYED_ROUNDS`` rounds after their last play,
        because their windows are closed.
        """
        first = {item.environment: item for item in reversed(items)}
        wanted = [first[name] for name in self._before.wanted(first)]
        self._embed(connection, wanted)
        for item in wanted:
            self._before.add(item.environment, self._vectors[item.environment])
        self._known.update(map(_brief, first))
        self._designs.update((item.design, number) for item in items)
        self._designs = {name: last for name, last in self._designs.items() if number - last < _PLAYED_ROUNDS}
        self._documents.update(item.document for item in items if item.document)

    def _embed(self, connection: sqlite3.Connection, items: Sequence[WrittenEnvironment]) -> None:
        """Hold the vectors of exactly ``items``."""
        needed = {item.environment: item.design for item in items}
        known = {name: self._vectors.get(name, self._before.get(name)) for name in needed}
        kept = {name: row for name, row in known.items() if row is not None}
        missing = [name for name in needed if name not in kept]
        rows = self._embedder.embed(sources(connection, [needed[name] for name in missing]))
        self._vectors = kept | dict(zip(missing, rows, strict=True))

    def _rows(self, items: Sequence[WrittenEnvironment]) -> Vectors:
        rows = [self._vectors[item.environment] for item in items]
        return np.stack(rows) if rows else np.zeros((0, 1), np.float32)


def _brief(environment: str) -> int:
    return int.from_bytes(hashlib.blake2b(environment.encode(), digest_size=8).digest(), "little")


class Overall(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a set of environments, or of those of one ``skill``; ``sampled`` is the number of vectors.

    ``weighed`` is the Vendi score with terms weighed by their rarity in the set.
    """

    skill: str
    environments: int
    programs: int
    documents: int
    sampled: int
    vendi: float
    weighed: float
    near_duplicates: float | None
    share: float


def rounds(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return the stored figures of each round, with ``round``."""
    rows = connection.execute("SELECT round, fields FROM diversity ORDER BY round")
    return [{"round": number, **msgspec.json.decode(fields)} for number, fields in rows]


def overall(
    items: Sequence[WrittenEnvironment],
    chosen: Sequence[WrittenEnvironment],
    vectors: Vectors,
    weighed: Vectors,
    *,
    near: float,
) -> list[Overall]:
    """Return the figures of all ``items`` and then of each skill, by name.

    ``vectors`` and ``weighed`` have the rows of ``chosen``, a sample of ``items``
    (:func:`engine.diversity.measures.sampled`); terms of ``weighed`` are weighed by their rarity in it.
    """
    rows = []
    for skill in ("", *sorted({item.skill for item in items})) if items else ():
        mine = [item for item in items if skill in ("", item.skill)]
        at = [row for row, item in enumerate(chosen) if skill in ("", item.skill)]
        rows.append(
            Overall(
                skill=skill,
                environments=len(mine),
                programs=len({item.environment for item in mine}),
                documents=len({item.document for item in mine if item.document}),
                sampled=len(at),
                vendi=vendi_of(vectors[at]),
                weighed=vendi_of(weighed[at]),
                near_duplicates=near_duplicates(vectors[at], near),
                share=len(mine) / len(items),
            )
        )
    return rows


def sources(connection: sqlite3.Connection, designs: Sequence[str]) -> list[str]:
    """Return the programs of ``designs``, in their order."""
    query = "SELECT source FROM environments WHERE design = ?"
    return [str(connection.execute(query, (design,)).fetchone()[0]) for design in designs]


def items(connection: sqlite3.Connection) -> list[WrittenEnvironment]:
    """Return all environments of a run in the order in which they were written."""
    return _items(connection, f"SELECT {_ITEM} FROM environments ORDER BY sequence")


def _items(connection: sqlite3.Connection, query: str, *parameters: Any) -> list[WrittenEnvironment]:
    return [WrittenEnvironment(*row) for row in connection.execute(query, parameters)]
