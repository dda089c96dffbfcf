"""A sampled completion, and the errors of servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray

from bus.messages import Span
from engine.errors import SpadeError

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled continuation of T tokens.

    ``tokens`` (T,) include the stop token when ``finish`` is ``stop``; ``logprobs`` (T,) are those of the
    behaviour policy at the temperature of the request; ``spans`` cover [0, T) without gap and carry the
    version of the weights that sampled each token. ``experts`` (positions, layers, top-k) are those of the
    tokens of the context from the first one asked for to the last but one, where they were asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    spans: tuple[Span, ...]
    finish: Finish
    experts: NDArray[Any] | None = None


class InferenceError(SpadeError):
    """A server did not do as requested."""


class ServerGone(InferenceError):
    """The connection failed or the server's engine is dead: another server may answer."""


class ServerStuck(InferenceError):
    """No answer within the deadline."""


class ServerRefused(InferenceError):
    """The server answered with an error: the same request would fail again, here or elsewhere."""


class InferenceUnavailable(InferenceError):
    """No server could answer within the deadline (an ``infra`` failure)."""
