"""One side of one case of the bus benchmark: a producer, a consumer, or a timer of single messages.

``engine.bench.bus`` starts it as ``python -m engine.bench.bus_side JOB``. It prints ``ready``, waits for a
line on its input, does its job and prints a :class:`SideResult` as JSON. It ends with its parent.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import msgspec

if TYPE_CHECKING:
    from bus import Bus, Envelope
    from bus.messages import EpisodeRequest, EpisodeSample, Message

RUN = "bench"
_CALL, _CALL_BYTES = 4096, 64 << 20
_PURGE, _PURGE_BYTES = 8192, 64 << 20
_HELD = 512
_WARM_UP = 64
_TOKEN_BYTES = 8  # int32 token, float32 log-probability
_SET_PDEATHSIG = 1


class SideJob(msgspec.Struct, frozen=True, kw_only=True):
    """The task of one process.

    ``kind`` is ``samples`` or ``tasks``; ``side`` is ``produce``, ``consume`` or ``ack`` (one message at a
    time, each acknowledgement timed). ``rate`` is in messages per second; 0 sends as fast as possible.
    """

    kind: str
    side: str
    size: int
    seconds: float
    url: str
    token: str
    rate: float = 0.0


class SideResult(msgspec.Struct, kw_only=True):
    """The counts of one process.

    ``first`` and ``last`` are seconds of the monotonic clock, ``frame`` is the size of a message in bytes,
    ``milliseconds`` holds one latency per message.
    """

    messages: int = 0
    first: float = 0.0
    last: float = 0.0
    frame: int = 0
    lost: int = 0
    duplicates: int = 0
    milliseconds: list[float] = []


def _sample(index: int, padding: int, total: int) -> EpisodeSample:
    from bus.messages import EpisodeSample, Segment, Span

    tokens = padding // _TOKEN_BYTES
    segment = Segment(
        tokens=bytes(4 * tokens),
        logprobs=bytes(4 * tokens),
        spans=(Span(1, 0, tokens),),
    )
    return EpisodeSample(episode=f"e{index}-{total}", round=index, segments=(segment,))


def _task(index: int, padding: int, total: int) -> EpisodeRequest:
    from bus.messages import EpisodeRequest

    return EpisodeRequest(
        episode=f"e{index}",
        design="d",
        environment="e",
        arm="plain",
        round=index,
        index=total,
        seed=index,
        source="x" * padding,
        hint=None,
        max_turns=8,
    )


class Supply:
    """Makes messages whose encoded frames have about ``size`` bytes."""

    def __init__(self, kind: str, size: int) -> None:
        from bus import codec

        def frame(padding: int) -> int:
            message = self._make(1 << 17, padding, 0)
            return len(codec.encode(message, run=RUN, role="producer", instance="one"))

        self._make = _task if kind == "tasks" else _sample
        self._padding = max(0, size - frame(0))
        self.frame = frame(self._padding)
        self.made = 0

    def next(self, *, last: bool = False) -> Message:
        """Return the next message. The last message carries the total count to the consumer."""
        index, self.made = self.made, self.made + 1
        return self._make(index, self._padding, self.made if last else 0)

    def until(self, deadline: float, most: int) -> Iterator[Message]:
        """Yield messages until the deadline (monotonic clock), at most ``most``."""
        for _ in range(most):
            if time.monotonic() >= deadline:
                return
            yield self.next()


class Sink:
    """Counts received messages; ``done`` once every sent message has arrived."""

    def __init__(self, *, ages: bool) -> None:
        self._seen = bytearray()
        self._measure_ages = ages
        self._ages: list[float] = []
        self._total = self._duplicates = 0
        self._first = 0.0
        self.taken = 0
        self.done = False

    def take(self, envelope: Envelope, message: Message) -> None:
        """Count one decoded message."""
        if self._measure_ages:
            self._ages.append((time.time_ns() - envelope.ts) / 1e6)
        if not self.taken:
            self._first = time.monotonic()
        index, total = _position(message)
        if index >= len(self._seen):
            self._seen.extend(bytes(index + 1024))
        if self._seen[index]:
            self._duplicates += 1
            return
        self._seen[index] = 1
        self.taken += 1
        self._total = self._total or total
        self.done = self._total > 0 and self.taken >= self._total

    def result(self) -> SideResult:
        """Return the counts up to now."""
        return SideResult(
            messages=self.taken,
            first=self._first,
            last=time.monotonic(),
            lost=max(0, self._total - self.taken),
            duplicates=self._duplicates,
            milliseconds=self._ages,
        )


def _position(message: Message) -> tuple[int, int]:
    """Return a message's index and, from the last one, the total count (0 from the others)."""
    from bus.messages import EpisodeRequest, EpisodeSample

    assert isinstance(message, EpisodeSample | EpisodeRequest)
    if isinstance(message, EpisodeRequest):
        return message.round, message.index
    return message.round, int(message.episode.rpartition("-")[2])


