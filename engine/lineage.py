"""Policy versions and the tree they form.

A version is (fence, step): ``fence`` grows with every start of a learner, ``step`` counts its batches along
the surviving weights, whatever number of optimiser steps each of them takes. A learner that starts from a
checkpoint forks the tree there; what its predecessor published beyond that step belongs to an abandoned
branch, and no number is ever reused for other weights.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

_STEP_BITS = 32


class Version(NamedTuple):
    """One published policy. Version(0, 0) is the starting checkpoint."""

    fence: int
    step: int

    def pack(self) -> int:
        """Return the integer that travels on the wire and labels vLLM's weights."""
        return (self.fence << _STEP_BITS) | self.step

    @classmethod
    def unpack(cls, packed: int) -> Version:
        """Inverse of :meth:`pack`."""
        return cls(packed >> _STEP_BITS, packed & ((1 << _STEP_BITS) - 1))

    def __str__(self) -> str:
        return f"{self.step}" if self.fence == 0 else f"{self.step}@{self.fence}"


class Lineage(msgspec.Struct, frozen=True):
    """The forks of a run: ``forks[i]`` = (fence, step at which this fence left its predecessor)."""

    forks: tuple[tuple[int, int], ...] = ((0, 0),)

    def fork(self, fence: int, step: int) -> Lineage:
        """Return the lineage after a learner with ``fence`` resumed from a checkpoint at ``step``.

        Raises ValueError when ``fence`` is not newer than every known one.
        """
        if fence <= self.forks[-1][0]:
            raise ValueError(f"fence {fence} is not newer than {self.forks[-1][0]}")
        return Lineage((*self.forks, (fence, step)))

    def survives(self, version: Version) -> bool:
        """Return whether ``version`` lies on the path to the current weights."""
        later = [step for fence, step in self.forks if fence > version.fence]
        return version.step <= min(later, default=version.step)

    def age(self, current: Version, version: Version) -> int:
        """Return the distance in batches between two versions in the tree (>= 0)."""
        if current.fence == version.fence:
            return abs(current.step - version.step)
        low, high = sorted((current, version))
        meet = min([step for fence, step in self.forks if low.fence < fence <= high.fence])
        meet = min(meet, low.step, high.step)
        return (low.step - meet) + (high.step - meet)
