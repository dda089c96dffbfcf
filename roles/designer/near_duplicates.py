"""Finds the known program that a new one is most like: remembered, or accepted a moment ago."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import anyio
import numpy as np

from engine.diversity.similarity import Embedder, Vectors, embedder, nearest
from roles.designer.memory import Memory

_CLAIMS = 4096


class Near(NamedTuple):
    """The program most like the one asked about: its digest, "" for none, and their cosine."""

    environment: str = ""
    similarity: float = 0.0


class Neighbours:
    """Vectors of the programs in ``memory``, made as they are asked for and dropped with the program.

    ``bound`` 0 takes the bound that suits the embedder. A program is known from its claim on, long before
    memory is told of it, so of two twins that are judged at the same time one finds the other; of two in
    different processes neither does. Raises ConfigError for a sentence model that is not there.
    """

    def __init__(self, memory: Memory, *, method: str = "auto", bound: float = 0.0) -> None:
        self._memory, self._method, self._bound = memory, method, bound
        self._embedder: Embedder | None = None
        self._vectors: dict[str, Vectors] = {}
        self._claims: OrderedDict[str, tuple[str, str]] = OrderedDict()
        self._lock = anyio.Lock()

    async def claim(self, source: str, environment: str, *, design: str, unless_close: bool = False) -> Near:
        """Return the nearest known program of another ticket, and make this one known as ``design``'s.

        With ``unless_close`` it is not made known when the nearest is a near-duplicate.
        """
        async with self._lock:
            known = self._known(design)
            near = await anyio.to_thread.run_sync(self._nearest, source, known)
            if not (unless_close and self.close(near)):
                self.note(source, environment, design=design)
            return near

    def note(self, source: str, environment: str, *, design: str) -> None:
        """Make a program known that was compared before."""
        self._claims[design] = (environment, source)
        self._claims.move_to_end(design)
        while len(self._claims) > _CLAIMS:
            self._claims.popitem(last=False)

    def release(self, design: str) -> None:
        """Forget what a ticket claimed that came to nothing."""
        self._claims.pop(design, None)

    def close(self, near: Near) -> bool:
        """Return whether ``near`` makes a program a near-duplicate."""
        bound = self._bound or (self._embedder.near if self._embedder else 1.0)
        return bool(near.environment) and near.similarity >= bound

    def _known(self, design: str) -> dict[str, str]:
        """Return the programs to compare with, by digest; a claim lasts until memory has its design."""
        remembered = {record.design: record for record in self._memory.programs()}
        for told in self._claims.keys() & remembered.keys():
            del self._claims[told]
        known = {r.environment: r.source for r in remembered.values() if r.design != design}
        return known | dict(claim for other, claim in self._claims.items() if other != design)

    def _nearest(self, source: str, known: dict[str, str]) -> Near:
        if self._embedder is None:
            self._embedder = embedder(self._method)
        if not known:
            return Near()
        self._vectors = {name: row for name, row in self._vectors.items() if name in known}
        new = [name for name in known if name not in self._vectors]
        rows = self._embedder.embed([*(known[name] for name in new), source])
        # views would hold all the rows that they were made with
        self._vectors.update((name, row.copy()) for name, row in zip(new, rows, strict=False))
        places, cosines = nearest(rows[-1:], np.stack([self._vectors[name] for name in known]))
        return Near(list(known)[places[0, 0]], float(cosines[0, 0]))
