"""When a second server is asked for an answer that the first one is slow to give: pure, no clock.

A hedge waits for as long as a share of all answers takes (``quantile``), so that it is rare by construction,
and is bounded besides: at most one request in ten. It is for servers that stall. It is not free of bias: of
two continuations sampled independently the first to arrive is taken, and that is more often the shorter one.
"""

from __future__ import annotations

from collections import OrderedDict, deque

_WINDOW = 512
_LEAST = 32
_KINDS = 16
_SHARE = 0.1


class Latencies:
    """The seconds of the last answers, apart for each ``kind`` of request (its token limit)."""

    def __init__(self, *, window: int = _WINDOW, least: int = _LEAST, kinds: int = _KINDS) -> None:
        self._window, self._least, self._kinds = window, least, kinds
        self._seconds: OrderedDict[int, deque[float]] = OrderedDict()

    def add(self, kind: int, seconds: float) -> None:
        """Take in one answer."""
        if kind not in self._seconds:
            self._seconds[kind] = deque(maxlen=self._window)
            if len(self._seconds) > self._kinds:
                self._seconds.popitem(last=False)
        self._seconds.move_to_end(kind)
        self._seconds[kind].append(seconds)

    def quantile(self, kind: int, share: float) -> float | None:
        """Return the seconds within which ``share`` of the answers came, None while too few are known."""
        known = sorted(self._seconds.get(kind, ()))
        if len(known) < self._least:
            return None
        return known[min(len(known) - 1, int(share * len(known)))]


class Hedging:
    """Decides on hedges and counts what they cost. ``quantile`` 0 hedges nothing."""

    def __init__(self, quantile: float) -> None:
        if not 0 <= quantile < 1:
            raise ValueError(f"a quantile lies in [0, 1), not {quantile}")
        self._quantile = quantile
        self._latencies = Latencies()
        self._requests = 0
        self.sent = self.won = 0
        self.wasted_seconds = 0.0

    def delay(self, kind: int) -> float | None:
        """Return after how many seconds a request of this kind may be sent a second time, None for never."""
        if not self._quantile:
            return None
        self._requests += 1
        return self._latencies.quantile(kind, self._quantile)

    def allowed(self) -> bool:
        """Whether one more hedge is within the bound."""
        return self.sent < _SHARE * self._requests

    def answered(self, kind: int, seconds: float) -> None:
        """Take in the seconds of an answer."""
        if self._quantile:
            self._latencies.add(kind, seconds)

    def statistics(self) -> dict[str, float]:
        """Counters: hedges sent, those that answered first, seconds of servers spent for nothing."""
        return {
            "hedges": float(self.sent),
            "hedges_won": float(self.won),
            "hedge_wasted_seconds": self.wasted_seconds,
        }
