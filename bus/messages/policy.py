"""Facts about the policy: its versions, who serves which, how it does on held-out suites."""

from __future__ import annotations

from typing import ClassVar

from bus.messages.base import Message, register_message


@register_message
class PolicyPublished(Message, frozen=True, kw_only=True, tag="policy_published.v1"):
    """New weights: a file at ``uri`` with ``sha256`` and ``size`` in bytes.

    The canary is a prompt (int32) and the learner's log-probs of its tokens 1.. given their prefix (float32,
    one fewer than tokens). ``vocabulary`` is the number of the learner's token ids, ``tokenizer`` the SHA-256
    of what gives them their meaning; 0 and "" say nothing.
    """

    key_form: ClassVar[str] = "policy:{m.version}"
    tail_form: ClassVar[str] = "event.learner.published"
    version: int
    step: int
    uri: str
    sha256: str
    size: int
    canary_tokens: bytes
    canary_logprobs: bytes
    vocabulary: int = 0
    tokenizer: str = ""


@register_message
class ServerServing(Message, frozen=True, kw_only=True, tag="server_serving.v1"):
    """A vLLM server at ``url`` answers with ``version``.

    ``canary_error`` is the largest absolute log-prob difference from the learner's. ``epoch`` changes with
    every start of the process.
    """

    key_form: ClassVar[str] = "serving:{m.server}:{m.epoch}:{m.version}"
    tail_form: ClassVar[str] = "event.server.serving"
    server: str
    epoch: str
    url: str
    version: int
    canary_error: float
    seconds: float


@register_message
class ServerLost(Message, frozen=True, kw_only=True, tag="server_lost.v1"):
    """A vLLM server ended or was stopped; its URL must not be used any more."""

    key_form: ClassVar[str] = "lost:{m.server}:{m.epoch}"
    tail_form: ClassVar[str] = "event.server.lost"
    server: str
    epoch: str
    reason: str


@register_message
class EvaluationFinished(Message, frozen=True, kw_only=True, tag="evaluation_finished.v1"):
    """A held-out suite was played.

    ``version`` is the lowest and ``version_high`` the highest version that answered; ``stderr`` is the
    standard error of ``win``. ``overlap`` counts the accepted designs so far that repeat a program of the
    suite. The key holds the fence, the upper half of the packed version, so the same step of another learner
    process has another key.
    """

    tail_form: ClassVar[str] = "event.evaluator.finished"
    suite: str
    step: int
    version: int
    version_high: int
    episodes: int
    win: float
    stderr: float
    by_family: dict[str, float]
    seconds: float
    overlap: int = 0

    @property
    def key(self) -> str:
        fence = self.version >> 32
        return f"evaluation:{self.suite}:{self.step}{f'@{fence}' if fence else ''}"
