"""The diversity of environments. Pure: vectors in, figures out.

The *Vendi score* (Friedman & Dieng 2023, arXiv:2210.02410) is the exponential of the entropy of the
eigenvalues of the similarity kernel divided by N: the effective number of environments, 1 when all are equal
and N when no two share anything. It grows with N: compare sets of one size.
Beyond ``SAMPLE`` items figures are those of a uniform sample, which depends on the items alone.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Sequence, Set
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float32]
T = TypeVar("T")

SAMPLE = 1000


class WrittenEnvironment(NamedTuple):
    """One environment of a run; ``environment`` is the SHA-256 of its program."""

    design: str
    environment: str
    skill: str
    document: str


class Diversity(msgspec.Struct, frozen=True, kw_only=True):
    """Diversity of a round's environments. Shares are in [0, 1], None where there is nothing to count.

    Of the ``environments`` played: ``vendi`` (1 to their number); ``duplicates`` and
    ``near_duplicates``, the shares whose program equals, or nearly equals, an earlier one of the round;
    ``skills`` and ``documents`` among them, ``effective_skills`` the exponential of the entropy of skills.
    Of the ``new`` ones, played for the first time: ``repeats``, the share whose program the run had played
    already, and ``novelty``, the mean of 1 - cosine to the nearest of ``compared`` programs before.
    ``documents_so_far`` counts those of all rounds up to this one.
    """

    environments: int
    vendi: float | None
    duplicates: float | None
    near_duplicates: float | None
    skills: int
    effective_skills: float | None
    documents: int
    new: int
    repeats: float | None
    novelty: float | None
    compared: int
    documents_so_far: int


class Sketch:
    """A uniform sample of at most ``limit`` distinct programs: those with the smallest hashes.

    It does not depend on the order in which they came, so a restart finds the same sample.
    """

    def __init__(self, limit: int = SAMPLE) -> None:
        self._limit = limit
        self._names: list[str] = []
        self._rows: dict[str, Vectors] = {}

    def __len__(self) -> int:
        return len(self._names)

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that are not in the sample and belong to it, sorted."""
        merged = sorted({*names, *self._names})[: self._limit]
        return [name for name in merged if name not in self._rows]

    def add(self, name: str, vector: Vectors) -> None:
        """Add a program with its vector (D,), if it belongs to the sample."""
        if name in self._rows or (len(self) == self._limit and name > self._names[-1]):
            return
        self._names.insert(bisect_left(self._names, name), name)
        self._rows[name] = vector.copy()  # a view would hold all the rows that it was made with
        if len(self) > self._limit:
            del self._rows[self._names.pop()]

    def get(self, name: str) -> Vectors | None:
        """Return the vector of a program, None when it is not in the sample."""
        return self._rows.get(name)

    def vectors(self) -> Vectors | None:
        """Return the sample's vectors (n, D), None when it is empty."""
        return np.stack([self._rows[name] for name in self._names]) if self._names else None


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


def near_duplicates(vectors: Vectors, near: float) -> float | None:
    """Return the share of rows (N, D) with a cosine of ``near`` or more to a row before them."""
    if not len(vectors):
        return None
    alike = np.tril(vectors @ vectors.T, -1) >= near
    return float(alike.any(axis=1).mean())


def novelty(vectors: Vectors, before: Vectors | None) -> float | None:
    """Return the mean of 1 - cosine of each row (N, D) to its nearest in ``before`` (M, D)."""
    if before is None or not len(vectors) or not len(before):
        return None
    nearest = np.clip((vectors @ before.T).max(axis=1), -1.0, 1.0)
    return float((1.0 - nearest).mean())


def sampled(items: Sequence[T], names: Sequence[str], limit: int = SAMPLE) -> list[T]:
    """Return at most ``limit`` of ``items`` in their order, the same ones for the same ``names``."""
    if len(items) <= limit:
        return list(items)
    ranked = sorted(range(len(items)), key=lambda at: hashlib.sha256(names[at].encode()).digest())
    return [items[at] for at in sorted(ranked[:limit])]


def measure(
    played: Sequence[WrittenEnvironment],
    vectors: Vectors,
    *,
    near: float,
    new: Collection[str] = (),
    before: Vectors | None = None,
    known: Set[str] = frozenset(),
    documents_so_far: int = 0,
) -> Diversity:
    """Return the figures of a round. ``vectors`` are those of ``played``, in the order of writing.

    ``new`` names the designs that had no round before; ``before`` are vectors of programs of earlier rounds,
    ``known`` the hashes of all of them.
    """
    skills = Counter(item.skill for item in played)
    fresh = [at for at, item in enumerate(played) if item.design in new]
    return Diversity(
        environments=len(played),
        vendi=vendi(vectors) if len(played) else None,
        duplicates=_repeated(played, frozenset()),
        near_duplicates=near_duplicates(vectors, near),
        skills=len(skills),
        effective_skills=effective(list(skills.values())) if skills else None,
        documents=len({item.document for item in played if item.document}),
        new=len(fresh),
        repeats=_repeated([played[at] for at in fresh], known),
        novelty=novelty(vectors[fresh], before) if fresh else None,
        compared=0 if before is None else len(before),
        documents_so_far=documents_so_far,
    )


def _repeated(items: Sequence[WrittenEnvironment], known: Set[str]) -> float | None:
    """Return the share of items whose program is known or equals an earlier item's."""
    if not items:
        return None
    fresh = {item.environment for item in items} - known
    return 1.0 - len(fresh) / len(items)
