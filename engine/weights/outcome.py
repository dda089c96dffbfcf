"""How bringing a version into a server may end."""

from __future__ import annotations

from dataclasses import dataclass

from engine.inference.completion import InferenceError


class UpdateRefused(InferenceError):
    """The new weights were refused (missing file, wrong digest, wrong names): the old ones serve on."""


class FetchFailed(InferenceError):
    """The new weights could not be fetched this time: the old ones serve on, and it may be tried again."""


class ServerBroken(InferenceError):
    """The server's weights are unknown or wrong: it must be restarted before it may serve."""


@dataclass(frozen=True)
class Updated:
    """``canary_error`` is the largest absolute difference of a canary token's log-prob from the learner's;
    ``paused`` and ``seconds`` are the time without sampling and the time of the whole operation.
    """

    version: int
    canary_error: float
    paused: float
    seconds: float
    attempts: int
