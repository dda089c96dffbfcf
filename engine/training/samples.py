"""Samples as they arrive: arrays, versions, faults, lengths. Pure numpy, no torch."""

from __future__ import annotations

from collections import Counter
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from bus.messages import Credit, DesignSample, EpisodeSample, Role, Segment
from engine.lineage import Lineage, Version

Kind = Literal["generated", "trained"]
Sampled = EpisodeSample | DesignSample
"""Messages that hold the tokens of a sample."""


class CreditedSample(NamedTuple):
    """A sample with its credit, to be trained in the batch of ``round`` or of a later one."""

    sample: str
    role: Role
    round: int
    credit: Credit
    segments: tuple[Segment, ...]


class Arrays(NamedTuple):
    """One segment as arrays: ``tokens`` int32 (T,), ``mask`` bool (T,), ``logprobs`` float32 (T,)."""

    tokens: NDArray[np.int32]
    mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]


def arrays(segment: Segment) -> Arrays:
    """Decode ``segment``. Raises ValueError when its arrays and its spans do not fit together."""
    tokens = np.frombuffer(segment.tokens, dtype=segment.dtype).astype(np.int32)
    sampled = np.frombuffer(segment.logprobs, dtype="<f4")
    mask, end = np.zeros(len(tokens), dtype=np.bool_), 0
    for span in segment.spans:
        if not end <= span.start < span.stop <= len(tokens):
            raise ValueError(f"spans {segment.spans} of {len(tokens)} tokens")
        mask[span.start : span.stop], end = True, span.stop
    if segment.sampled != len(sampled):
        raise ValueError(f"{segment.sampled} sampled tokens, {len(sampled)} log-probs")
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    logprobs[mask] = sampled
    return Arrays(tokens, mask, logprobs)


class Routes(NamedTuple):
    """The routing of a token as servers tell it: ``top_k`` of ``experts`` in each of ``layers``."""

    layers: int
    top_k: int
    experts: int

    def read(self, segment: Segment) -> NDArray[np.int16]:
        """Return the experts of the tokens of ``segment`` (T, layers, top_k); -1 where none are recorded.

        Raises ValueError when they do not fit.
        """
        found = np.full((len(segment), self.layers, self.top_k), -1, dtype=np.int16)
        if segment.experts:
            recorded = np.frombuffer(segment.experts, "<u1" if self.experts <= 256 else "<u2")
            found[:-1] = recorded.reshape(len(segment) - 1, self.layers, self.top_k)
            if found.max(initial=0) >= self.experts:
                raise ValueError(f"expert {found.max()} of {self.experts}")
        return found


def versions(sample: Sampled | CreditedSample) -> frozenset[Version]:
    """Return every policy version that sampled a token of ``sample`` (invariant I2)."""
    return frozenset(Version.unpack(span.version) for segment in sample.segments for span in segment.spans)


def age(sample_versions: frozenset[Version], current: Version, lineage: Lineage) -> int:
    """Return the age in versions of the oldest token (invariant I6), 0 without any version."""
    return max((lineage.age(current, version) for version in sample_versions), default=0)


def trained_tokens(sample: Sampled | CreditedSample) -> int:
    """Return how many tokens of ``sample`` carry a loss."""
    return sum(segment.sampled for segment in sample.segments)


def fault(sample: Sampled, vocabulary: int, routes: Routes | None = None) -> str | None:
    """Return why ``sample`` cannot be trained on, or None.

    ``"empty"`` has no sampled token. ``"malformed"`` has spans that overlap or do not fit the arrays, a
    token outside ``[0, vocabulary)``, a sampled first token (nothing predicts it), or a log-prob that is not
    a finite number of at most 0, or experts that do not fit ``routes``.
    """
    for segment in sample.segments:
        try:
            tokens, mask, logprobs = arrays(segment)
            if routes is not None:
                routes.read(segment)
        except ValueError:
            return "malformed"
        sampled = logprobs[mask]
        if (
            (len(tokens) and (tokens.min() < 0 or tokens.max() >= vocabulary))
            or (len(mask) and mask[0])
            or not np.isfinite(sampled).all()
            or (sampled > 1e-3).any()
        ):
            return "malformed"
    return None if trained_tokens(sample) else "empty"


class Lengths:
    """Counts samples by length in trained tokens, by kind and role, in ``counts``.

    The difference between generated and trained samples is the bias of discarding: short samples return
    sooner, and are dropped less often.
    """

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def note(self, kind: Kind, role: Role, tokens: int) -> None:
        """Count one sample."""
        self._counts[f"{kind}_{role}_samples"] += 1
        self._counts[f"{kind}_{role}_tokens"] += tokens
        self._counts[f"{kind}_{role}_under_{1 << tokens.bit_length()}"] += 1

    def report(self) -> dict[str, float]:
        """Return means by kind and role, and counts of samples between successive powers of two."""
        found = {name: float(count) for name, count in self._counts.items() if "_under_" in name}
        for group in (f"{kind}_{role}" for kind in get_args(Kind) for role in get_args(Role)):
            if samples := self._counts[f"{group}_samples"]:
                found[f"{group}_mean_tokens"] = self._counts[f"{group}_tokens"] / samples
        return found