async def _wait_for_start() -> None:
    print("ready", flush=True)
    await anyio.to_thread.run_sync(sys.stdin.readline)


async def _produce(bus: Bus, job: SideJob) -> SideResult:
    """Send through ``publish_all``, or ``publish`` at a fixed rate: both return once it is stored."""
    supply = Supply(job.kind, job.size)
    await _wait_for_start()
    first = time.monotonic()
    if job.rate:
        for number in range(max(1, int(job.rate * job.seconds) - 1)):
            pause = first + number / job.rate - time.monotonic()
            if pause > 0:
                await anyio.sleep(pause)
            await bus.publish(supply.next())
    else:
        most = max(1, min(_CALL, _CALL_BYTES // job.size))
        while time.monotonic() < first + job.seconds:
            await bus.publish_all(supply.until(first + job.seconds, most))
    await bus.publish(supply.next(last=True))
    return SideResult(messages=supply.made, first=first, last=time.monotonic(), frame=supply.frame)


async def _time_acknowledgements(bus: Bus, job: SideJob) -> SideResult:
    supply, taken = Supply(job.kind, job.size), list[float]()
    for _ in range(_WARM_UP):
        await bus.publish(supply.next())
    await _wait_for_start()
    first = time.monotonic()
    while time.monotonic() < first + job.seconds:
        message = supply.next()
        began = time.perf_counter()
        await bus.publish(message)
        taken.append(1e3 * (time.perf_counter() - began))
    return SideResult(messages=len(taken), first=first, last=time.monotonic(), milliseconds=taken)


async def _take_samples(bus: Bus, job: SideJob) -> SideResult:
    """Read the sample stream as the learner does: samples that were used are purged."""
    sink, every = Sink(ages=job.rate > 0), max(1, min(_PURGE, _PURGE_BYTES // job.size))
    if job.rate:
        every = max(1, min(every, int(job.rate)))
    async with bus.follow("SAMPLE") as records:
        await _wait_for_start()
        async for record in records:
            sink.take(record.envelope, record.message)
            if sink.done or sink.taken % every == 0:
                await bus.purge("SAMPLE", below=record.sequence + 1)
            if sink.done:
                break
    return sink.result()


async def _take_tasks(bus: Bus, job: SideJob) -> SideResult:
    """Take tasks as an agent does: each is acknowledged when it is done."""
    sink = Sink(ages=job.rate > 0)
    async with bus.consume("agent", limit=_HELD) as tasks:
        await _wait_for_start()
        async for delivery in tasks:
            sink.take(delivery.envelope, delivery.message)
            await delivery.ack()
            if sink.done:
                break
    return sink.result()


async def _work(job: SideJob) -> SideResult:
    from bus import connect

    role = "agent" if job.side == "consume" else "producer"
    async with connect(job.url, run=RUN, role=role, instance="one", token=job.token) as bus:
        if job.side == "produce":
            return await _produce(bus, job)
        if job.side == "ack":
            return await _time_acknowledgements(bus, job)
        return await (_take_tasks if job.kind == "tasks" else _take_samples)(bus, job)


def main() -> None:
    """Do the job in the first argument (JSON), on the event loop that the roles use."""
    job = msgspec.json.decode(sys.argv[1], type=SideJob)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    print(
        msgspec.json.encode(anyio.run(_work, job, backend_options={"use_uvloop": True})).decode(), flush=True
    )


if __name__ == "__main__":
    main()
