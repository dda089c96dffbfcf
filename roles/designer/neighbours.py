"""Which remembered program a new one is most like."""

from __future__ import annotations

from typing import NamedTuple

import anyio
import numpy as np

from engine.similarity import Embedder, Vectors, embedder, nearest
from roles.designer.memory import Memory


class Near(NamedTuple):
    """The program most like the one asked about: its digest, "" for none, and their cosine."""

    environment: str = ""
    similarity: float = 0.0


class Neighbours:
    """Vectors of the programs in ``memory``, made as they are asked for and dropped with the program.

    ``bound`` 0 takes the bound that suits the embedder. Raises ConfigError for a sentence model that is not
    there.
    """

    def __init__(self, memory: Memory, *, method: str = "auto", bound: float = 0.0) -> None:
        self._memory, self._method, self._bound = memory, method, bound
        self._embedder: Embedder | None = None
        self._vectors: dict[str, Vectors] = {}
        self._lock = anyio.Lock()

    async def nearest(self, source: str, *, design: str) -> Near:
        """Return the nearest remembered program that is not of the ticket ``design`` itself."""
        known = {r.environment: r.source for r in self._memory.programs() if r.design != design}
        async with self._lock:
            return await anyio.to_thread.run_sync(self._nearest, source, known)

    def close(self, near: Near) -> bool:
        """Whether ``near`` makes a program a near-duplicate."""
        bound = self._bound or (self._embedder.near if self._embedder else 1.0)
        return bool(near.environment) and near.similarity >= bound

    def _nearest(self, source: str, known: dict[str, str]) -> Near:
        if self._embedder is None:
            self._embedder = embedder(self._method)
        if not known:
            return Near()
        self._vectors = {name: row for name, row in self._vectors.items() if name in known}
        new = [name for name in known if name not in self._vectors]
        rows = self._embedder.embed([*(known[name] for name in new), source])
        self._vectors.update(zip(new, rows, strict=False))
        places, cosines = nearest(rows[-1:], np.stack([self._vectors[name] for name in known]))
        return Near(list(known)[places[0, 0]], float(cosines[0, 0]))
