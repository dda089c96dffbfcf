"""Statistics that the benchmarks share."""

from __future__ import annotations

from collections.abc import Sequence


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of ``values`` (nearest rank); 0 when there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def slope(seconds: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Return the Theil-Sen slope of ``values`` a minute and its 95 % interval, rounded to 0.001; ``seconds``
    says when each was measured. All 0 of fewer than three points.
    """
    from scipy.stats import theilslopes

    if len(seconds) < 3:
        return 0.0, 0.0, 0.0
    found = theilslopes(values, [moment / 60 for moment in seconds], 0.95)
    rate, low, high = (round(float(value), 3) for value in (found.slope, found.low_slope, found.high_slope))
    return rate, low, high
