"""Shared by the benchmarks: the load of the machine during a measurement, and simple statistics."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Callable, Sequence
from time import monotonic

import msgspec
import psutil

Progress = Callable[[str], None]
"""Tells how far a measurement is."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """CPU use during ``seconds`` of measuring, in cores.

    ``own`` is this process with all its children, ``others`` every other process, ``steal`` the time that the
    hypervisor took. ``average`` is the load average (1, 5, 15 minutes) at the end.
    """

    seconds: float
    own: float
    others: float
    steal: float
    average: tuple[float, float, float]


class Spread(msgspec.Struct, frozen=True):
    """Median and range over ``runs`` repetitions."""

    median: float
    low: float
    high: float
    runs: int


def spread(values: Sequence[float]) -> Spread:
    """Return the median and the range of ``values``, which must not be empty."""
    return Spread(statistics.median(values), min(values), max(values), len(values))


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile of ``values`` by nearest rank, or 0 when there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


class LoadMeter:
    """Measures a :class:`Load` between :meth:`start` (made at creation) and :meth:`stop`."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Restart the measurement."""
        self._begin = (monotonic(), *_busy(), own_cpu_seconds())

    def stop(self) -> Load:
        """Return the load since the start; may be called again."""
        began, busy, steal, own = self._begin
        seconds = max(monotonic() - began, 1e-9)
        busy_now, steal_now = _busy()
        mine = max(0.0, own_cpu_seconds() - own) / seconds
        return Load(
            seconds=round(seconds, 3),
            own=round(mine, 3),
            others=round(max(0.0, (busy_now - busy) / seconds - mine), 3),
            steal=round((steal_now - steal) / seconds, 3),
            average=psutil.getloadavg(),
        )


def _busy() -> tuple[float, float]:
    """Return seconds since boot, over all cores: busy, and taken by the hypervisor."""
    times = psutil.cpu_times()
    steal = float(getattr(times, "steal", 0.0))
    idle = times.idle + getattr(times, "iowait", 0.0)
    # The kernel counts guest time as user time as well.
    guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    return sum(times) - idle - steal - guest, steal


def own_cpu_seconds() -> float:
    """Return the CPU seconds of this process, its ended children and all its living descendants."""
    total = sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total
