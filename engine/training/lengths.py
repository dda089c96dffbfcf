"""Lengths of samples in trained tokens: of what was generated, and of what was trained. Pure.

Their difference is the bias of discarding: short samples come back sooner, and are dropped less often.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal, get_args

from bus.messages import Role

Kind = Literal["generated", "trained"]


class Lengths:
    """Counts samples by kind and role in ``counts``, which somebody else keeps."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def note(self, kind: Kind, role: Role, tokens: int) -> None:
        """Count one sample."""
        self._counts[f"{kind}_{role}_samples"] += 1
        self._counts[f"{kind}_{role}_tokens"] += tokens
        self._counts[f"{kind}_{role}_under_{1 << tokens.bit_length()}"] += 1

    def report(self) -> dict[str, float]:
        """Return means by kind and role, and counts of samples below each power of two (and not below the
        one before).
        """
        found = {name: float(count) for name, count in self._counts.items() if "_under_" in name}
        for which in (f"{kind}_{role}" for kind in get_args(Kind) for role in get_args(Role)):
            if samples := self._counts[f"{which}_samples"]:
                found[f"{which}_mean_tokens"] = self._counts[f"{which}_tokens"] / samples
        return found
