"""Shared by the benchmarks: the machine and its load during a measurement, and simple statistics."""

from __future__ import annotations

import importlib.metadata
import platform
import resource
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import monotonic

import msgspec
import psutil


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The machine that ran the measurement; ``memory_gb`` is in GiB."""

    system: str
    processor: str
    cores: int
    memory_gb: float
    python: str
    versions: dict[str, str]


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


def describe(packages: Iterable[str] = ()) -> Machine:
    """Describe this machine, with the versions of those of ``packages`` that are installed."""
    installed = {one.name for one in importlib.metadata.distributions()}
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        cores=psutil.cpu_count() or 1,
        memory_gb=round(psutil.virtual_memory().total / (1 << 30), 1),
        python=platform.python_version(),
        versions={one: importlib.metadata.version(one) for one in packages if one in installed},
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


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
