"""The off-policy buffer: a pure state machine between the sample stream and the batches.

``admit`` takes samples in stream order; they wait for their credit, which comes with the close of a round.
``close`` joins credit and samples by id and forms the batch of the round. No clock, no bus, no randomness:
the same calls give the same batches (invariant I11).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from bus.messages import Credit, EpisodeSample, Role, RoundClosed
from engine.config import RoleTraining
from engine.lineage import Lineage, Version
from engine.training.samples import (
    CreditedSample,
    Lengths,
    Routes,
    Sampled,
    age,
    fault,
    trained_tokens,
    versions,
)

ROLES: tuple[Role, ...] = ("agent", "designer")


class UncreditedSample(NamedTuple):
    """A sample without credit: its stream ``sequence``, and why it cannot be trained (``fault``), if so."""

    sequence: int
    sample: Sampled
    fault: str | None


class BufferedSample(NamedTuple):
    """A credited sample: its stream ``sequence``, its number of trained ``tokens``, its versions."""

    sequence: int
    sample: CreditedSample
    tokens: int
    versions: frozenset[Version]


class Selection(NamedTuple):
    """The batch of a round. ``ages`` are in versions, one per sample.

    ``dropped`` pairs a sample id with its cause: every credited sample that reached a terminal state other
    than trained since the last batch. ``missing`` counts credits whose sample is not there.
    """

    samples: tuple[CreditedSample, ...]
    ages: tuple[int, ...]
    dropped: tuple[tuple[str, str], ...]
    missing: int


class KeptSample(msgspec.Struct, frozen=True, array_like=True):
    """A sample as a checkpoint keeps it: its place in the stream, its id, its credit of ``round`` if any."""

    sequence: int
    sample: str
    credit: Credit | None = None
    round: int = -1


class BufferState(msgspec.Struct, frozen=True):
    """The buffer as a checkpoint keeps it. The tokens of ``kept`` samples stay in the stream.

    ``closed`` holds the rounds that were closed along this lineage, as ``[low, high]`` pairs.
    """

    closed: tuple[tuple[int, int], ...] = ()
    kept: tuple[KeptSample, ...] = ()
    dropped: dict[str, str] = {}
    counts: dict[str, int] = {}
    settled: int = 0


class Buffer:
    """Holds samples until they are credited and their round closes.

    ``vocabulary`` bounds the token ids, ``routes`` the experts that are replayed. ``capacity`` bounds the
    credited samples held of each role: beyond it one is dropped as ``quota``, the oldest, which is the next
    to become stale, or that with the smallest advantage, as the role's ``priority`` says. A credited sample
    has exactly one terminal state: trained, or dropped as ``stale``, ``quota``, ``malformed`` or ``lost``.
    One that gets no credit by the close of its
    round, or of the batch of its cohort, leaves and is counted as ``uncredited``; one that arrives after that
    as ``late``. So a closed round alone refuses a second effect, and a repeated delivery changes nothing.
    """

    def __init__(
        self,
        limits: Mapping[Role, RoleTraining],
        *,
        vocabulary: int,
        routes: Routes | None = None,
        capacity: int = 65536,
        state: BufferState | None = None,
    ) -> None:
        state = state or BufferState()
        self._limits = limits
        self._vocabulary, self._routes = vocabulary, routes
        self._capacity = capacity
        self._uncredited: dict[str, UncreditedSample] = {}
        self._held: dict[Role, dict[str, BufferedSample]] = {role: {} for role in ROLES}
        self._closed = list(state.closed)
        self._dropped = dict(state.dropped)
        self._settled = state.settled
        self._counts = Counter(state.counts)
        self._lengths = Lengths(self._counts)

    def admit(self, sequence: int, sample: Sampled) -> str | None:
        """Take one sample of the stream; return None when it can be trained as soon as it is credited.

        Else return the cause: it is passed over (``duplicate``, ``late``, ``empty``), or waits for its credit
        in order to be dropped then (``malformed``).
        """
        name = sample.sample
        known = name in self._uncredited or name in self._held[sample.role] or name in self._dropped
        cause: str | None = None
        if known:
            cause = "duplicate"
        elif self._over(sample):
            cause = "late"
        elif not trained_tokens(sample):
            cause = "empty"
        if cause is not None:
            self._counts[cause] += 1
            return cause
        if sample.role == "designer":
            self._lengths.note("generated", "designer", trained_tokens(sample))
        cause = fault(sample, self._vocabulary, self._routes)
        self._uncredited[name] = UncreditedSample(sequence, sample, cause)
        return cause

    def restore(self, kept: KeptSample, sample: Sampled | None) -> None:
        """Put back a sample that a checkpoint kept; None when the stream lost it."""
        found = sample is not None and sample.sample == kept.sample
        if not found and kept.credit is not None:
            self._drop(kept.sample, "lost")
        elif sample is not None and found:
            waiting = UncreditedSample(kept.sequence, sample, fault(sample, self._vocabulary, self._routes))
            if kept.credit is None:
                self._uncredited[kept.sample] = waiting
            else:
                self._credit(waiting, kept.credit, kept.round)

    def closed(self, round_: int) -> bool:
        """Return whether the batch of ``round_`` was formed along this lineage."""
        return any(low <= round_ <= high for low, high in self._closed)

    def close(self, message: RoundClosed, current: Version, lineage: Lineage) -> Selection:
        """Credit the samples of a round and form its batch for the weights ``current``, by role and priority.

        Samples that are older than ``max_staleness`` are dropped (I6); those over the quota stay for a later
        round, or are dropped when the round is the final one.
        Raises ValueError when the round is closed already.
        """
        if self.closed(message.round):
            raise ValueError(f"round {message.round} is closed already")
        missing = sum(not self._join(credit, message.round) for credit in message.credits)
        self._counts["missing"] += missing
        for tokens in message.play_tokens:
            self._lengths.note("generated", "agent", tokens)
        chosen: list[tuple[BufferedSample, int]] = []
        for role in ROLES:
            chosen += self._choose(role, message, current, lineage)
        for entry, _ in chosen:
            del self._held[entry.sample.role][entry.sample.sample]
            self._lengths.note("trained", entry.sample.role, entry.tokens)
        dropped, self._dropped = tuple(self._dropped.items()), {}
        trained = tuple(entry.sample for entry, _ in chosen)
        self._counts["trained"] += len(trained)
        self._closed = _insert(self._closed, message.round)
        self._settled = max(self._settled, message.settled)
        self._let_go()
        return Selection(trained, tuple(old for _, old in chosen), dropped, missing)

    def state(self) -> BufferState:
        """Return what a checkpoint keeps."""
        kept = [KeptSample(entry.sequence, name) for name, entry in self._uncredited.items()]
        kept += [
            KeptSample(entry.sequence, entry.sample.sample, entry.sample.credit, entry.sample.round)
            for entry in self._all()
        ]
        return BufferState(
            tuple(self._closed),
            tuple(sorted(kept, key=lambda one: one.sequence)),
            dict(self._dropped),
            dict(self._counts),
            self._settled,
        )

    def statistics(self) -> dict[str, float]:
        """Return samples held, counts by cause, and :meth:`lengths`."""
        gauges = {f"held_{role}": float(len(self._held[role])) for role in ROLES}
        gauges["held_uncredited"] = float(len(self._uncredited))
        return gauges | {name: float(count) for name, count in sorted(self._counts.items())} | self.lengths()

    def lengths(self) -> dict[str, float]:
        """Return the lengths of the samples that were generated and of those that were trained."""
        return self._lengths.report()

    def _join(self, credit: Credit, round_: int) -> bool:
        """Credit a sample; False when it is not there."""
        waiting = self._uncredited.pop(credit.sample, None)
        if waiting is None:
            self._drop(credit.sample, "lost")
        elif waiting.fault is not None or not math.isfinite(credit.advantage):
            self._drop(credit.sample, "malformed")
        else:
            self._credit(waiting, credit, round_)
        return waiting is not None

    def _credit(self, waiting: UncreditedSample, credit: Credit, round_: int) -> None:
        sample, held = waiting.sample, self._held[waiting.sample.role]
        held[credit.sample] = BufferedSample(
            waiting.sequence,
            CreditedSample(credit.sample, sample.role, round_, credit, sample.segments),
            trained_tokens(sample),
            versions(sample),
        )
        if len(held) > self._capacity:
            spare = self._in_line(sample.role)[0 if self._limits[sample.role].priority == "oldest" else -1]
            self._drop(spare.sample.sample, "quota", sample.role)

    def _over(self, sample: Sampled) -> bool:
        """Return whether everything that can be credited together with ``sample`` has been."""
        if isinstance(sample, EpisodeSample):
            return self.closed(sample.round)
        return sample.cohort < self._settled

    def _let_go(self) -> None:
        """Drop samples that never get a credit: of flat groups, repeated work, cohorts without a reward."""
        over = [name for name, waiting in self._uncredited.items() if self._over(waiting.sample)]
        self._counts["uncredited"] += len(over)
        for name in over:
            del self._uncredited[name]

    def _choose(
        self, role: Role, message: RoundClosed, current: Version, lineage: Lineage
    ) -> list[tuple[BufferedSample, int]]:
        limit = self._limits[role]
        fresh: list[tuple[BufferedSample, int]] = []
        for entry in self._in_line(role):
            old = age(entry.versions, current, lineage)
            if old > limit.max_staleness:
                self._drop(entry.sample.sample, "stale", role)
            elif limit.quota and len(fresh) >= limit.quota:
                if message.final:
                    self._drop(entry.sample.sample, "quota", role)
            else:
                fresh.append((entry, old))
        return fresh

    def _in_line(self, role: Role) -> list[BufferedSample]:
        """Return the samples in the order of their priority.

        Ids are hashes: as a tie break they favour neither short nor early samples.
        """
        line = sorted(self._held[role].values(), key=lambda entry: (entry.sample.round, entry.sample.sample))
        match self._limits[role].priority:
            case "largest":
                line.sort(key=lambda entry: -abs(entry.sample.credit.advantage))
            case "newest":
                line.sort(key=lambda entry: -entry.sample.round)
        return line

    def _all(self) -> Iterator[BufferedSample]:
        for role in ROLES:
            yield from self._held[role].values()

    def _drop(self, sample: str, cause: str, role: Role | None = None) -> None:
        if role is not None:
            del self._held[role][sample]
        self._dropped[sample] = cause
        self._counts[f"dropped_{cause}"] += 1


def _insert(spans: list[tuple[int, int]], value: int) -> list[tuple[int, int]]:
    """Return disjoint sorted ``spans`` with ``value`` added, neighbours joined."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted([*spans, (value, value)]):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return joined
