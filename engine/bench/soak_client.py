"""The two clients of the soak test, each its own process: a sampler-like producer, a learner-like consumer.

Run as ``python -m engine.bench.soak_client ROLE SETTINGS`` with the token of the bus in SPADE_BUS_TOKEN and
settings as JSON. Each writes a line when it is ready and a line with its result.
"""

from __future__ import annotations

import math
import os
import sys
import time
from time import monotonic

import anyio
import msgspec

from bus import NatsBus, connect
from bus.messages import RoundClosed, SampleReady, Segment, Span

_BYTES_A_TOKEN = 9
_PURGE_SECONDS = 1.0
_TICK_SECONDS = 0.01


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """``rate`` messages/s of ``size`` bytes for ``seconds``, over the bus at ``url``."""

    url: str
    run: str
    rate: float
    size: int
    seconds: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The client works from now on, as process ``pid``."""

    pid: int


class Sent(msgspec.Struct, frozen=True, tag="sent"):
    """What the producer got acknowledged, and how many seconds it took."""

    messages: int
    seconds: float
    statistics: dict[str, float]


class Received(msgspec.Struct, frozen=True, tag="received"):
    """What the consumer read. ``gaps`` counts breaks in the stream's sequence; ages are ms from encoding
    to decoding (percentiles of a histogram with 2 % wide classes).
    """

    messages: int
    gaps: int
    age_p50_ms: float
    age_p99_ms: float
    age_max_ms: float
    statistics: dict[str, float]


Report = Ready | Sent | Received


class Histogram:
    """Counts of positive values in classes that grow by 2 %: a bounded memory of any number of values."""

    _BASE, _GROWTH, _CLASSES = 1e-3, math.log(1.02), 1024

    def __init__(self) -> None:
        self._counts = [0] * self._CLASSES
        self.total = 0
        self.max = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        place = math.ceil(math.log(max(value, self._BASE) / self._BASE) / self._GROWTH)
        self._counts[min(place, self._CLASSES - 1)] += 1
        self.total += 1
        self.max = max(self.max, value)

    def quantile(self, share: float) -> float:
        """Return the upper edge of the class in which the share ``share`` of all values is reached; 0.0
        when there are none.
        """
        wanted, seen = share * self.total, 0
        for place, count in enumerate(self._counts):
            seen += count
            if count and seen >= wanted:
                return min(self.max, self._BASE * math.exp(place * self._GROWTH))
        return 0.0


def sample(number: int, size: int) -> SampleReady:
    """Return a training sample of about ``size`` bytes."""
    tokens = max(1, size // _BYTES_A_TOKEN)
    segment = Segment(
        tokens=number.to_bytes(4, "little") * tokens,
        mask=b"\x01" * tokens,
        logprobs=bytes(4 * tokens),
        spans=(Span(0, 0, tokens),),
    )
    return SampleReady(
        sample=f"soak-{number}",
        role="agent",
        skill="soak",
        group=f"group-{number // 8}",
        round=number // 1000,
        reward=1.0,
        advantage=0.5,
        segments=(segment,),
    )


def end_mark() -> RoundClosed:
    """Return what tells the consumer that nothing follows."""
    return RoundClosed(
        round=0,
        plays=0,
        designs=0,
        agent_samples=0,
        designer_samples=0,
        zero_variance_groups=0,
        groups=0,
        final=True,
    )


async def produce(bus: NatsBus, settings: Settings) -> Sent:
    """Publish at the given rate; what a hiccup delayed is sent at once afterwards."""
    _say(Ready(os.getpid()))
    start, sent = monotonic(), 0
    while (now := monotonic() - start) < settings.seconds:
        due = int(now * settings.rate)
        await bus.publish_all(sample(number, settings.size) for number in range(sent, due))
        sent = max(sent, due)
        await anyio.sleep(_TICK_SECONDS)
    seconds = monotonic() - start
    await bus.publish(end_mark())
    return Sent(sent, seconds, bus.statistics())


async def consume(bus: NatsBus) -> Received:
    """Read until the end mark; purge what was read once a second, as a learner does."""
    ages, messages, gaps, last, purged = Histogram(), 0, 0, 0, monotonic()
    async with bus.follow("SAMPLE") as records:
        _say(Ready(os.getpid()))
        async for record in records:
            gaps += record.sequence != last + 1
            last = record.sequence
            if isinstance(record.message, RoundClosed):
                break
            messages += 1
            ages.add((time.time_ns() - record.envelope.ts) / 1e6)
            if monotonic() - purged > _PURGE_SECONDS:
                await bus.purge("SAMPLE", below=last + 1)
                purged = monotonic()
        return Received(messages, gaps, ages.quantile(0.5), ages.quantile(0.99), ages.max, bus.statistics())


def _say(report: Report) -> None:
    print(msgspec.json.encode(report).decode(), flush=True)


async def _main(role: str, settings: Settings, token: str) -> None:
    async with connect(settings.url, run=settings.run, role=role, instance="soak", token=token) as bus:
        _say(await (produce(bus, settings) if role == "producer" else consume(bus)))


if __name__ == "__main__":
    anyio.run(
        _main,
        sys.argv[1],
        msgspec.json.decode(sys.argv[2], type=Settings),
        os.environ.pop("SPADE_BUS_TOKEN"),
        backend_options={"use_uvloop": True},
    )
