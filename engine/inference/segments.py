"""Builds the training segments of a conversation: the tokens that the model saw and those it sampled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from bus.messages import Segment, Span
from engine.inference.completion import Completion


class SegmentBuilder:
    """Collects the tokens of a conversation as training segments; pure.

    ``context`` is at any time the prompt of the next completion. Call ``prompt`` for tokens of the
    environment, ``completion`` for tokens of the model, ``rewrite`` when the context is replaced as a whole.
    """

    def __init__(self) -> None:
        self._closed: list[Segment] = []
        self._reset([])

    @property
    def context(self) -> list[int]:
        """The ids the model sees next (a copy)."""
        return list(self._tokens)

    def __len__(self) -> int:
        """Return the length of the context in tokens."""
        return len(self._tokens)

    def prompt(self, ids: Iterable[int]) -> None:
        """Append ids that were not sampled."""
        self._append(list(ids), None)

    def completion(self, completion: Completion) -> None:
        """Append sampled ids with their log-probs and versions.

        Raises ValueError when the spans do not cover exactly the tokens.
        """
        _check_cover(completion)
        offset = len(self._tokens)
        for span in completion.spans:
            self._extend_span(span.version, offset + span.start, offset + span.stop)
        self._append(completion.tokens, completion.logprobs)
        if completion.tokens:
            self._sampled_to = len(self._tokens)

    def rewrite(self, ids: Iterable[int]) -> None:
        """Replace the context: the tokens sampled so far become a closed segment."""
        self._close()
        self._reset(list(ids))

    def segments(self) -> tuple[Segment, ...]:
        """Return all segments that hold sampled tokens, each cut after its last sampled token."""
        current = self._current()
        return (*self._closed, current) if current else tuple(self._closed)

    def _reset(self, ids: list[int]) -> None:
        self._tokens: list[int] = ids
        self._mask: list[int] = [0] * len(ids)
        self._logprobs: list[float] = [0.0] * len(ids)
        self._spans: list[Span] = []
        self._sampled_to = 0

    def _append(self, ids: list[int], logprobs: list[float] | None) -> None:
        self._tokens += ids
        self._mask += [0 if logprobs is None else 1] * len(ids)
        self._logprobs += [0.0] * len(ids) if logprobs is None else logprobs

    def _extend_span(self, version: int, start: int, stop: int) -> None:
        if start == stop:
            return
        if self._spans and self._spans[-1].version == version and self._spans[-1].stop == start:
            start = self._spans.pop().start
        self._spans.append(Span(version, start, stop))

    def _close(self) -> None:
        current = self._current()
        if current:
            self._closed.append(current)

    def _current(self) -> Segment | None:
        if not self._sampled_to:
            return None
        end = self._sampled_to
        return Segment(
            tokens=np.asarray(self._tokens[:end], dtype="<i4").tobytes(),
            mask=np.asarray(self._mask[:end], dtype="u1").tobytes(),
            logprobs=np.asarray(self._logprobs[:end], dtype="<f4").tobytes(),
            spans=tuple(self._spans),
        )


def prompt_and_reply(segments: Sequence[Segment]) -> tuple[list[int], list[int]]:
    """Return the ids of the first prompt in ``segments`` (at least one), and all ids that were sampled."""
    prompt = np.frombuffer(segments[0].tokens, "<i4")[: segments[0].mask.find(1)].tolist()
    sampled: list[int] = []
    for segment in segments:
        mask = np.frombuffer(segment.mask, np.uint8).astype(bool)
        sampled += np.frombuffer(segment.tokens, "<i4")[mask].tolist()
    return prompt, sampled


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
