"""Builds the training segments of a conversation: the tokens that the model saw and those it sampled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bus.messages import Segment, Span
from engine.inference.completion import Completion


class SegmentBuilder:
    """Collects the tokens of a conversation as training segments; pure.

    ``context`` is at any time the prompt of the next completion. Call ``prompt`` for tokens of the
    environment, ``completion`` for tokens of the model, ``rewrite`` when the context is replaced as a whole.
    """

    def __init__(self) -> None:
        self._closed: tuple[Segment, ...] = ()
        self._spans: list[Span] = []
        self._sampled_to = 0
        self._before: tuple[int, list[Span], int] = (0, [], 0)
        self._reset([])

    @property
    def context(self) -> list[int]:
        """The ids the model sees next (a copy)."""
        return list(self._tokens)

    @property
    def routed(self) -> int:
        """The number of tokens of the context whose experts are known; the next completion tells the rest."""
        return sum(map(len, self._experts))

    def __len__(self) -> int:
        """Return the length of the context in tokens."""
        return len(self._tokens)

    def prompt(self, ids: Iterable[int]) -> None:
        """Append ids that were not sampled."""
        self._tokens += ids

    def completion(self, completion: Completion) -> None:
        """Append sampled ids with their log-probs and versions.

        Raises ValueError when the spans do not cover exactly the tokens.
        """
        _check_cover(completion)
        self._before = (len(self._logprobs), list(self._spans), self._sampled_to)
        offset = len(self._tokens)
        for span in completion.spans:
            start, stop = offset + span.start, offset + span.stop
            if self._spans and self._spans[-1].version == span.version and self._spans[-1].stop == start:
                start = self._spans.pop().start
            if start < stop:
                self._spans.append(Span(span.version, start, stop))
        self._tokens += completion.tokens
        self._logprobs += completion.logprobs
        if completion.experts is not None:
            self._experts.append(completion.experts)
        if completion.tokens:
            self._sampled_to = len(self._tokens)

    def withdraw(self) -> None:
        """Leave the last completion out of training: it stays in the context as a prompt."""
        start, self._spans, self._sampled_to = self._before
        del self._logprobs[start:]

    def rewrite(self, ids: Iterable[int]) -> None:
        """Replace the context: the tokens sampled so far become a closed segment."""
        self._closed = self.segments()
        self._reset(list(ids))

    def segments(self) -> tuple[Segment, ...]:
        """Return all segments that hold sampled tokens, each cut after its last sampled token."""
        if not (end := self._sampled_to):
            return self._closed
        experts = np.concatenate(self._experts)[: end - 1].tobytes() if self._experts else b""
        return (*self._closed, make_segment(self._tokens[:end], self._logprobs, self._spans, experts))

    def _reset(self, ids: list[int]) -> None:
        self._tokens: list[int] = ids
        self._logprobs: list[float] = []
        self._spans = []
        self._sampled_to = 0
        self._experts: list[NDArray[Any]] = []


def make_segment(
    tokens: Sequence[int], logprobs: Sequence[float], spans: Iterable[Span], experts: bytes = b""
) -> Segment:
    """Return a segment of ``tokens``; ``logprobs`` are those of the tokens in ``spans``, in order."""
    ids = np.asarray(tokens, dtype="<i4")
    small = not len(ids) or (ids.min() >= 0 and ids.max() <= np.iinfo(np.uint16).max)
    return Segment(
        tokens=(ids.astype("<u2") if small else ids).tobytes(),
        logprobs=np.asarray(logprobs, dtype="<f4").tobytes(),
        spans=tuple(spans),
        width=2 if small else 4,
        experts=experts,
    )


def token_ids(segment: Segment) -> list[int]:
    """Return the ids of all tokens of ``segment``."""
    return [int(token) for token in np.frombuffer(segment.tokens, segment.dtype)]


def prompt_and_reply(segments: Sequence[Segment]) -> tuple[list[int], list[int]]:
    """Return the ids of the first prompt in ``segments`` (at least one), and all ids that were sampled."""
    sampled: list[int] = []
    for segment in segments:
        ids = token_ids(segment)
        sampled += [token for span in segment.spans for token in ids[span.start : span.stop]]
    return token_ids(segments[0])[: segments[0].spans[0].start], sampled


def _check_cover(completion: Completion) -> None:
    position = 0
    for span in completion.spans:
        if span.start != position or span.stop < span.start:
            raise ValueError(f"spans {completion.spans} leave a gap at {position}")
        position = span.stop
    if not position == len(completion.tokens) == len(completion.logprobs):
        raise ValueError(
            f"{len(completion.tokens)} tokens, {len(completion.logprobs)} log-probs, spans to {position}"
        )
