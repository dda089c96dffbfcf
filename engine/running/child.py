"""Child processes that are started again within a budget (guarded: ``engine.inference.guarded``)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import anyio
import structlog

from engine.errors import SpadeError
from engine.inference.guarded import end_of, guarded

TAIL_LINES = 15
BAD_INPUT = 2


class Budget:
    """Counts the crashes of a child and decides whether it may start again. Pure; times are arguments.

    More than ``crashes`` within ``seconds`` are too many. So are more than ``crashes`` in a row without
    progress between them, however far apart they are.
    """

    def __init__(self, crashes: int = 3, seconds: float = 600.0) -> None:
        self._allowed, self._seconds = crashes, seconds
        self._crashes: deque[float] = deque()
        self._furthest: int | None = None
        self.in_place = 0  # crashes in a row without progress

    def crashed(self, now: float, point: int | None = None) -> float | None:
        """Record a crash at ``now``, when the child had reached ``point`` (None: unknown).

        Returns the seconds to wait before a restart, None when the budget is spent.
        """
        self._crashes.append(now)
        while self._crashes[0] < now - self._seconds:
            self._crashes.popleft()
        if point is not None:
            further = self._furthest is None or point > self._furthest
            self.in_place = 1 if further else self.in_place + 1
            self._furthest = point if further else self._furthest
        if max(len(self._crashes), self.in_place) > self._allowed:
            return None
        return float(2 ** (len(self._crashes) - 1))


async def keep_running(
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    logger: structlog.stdlib.BoundLogger,
    draining: anyio.Event,
    environment: Mapping[str, str] | None = None,
    budget: Budget | None = None,
    progress: Callable[[], Awaitable[int]] | None = None,
) -> None:
    """Run ``command`` until it ends with status 0, or ends in any way after ``draining`` was set.

    A crash starts it again, after a growing pause, as long as the ``budget`` lasts; ``progress`` says how
    far the child has got, in rounds. Raises SpadeError with the last lines of its output when the budget is
    spent or when the child calls its input bad.
    """
    budget = budget or Budget()
    while True:
        async with guarded(command, log=log, environment=environment) as process:
            logger.info("child.started", child=name, pid=process.pid)
            status = await process.wait()
        if status == 0 or draining.is_set():
            tell = logger.warning if status else logger.info
            tell("child.ended", child=name, status=status, log=str(log))
            return
        point = await progress() if progress is not None else None
        pause = None if status == BAD_INPUT else budget.crashed(time.monotonic(), point)
        last = tail(log, 1).strip()
        logger.warning(
            "child.crashed", child=name, status=status, restart_in=pause, after_round=point, said=last
        )
        if pause is None:
            raise died(name, status, log, point=point, times=budget.in_place)
        with anyio.move_on_after(pause):
            await draining.wait()
            return


def died(name: str, status: int, log: Path, *, point: int | None = None, times: int = 0) -> SpadeError:
    """Explain a child that will not be started again, with the last lines of its output.

    It had reached round ``point`` and ended ``times`` times in a row without progress.
    """
    how = f"was ended by signal {status - 128}" if status > 128 else f"ended with status {status}"
    if times > 1 and point is not None:
        where = f"after round {point}" if point >= 0 else "before its first round"
        how += f", {times} times in a row {where},"
    error = SpadeError(
        f"The process {name} {how} and is not started again. Its last lines:\n{tail(log)}",
        remedy=f"\nAll of its output is in {log}. When the cause is mended, run the same command again: "
        "the run goes on where it stopped.",
    )
    if status == BAD_INPUT:
        error.exit_code = BAD_INPUT
    return error


def tail(log: Path, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log, indented; reads at most 64 KiB of it."""
    try:
        text = end_of(log, 64 << 10)
    except OSError as error:
        return f"  ({log} cannot be read: {error.strerror})"
    return "\n".join(f"  {line}" for line in text.splitlines()[-lines:]) or "  (nothing was printed)"
