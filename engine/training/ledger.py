"""What became of every sample along one lineage, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec


class LedgerState(msgspec.Struct, frozen=True):
    """A ledger as a checkpoint keeps it: closed rounds as ``[low, high]`` pairs, ids of recent rounds."""

    closed: tuple[tuple[int, int], ...] = ()
    recent: tuple[tuple[int, tuple[str, ...]], ...] = ()


class Ledger:
    """Knows which rounds are closed (exactly) and the terminal sample ids of the ``keep`` last ones.

    A sample may only arrive before its round closes, so a closed round alone refuses a second effect; the
    ids tell a repeated delivery from a late one.
    """

    def __init__(self, state: LedgerState | None = None, *, keep: int = 64) -> None:
        state = state or LedgerState()
        self._keep = keep
        self._closed = list(state.closed)
        self._recent: dict[int, tuple[str, ...]] = dict(state.recent)
        self._ids = {one for ids in self._recent.values() for one in ids}

    def closed(self, round_: int) -> bool:
        """Whether ``round_`` has been closed along this lineage."""
        return any(low <= round_ <= high for low, high in self._closed)

    def verdict(self, sample: str, round_: int) -> Literal["duplicate", "late"] | None:
        """Return None for a sample that may still be trained, else why not."""
        if sample in self._ids:
            return "duplicate"
        if not self.closed(round_):
            return None
        return "late" if round_ >= min(self._recent, default=0) else "duplicate"

    def close(self, round_: int, ids: Iterable[str]) -> None:
        """Close ``round_``; ``ids`` reached their terminal state with it."""
        self._recent[round_] = tuple(ids)
        self._ids.update(self._recent[round_])
        self._closed = _insert(self._closed, round_)
        while len(self._recent) > self._keep:
            self._ids.difference_update(self._recent.pop(next(iter(self._recent))))

    def state(self) -> LedgerState:
        """Return what a checkpoint keeps."""
        return LedgerState(tuple(self._closed), tuple(self._recent.items()))

    def __len__(self) -> int:
        return len(self._ids)


def _insert(spans: list[tuple[int, int]], value: int) -> list[tuple[int, int]]:
    """Return disjoint sorted ``spans`` with ``value`` added, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted([*spans, (value, value)]):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return joined
