"""The off-policy buffer: a pure state machine between the sample stream and the batches.

``admit`` takes samples in stream order, ``close`` forms the batch of a round. No clock, no bus, no
randomness: the same calls give the same batches (invariant I11).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from bus.messages import Role, RoundClosed, SampleReady
from engine.config import RoleTraining
from engine.lineage import Lineage, Version
from engine.training.ledger import Ledger, LedgerState
from engine.training.lengths import Lengths
from engine.training.samples import age, fault, trained_tokens, versions

ROLES: tuple[Role, ...] = ("agent", "designer")


class Held(NamedTuple):
    """A sample that waits: its stream ``sequence``, its number of trained ``tokens``, its versions."""

    sequence: int
    sample: SampleReady
    tokens: int
    versions: frozenset[Version]


class Selection(NamedTuple):
    """The batch of a round. ``ages`` are in versions, one a sample. ``dropped`` pairs a sample id
    with its cause: every sample that reached a terminal state other than trained since the last one.
    ``missing`` counts announced samples that never arrived.
    """

    samples: tuple[SampleReady, ...]
    ages: tuple[int, ...]
    dropped: tuple[tuple[str, str], ...]
    missing: int


class BufferState(msgspec.Struct, frozen=True):
    """What a checkpoint keeps. The samples stay in the stream: ``kept`` are (sequence, id)."""

    ledger: LedgerState = LedgerState()
    kept: tuple[tuple[int, str], ...] = ()
    dropped: dict[str, str] = {}
    arrived: dict[int, int] = {}
    counts: dict[str, int] = {}


class Buffer:
    """Holds samples until their round closes.

    ``vocabulary`` bounds the token ids, ``capacity`` the samples held of each role (beyond it one is dropped
    as ``quota``: the oldest, which is the next to become stale, or that with the smallest advantage, as the
    role's ``priority`` says). A sample has exactly one terminal state: trained, or dropped as ``stale``,
    ``quota``, ``late``, ``empty``, ``malformed`` or ``lost``. A repeated delivery changes nothing.
    """

    def __init__(
        self,
        limits: Mapping[Role, RoleTraining],
        *,
        vocabulary: int,
        capacity: int = 65536,
        state: BufferState | None = None,
    ) -> None:
        state = state or BufferState()
        self._limits = limits
        self._vocabulary = vocabulary
        self._capacity = capacity
        self._held: dict[Role, dict[str, Held]] = {role: {} for role in ROLES}
        self._ledger = Ledger(state.ledger)
        self._dropped = dict(state.dropped)
        self._arrived = Counter(state.arrived)
        self._counts = Counter(state.counts)
        self._lengths = Lengths(self._counts)

    def admit(self, sequence: int, sample: SampleReady) -> str | None:
        """Take one sample of the stream. Returns None when it is held, else the cause why not."""
        held = self._held[sample.role]
        known = sample.sample in held or sample.sample in self._dropped
        cause: str | None = "duplicate" if known else self._ledger.verdict(sample.sample, sample.round)
        if cause == "duplicate":
            self._counts["duplicate"] += 1
            return cause
        if cause is None:
            self._arrived[sample.round] += 1
            cause = fault(sample, self._vocabulary)
        if cause is not None:
            self._drop(sample.sample, cause)
            return cause
        entry = Held(sequence, sample, trained_tokens(sample), versions(sample))
        self._lengths.note("generated", sample.role, entry.tokens)
        held[sample.sample] = entry
        if len(held) > self._capacity:
            spare = self._in_line(sample.role)[0 if self._limits[sample.role].priority == "oldest" else -1]
            self._drop(spare.sample.sample, "quota", sample.role)
        return None

    def restore(self, sequence: int, name: str, sample: SampleReady | None) -> None:
        """Put back the sample ``name`` that a checkpoint kept; None when the stream lost it."""
        if sample is None or sample.sample != name:
            self._drop(name, "lost")
        else:
            entry = Held(sequence, sample, trained_tokens(sample), versions(sample))
            self._held[sample.role][name] = entry

    def closed(self, round_: int) -> bool:
        """Whether the batch of ``round_`` was formed along this lineage."""
        return self._ledger.closed(round_)

    def close(self, message: RoundClosed, current: Version, lineage: Lineage) -> Selection:
        """Form the batch of a round for the weights ``current``, each role by its ``priority``.

        Samples of later rounds wait. Those older than ``max_staleness`` are dropped (I6), those over the
        quota stay for a later round, or are dropped when the round is the final one.
        Raises ValueError when the round is closed already.
        """
        if self.closed(message.round):
            raise ValueError(f"round {message.round} is closed already")
        announced = message.agent_samples + message.designer_samples
        missing = max(0, announced - self._arrived.pop(message.round, 0))
        self._counts["missing"] += missing
        chosen: list[tuple[Held, int]] = []
        for role in ROLES:
            chosen += self._choose(role, message, current, lineage)
        for entry, _ in chosen:
            del self._held[entry.sample.role][entry.sample.sample]
            self._lengths.note("trained", entry.sample.role, entry.tokens)
        dropped, self._dropped = tuple(self._dropped.items()), {}
        trained = tuple(entry.sample for entry, _ in chosen)
        self._counts["trained"] += len(trained)
        self._ledger.close(message.round, [one.sample for one in trained] + [one for one, _ in dropped])
        return Selection(trained, tuple(old for _, old in chosen), dropped, missing)

    def state(self) -> BufferState:
        """Return what a checkpoint keeps."""
        return BufferState(
            self._ledger.state(),
            tuple(sorted((entry.sequence, entry.sample.sample) for entry in self._all())),
            dict(self._dropped),
            dict(self._arrived),
            dict(self._counts),
        )

    def statistics(self) -> dict[str, float]:
        """Samples held, counts by cause, and what :meth:`lengths` says."""
        gauges = {f"held_{role}": float(len(self._held[role])) for role in ROLES}
        return gauges | {name: float(count) for name, count in sorted(self._counts.items())} | self.lengths()

    def lengths(self) -> dict[str, float]:
        """Return the lengths of what was admitted and of what was consumed."""
        return self._lengths.report()

    def _choose(
        self, role: Role, message: RoundClosed, current: Version, lineage: Lineage
    ) -> list[tuple[Held, int]]:
        limit = self._limits[role]
        fresh: list[tuple[Held, int]] = []
        for entry in self._in_line(role):
            if entry.sample.round > message.round and not message.final:
                continue
            old = age(entry.versions, current, lineage)
            if old > limit.max_staleness:
                self._drop(entry.sample.sample, "stale", role)
            elif limit.quota and len(fresh) >= limit.quota:
                if message.final:
                    self._drop(entry.sample.sample, "quota", role)
            else:
                fresh.append((entry, old))
        return fresh

    def _in_line(self, role: Role) -> list[Held]:
        """Who comes first. Ids are hashes: as a tie break they favour neither short nor early samples."""
        line = sorted(self._held[role].values(), key=lambda entry: (entry.sample.round, entry.sample.sample))
        match self._limits[role].priority:
            case "largest":
                line.sort(key=lambda entry: -abs(entry.sample.advantage))
            case "newest":
                line.sort(key=lambda entry: -entry.sample.round)
        return line

    def _all(self) -> Iterator[Held]:
        for role in ROLES:
            yield from self._held[role].values()

    def _drop(self, sample: str, cause: str, role: Role | None = None) -> None:
        if role is not None:
            del self._held[role][sample]
        self._dropped[sample] = cause
        self._counts[f"dropped_{cause}"] += 1
