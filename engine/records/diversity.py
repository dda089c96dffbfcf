"""The diversity of the environments of each round, measured from the run's database and stored there.

The *Vendi score* (Friedman & Dieng 2023, arXiv:2210.02410) is the exponential of the entropy of the
eigenvalues of the similarity kernel divided by N: the effective number of environments, 1 when all are equal
and N when no two share anything. It grows with N: compare rounds of one size.

The recorder measures each round once, in its worker thread, after the round's summary has been written.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.similarity import Embedder, HashedTfidf, Vectors

AT_ONCE = 4
"""Rounds measured per call, so that a resumed run catches up gradually."""

_PLAYED = """SELECT environment, source, skill, document FROM environments WHERE design IN
(SELECT DISTINCT design FROM episodes WHERE round = ?) ORDER BY sequence"""
_MISSING = """SELECT round FROM rounds WHERE round > (SELECT COALESCE(MAX(round), -1) FROM diversity)
ORDER BY round LIMIT ?"""


class PlayedEnvironment(NamedTuple):
    """An environment of a round; ``environment`` is the SHA-256 of its program."""

    environment: str
    source: str
    skill: str
    document: str


class Diversity(msgspec.Struct, frozen=True, kw_only=True):
    """Diversity of the environments that were played in a round; None where there is none.

    ``vendi`` lies between 1 and ``environments``; ``duplicates`` and ``near_duplicates`` are the shares whose
    program equals, or nearly equals, an earlier one of the round; ``effective_skills`` is the exponential of
    the entropy of skills.
    """

    environments: int
    vendi: float | None
    duplicates: float | None
    near_duplicates: float | None
    skills: int
    effective_skills: float | None
    documents: int


def record(connection: sqlite3.Connection) -> int:
    """Measure up to ``AT_ONCE`` of the rounds not measured yet, store them; return their number.

    Raises sqlite3.Error.
    """
    rounds = [row[0] for row in connection.execute(_MISSING, (AT_ONCE,))]
    for number in rounds:
        played = [PlayedEnvironment(*row) for row in connection.execute(_PLAYED, (number,))]
        found = msgspec.json.encode(measure(played)).decode()
        connection.execute("INSERT OR REPLACE INTO diversity VALUES (?, ?)", (number, found))
    return len(rounds)


def rounds(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    """Return the stored figures of each round, with ``round``."""
    rows = connection.execute("SELECT round, fields FROM diversity ORDER BY round")
    return [{"round": number, **msgspec.json.decode(fields)} for number, fields in rows]


def measure(played: Sequence[PlayedEnvironment], embedder: Embedder | None = None) -> Diversity:
    """Return the figures of a round, whose environments come in the order of writing."""
    embedder = embedder or HashedTfidf()
    vectors = embedder.embed([item.source for item in played])
    skills = Counter(item.skill for item in played)
    programs = len({item.environment for item in played})
    return Diversity(
        environments=len(played),
        vendi=vendi(vectors) if played else None,
        duplicates=1.0 - programs / len(played) if played else None,
        near_duplicates=near_duplicates(vectors, embedder.near) if played else None,
        skills=len(skills),
        effective_skills=effective(list(skills.values())) if skills else None,
        documents=len({item.document for item in played if item.document}),
    )


def vendi(vectors: Vectors) -> float:
    """Return the Vendi score of rows of unit length (N, D), their cosines the kernel; 0.0 without rows.

    A row of zeros is similar to other rows of zeros only.
    """
    if not len(vectors):
        return 0.0
    rows = np.asarray(vectors, np.float64)
    empty = (np.linalg.norm(rows, axis=1) < 0.5).astype(np.float64)
    rows = np.concatenate([rows, empty[:, None]], axis=1)
    gram = rows @ rows.T if len(rows) <= rows.shape[1] else rows.T @ rows
    spectrum = np.clip(np.linalg.eigvalsh(gram), 0.0, None)
    spectrum = spectrum[spectrum > spectrum.max() * 1e-12]
    return effective(spectrum)


def effective(amounts: Sequence[float] | NDArray[np.float64]) -> float:
    """Return the exponential of the entropy of positive ``amounts``: the effective number of kinds."""
    shares = np.asarray(amounts, np.float64)
    shares = shares / shares.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def near_duplicates(vectors: Vectors, near: float) -> float:
    """Return the share of rows (N, D), at least one, with a cosine of ``near`` or more to one before them."""
    alike = np.tril(vectors @ vectors.T, -1) >= near
    return float(alike.any(axis=1).mean())
