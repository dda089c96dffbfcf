"""The order in which documents are drawn: arithmetic on the number of a draw, without state.

Two hosts that answer tickets of one run, in any order, before and after a restart, so draw the same documents
for each design; and no document is drawn twice before all others were drawn.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

_CYCLE = 1000


class Draw(NamedTuple):
    """The document at ``position``, drawn as number ``done + 1`` of pass ``epoch`` over all documents."""

    position: int
    epoch: int
    done: int


class EpochOrder:
    """Draws ``size`` documents without replacement within an epoch, one pass over them.

    Draws come in blocks of ``attempts`` for one design, of which often only the first is used. From one pass
    to the next the order moves on by one, so that over ``attempts`` passes nearly every document is the
    first of a block once; then the order is shuffled again. ``sharers`` designs of different skills take
    blocks side by side. A pass omits documents that would not fill a last block, so that a block lies in one
    pass and a design never gets the same document twice (rarely, where several sources are mixed).
    """

    def __init__(self, size: int, *, seed: str, attempts: int, sharers: int = 1) -> None:
        self.size, self._seed, self._passes = size, seed, max(attempts, 1)
        block = self._passes * sharers
        self.length = size - size % block if size >= block else size
        self._order = lru_cache(maxsize=4)(self._shuffled)

    def draw(self, index: int) -> Draw:
        """Return draw number ``index`` >= 0."""
        epoch, done = divmod(index, self.length)
        order = self._order(epoch // self._passes)
        return Draw(order[(done + epoch % self._passes) % self.size], epoch, done)

    def _shuffled(self, number: int) -> list[int]:
        order = list(range(self.size))
        random.Random(f"{self._seed}/{number}").shuffle(order)
        return order


class Mixture:
    """Spreads draws over sources by weight: exact in every cycle of a thousand draws.

    Each source has a draw in every cycle, however small its weight.
    """

    def __init__(self, weights: Sequence[float], *, seed: str) -> None:
        places = [index for index, share in enumerate(_shares(weights)) for _ in range(share)]
        random.Random(seed).shuffle(places)
        self._places = places
        self._where = [[at for at, of in enumerate(places) if of == index] for index in range(len(weights))]

    def pick(self, draw: int) -> tuple[int, int]:
        """Return (source, how many earlier draws that source had)."""
        full, at = divmod(draw, len(self._places))
        source = self._places[at]
        mine = self._where[source]
        return source, full * len(mine) + bisect_left(mine, at)


def _shares(weights: Sequence[float]) -> list[int]:
    """Split a cycle by largest remainder, at least one for each weight."""
    if len(weights) == 1:
        return [1]
    total = sum(weights)
    exact = [weight / total * _CYCLE for weight in weights]
    shares = [max(1, int(value)) for value in exact]
    order = sorted(range(len(weights)), key=lambda index: (int(exact[index]) - exact[index], index))
    for index in order[: max(0, _CYCLE - sum(shares))]:
        shares[index] += 1
    shares[shares.index(max(shares))] -= max(0, sum(shares) - _CYCLE)
    return shares
