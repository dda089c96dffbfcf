"""What the bus benchmark sends, and how it counts what arrives. Shared by all transports."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator

from bus import codec
from bus.codec import Envelope
from bus.messages import EpisodeRequest, Message, SampleReady, Segment, Span
from engine.bench.bus_job import Outcome

RUN, ROLE, INSTANCE = "bench", "producer", "one"
_TOKEN_BYTES = 9  # int32 token, uint8 mask, float32 log-prob


def sample(index: int, segments: tuple[Segment, ...], total: int = 0) -> SampleReady:
    """Return training data. ``index`` counts from 0; the last one says how many there were."""
    return SampleReady(
        sample=f"s{index}",
        role="agent",
        skill="bench",
        group="g",
        round=index,
        reward=float(total),
        advantage=0.5,
        segments=segments,
    )


def request(index: int, source: str, total: int = 0) -> EpisodeRequest:
    """Return work for an agent, whose program has ``source``."""
    return EpisodeRequest(
        episode=f"e{index}",
        design="d",
        environment="e",
        skill="bench",
        arm="plain",
        round=index,
        index=total,
        seed=index,
        source=source,
        hint=None,
        max_turns=8,
    )


def encode(message: Message) -> bytes:
    """Return the frame, as the bus would write it."""
    return codec.encode(message, run=RUN, role=ROLE, instance=INSTANCE)


def segments(tokens: int) -> tuple[Segment, ...]:
    """Return one segment with so many tokens."""
    return (
        Segment(
            tokens=bytes(4 * tokens),
            mask=b"\x01" * tokens,
            logprobs=bytes(4 * tokens),
            spans=(Span(1, 0, tokens),),
        ),
    )


class Supply:
    """Messages whose frames have about ``size`` bytes, for one transport."""

    def __init__(self, size: int, *, work: bool) -> None:
        self._work = work
        empty = len(encode(request(1 << 17, "") if work else sample(1 << 17, segments(0))))
        room = max(0, size - empty)
        self._source = "x" * room
        self._segments = segments(room // _TOKEN_BYTES)
        self.made = 0

    def make(self, *, last: bool = False) -> Message:
        """Return the next message; ``last`` tells the consumer that nothing follows."""
        index, self.made = self.made, self.made + 1
        total = self.made if last else 0
        if self._work:
            return request(index, self._source, total)
        return sample(index, self._segments, total)

    def until(self, deadline: float, most: int) -> Iterator[Message]:
        """Make messages until the deadline (monotonic clock), at most ``most``."""
        for _ in range(most):
            if time.monotonic() >= deadline:
                return
            yield self.make()


class Sink:
    """Counts what arrives. ``done`` when everything that was sent has been taken."""

    def __init__(self, *, ages: bool) -> None:
        self._seen = bytearray()
        self._ages: array[int] | None = array("q") if ages else None
        self._total = 0
        self._duplicates = 0
        self._first = self._cpu = 0.0
        self.taken = 0
        self.done = False

    def take(self, envelope: Envelope, message: Message) -> None:
        """Count one decoded message."""
        if self._ages is not None:
            self._ages.append(time.time_ns() - envelope.ts)
        assert isinstance(message, SampleReady | EpisodeRequest)
        index = message.round
        if not self.taken:
            self._first, self._cpu = time.monotonic(), time.process_time()
        if index >= len(self._seen):
            self._seen.extend(bytes(index + 1024))
        if self._seen[index]:
            self._duplicates += 1
            return
        self._seen[index] = 1
        self.taken += 1
        total = message.index if isinstance(message, EpisodeRequest) else int(message.reward)
        self._total = self._total or total
        self.done = self._total > 0 and self.taken >= self._total

    def outcome(self) -> Outcome:
        """Return the counts; the clock stops here."""
        return Outcome(
            messages=self.taken,
            first=self._first,
            last=time.monotonic(),
            cpu=time.process_time() - self._cpu,
            lost=max(0, self._total - self.taken),
            duplicates=self._duplicates,
            milliseconds=[age / 1e6 for age in self._ages or ()],
        )
