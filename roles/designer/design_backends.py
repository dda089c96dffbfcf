"""Authors of designs: the policy, a frozen checkpoint, or an endpoint. A prompt in, a reply out.

Only the policy's replies are trained. A pool of programs is no author
(:mod:`roles.designer.environment_pool`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from bus.messages import Segment
from engine.inference.endpoint import EndpointRefused
from engine.inference.replies import visible_reply
from engine.inference.tokens import SegmentBuilder

if TYPE_CHECKING:
    from engine.config import SamplingConfig
    from engine.inference.completion import Completion
    from engine.inference.endpoint import Endpoint
    from engine.inference.tokens import ChatTokens


@dataclass(frozen=True)
class DesignReply:
    """An author's reply and the reason of its end.

    ``segments`` are its tokens with their context; ``turns`` is the conversation as texts up to and with the
    reply, where there are no tokens. ``refusal`` is the reason of an author that refuses to write.
    ``thought_open`` is true when the prompt ended inside a thought.
    """

    text: str
    finish: str
    segments: tuple[Segment, ...] = ()
    turns: tuple[str, ...] = ()
    refusal: str = ""
    thought_open: bool = False

    @property
    def visible(self) -> str:
        """The text outside reasoning."""
        return visible_reply(self.text, thought_open=self.thought_open)


class Author(Protocol):
    """Writes designs. ``trained`` tells whether the learner may train on its replies."""

    trained: ClassVar[bool]

    async def write(self, prompt: Sequence[int], *, seed: int, key: str) -> DesignReply:
        """Answer a design prompt. Raises InferenceError."""

    async def mend(self, before: DesignReply, message: str, *, seed: int, key: str) -> DesignReply | None:
        """Answer ``message`` after ``before`` in the same conversation; None when it does not fit."""

    def statistics(self) -> dict[str, float]:
        """Return the author's own gauges, apart from those of the role."""


class Generates(Protocol):
    """A source of sampled tokens: the inference pool, or a frozen server."""

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: SamplingConfig,
        seed: int | None,
        key: str,
        stop_token_ids: Sequence[int],
        deadline: float | None = None,
    ) -> Completion: ...


class TokenAuthor:
    """A model with token ids in and out. ``room`` is the length of its context.

    A reply to a repair message is a segment of its own: its context, with the failed program, carries no
    loss. (In the public implementation the first turn earns the mended program's reward.)
    """

    trained: ClassVar[bool] = False

    def __init__(self, source: Generates, chat: ChatTokens, sampling: SamplingConfig, room: int) -> None:
        self._source, self._chat, self._sampling = source, chat, sampling
        self._room = room - sampling.max_tokens

    async def write(self, prompt: Sequence[int], *, seed: int, key: str) -> DesignReply:
        """Sample one reply to ``prompt``. Raises InferenceError."""
        completion = await self._source.generate(
            prompt, sampling=self._sampling, seed=seed, key=key, stop_token_ids=self._chat.stop_token_ids
        )
        segments = SegmentBuilder()
        segments.prompt(prompt)
        segments.completion(completion)
        return DesignReply(
            self._chat.decode(completion.tokens),
            completion.finish,
            segments=tuple(segments.segments()),
            thought_open=self._chat.opens_thought(prompt),
        )

    async def mend(self, before: DesignReply, message: str, *, seed: int, key: str) -> DesignReply | None:
        """Sample an answer to ``message``, on top of the tokens of ``before``.

        Where the chat template rewrites earlier turns, or the reply was cut off, the message starts a new
        conversation: it contains the program and its fault.
        """
        bridge = self._chat.bridge(message) if before.finish == "stop" and before.segments else None
        if bridge is None:
            prompt = list(self._chat.first(message))
        else:
            asked = np.frombuffer(before.segments[-1].tokens, "<i4").tolist()
            close = self._chat.close()  # another stop token than the template's may have ended the reply
            prompt = [*asked, *(() if asked[-1] in close else close), *bridge]
        return await self.write(prompt, seed=seed, key=key) if len(prompt) <= self._room else None

    def statistics(self) -> dict[str, float]:
        """Return the gauges of the author's own server, if it has one."""
        statistics = getattr(self._source, "statistics", None)
        return dict(statistics()) if statistics is not None and not self.trained else {}


class PolicyAuthor(TokenAuthor):
    """The policy that is trained, whatever version its servers answer with."""

    trained: ClassVar[bool] = True


class EndpointAuthor:
    """A model behind an OpenAI-compatible endpoint. Prompts are ids of plain text (:class:`PlainText`)."""

    trained: ClassVar[bool] = False

    def __init__(self, endpoint: Endpoint, chat: PlainText, sampling: SamplingConfig, room: int) -> None:
        self._endpoint, self._chat, self._sampling = endpoint, chat, sampling
        self._room = room - sampling.max_tokens

    async def write(self, prompt: Sequence[int], *, seed: int, key: str) -> DesignReply:
        """Ask the endpoint; a refusal of the prompt is an answer.

        Raises InferenceError, EndpointMisused or EndpointSpent.
        """
        return await self._ask((self._chat.decode(prompt),), seed)

    async def mend(self, before: DesignReply, message: str, *, seed: int, key: str) -> DesignReply | None:
        """Ask the endpoint with the whole conversation."""
        turns = (*before.turns, message)
        if len(self._chat.encode("\n".join(turns))) > self._room:
            return None
        return await self._ask(turns, seed)

    async def _ask(self, turns: tuple[str, ...], seed: int) -> DesignReply:
        try:
            answer = await self._endpoint.write(turns, sampling=self._sampling, seed=seed)
        except EndpointRefused as error:
            return DesignReply("", "refused", turns=turns, refusal=error.what)
        return DesignReply(answer.text, answer.finish, turns=(*turns, answer.text))

    def statistics(self) -> dict[str, float]:
        """Return no gauges: the endpoint is shared with the hint writer and counted once."""
        return {}


class PlainText:
    """A chat format for prompts that are plain text: the ids of the text and nothing else."""

    def __init__(self, chat: ChatTokens) -> None:
        self._chat = chat
        self.stop_token_ids = chat.stop_token_ids

    def first(self, content: str, system: str | None = None) -> list[int]:
        """Return the ids of the content, after the system message if there is one."""
        return self.encode(content if system is None else f"{system}\n\n{content}")

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``."""
        return self._chat.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, none of which is a special token."""
        return self._chat.decode(ids)
