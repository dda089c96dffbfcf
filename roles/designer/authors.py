"""Authors of designs: the policy, a frozen checkpoint, or an endpoint. A prompt in, a reply out.

:func:`open_designer` opens the one that a recipe names (``designer.kind``). Only the policy's replies are
trained. A pool of programs is no author (:mod:`roles.designer.environment_pool`).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio
import msgspec

from bus.messages import Segment
from engine import models
from engine.errors import ConfigError
from engine.inference.endpoint import Endpoint, EndpointRefused, key_of, open_endpoint
from engine.inference.frozen import config_of, open_frozen
from engine.inference.replies import visible_reply
from engine.inference.spending import run_total
from engine.inference.tokens import SegmentBuilder
from roles.designer.environment_pool import Programs, read
from roles.designer.prompt import PlainText, PromptWriter

if TYPE_CHECKING:
    from engine.config import Config, EndpointConfig, SamplingConfig
    from engine.inference.frozen import FrozenServer
    from engine.inference.pool import InferencePool
    from engine.inference.tokens import ChatTokens
    from roles.base import RoleContext

_BUILT = (models.WARMSTART, models.PACKAGE)


@dataclass(frozen=True)
class DesignReply:
    """An author's reply and the reason of its end.

    ``segments`` are its tokens with their context, if it has any. ``refusal`` is the reason of an author that
    refuses to write. ``thought_open`` is true when the prompt ended inside a thought.
    """

    text: str
    finish: str
    segments: tuple[Segment, ...] = ()
    refusal: str = ""
    thought_open: bool = False

    @property
    def visible(self) -> str:
        """The text outside reasoning."""
        return visible_reply(self.text, thought_open=self.thought_open)


class Author(Protocol):
    """Writes designs. ``trained`` tells whether the learner may train on its replies."""

    trained: bool

    async def write(self, prompt: Sequence[int], *, seed: int, key: str) -> DesignReply:
        """Answer a design prompt. Raises InferenceError."""

    def statistics(self) -> dict[str, float]:
        """Return the author's own gauges, apart from those of the role."""


class TokenAuthor:
    """A model with token ids in and out: the policy, which is ``trained``, or a frozen checkpoint."""

    def __init__(
        self,
        source: InferencePool | FrozenServer,
        chat: ChatTokens,
        sampling: SamplingConfig,
        *,
        trained: bool = False,
    ) -> None:
        self._source, self._chat, self._sampling, self.trained = source, chat, sampling, trained

    async def write(self, prompt: Sequence[int], *, seed: int, key: str) -> DesignReply:
        """Sample one reply to ``prompt``. Raises InferenceError."""
        completion = await self._source.generate(
            prompt,
            sampling=self._sampling,
            key=key,
            stop_token_ids=self._chat.stop_token_ids,
            experts_from=0,
        )
        segments = SegmentBuilder()
        segments.prompt(prompt)
        segments.completion(completion)
        return DesignReply(
            self._chat.decode(completion.tokens),
            completion.finish,
            segments=segments.segments(),
            thought_open=self._chat.opens_thought(prompt),
        )

    def statistics(self) -> dict[str, float]:
        """Return the gauges of the author's own server, if it has one."""
        return {} if self.trained else dict(self._source.statistics())


class EndpointAuthor:
    """A model behind an OpenAI-compatible endpoint. Prompts are ids of plain text (:class:`PlainText`)."""

    trained = False

    def __init__(self, endpoint: Endpoint, chat: PlainText, sampling: SamplingConfig) -> None:
        self._endpoint, self._chat, self._sampling = endpoint, chat, sampling

    async def write(self, prompt: Sequence[int], *, seed: int, key: str) -> DesignReply:
        """Ask the endpoint; a refusal of the prompt is an answer.

        Raises InferenceError, EndpointMisused or EndpointSpent.
        """
        turns = (self._chat.decode(prompt),)
        try:
            answer = await self._endpoint.write(turns, sampling=self._sampling, seed=seed)
        except EndpointRefused as error:
            return DesignReply("", "refused", refusal=error.what)
        return DesignReply(answer.text, answer.finish)

    def statistics(self) -> dict[str, float]:
        """Return no gauges: the endpoint is shared with the hint writer and counted once."""
        return {}


def author_of(
    kind: str, sampling: SamplingConfig, chat: ChatTokens, pool: InferencePool, endpoint: Endpoint | None
) -> Author:
    """Return the author of a setting: the endpoint for "external", else the policy."""
    if kind != "external":
        return TokenAuthor(pool, chat, sampling, trained=True)
    assert endpoint is not None
    return EndpointAuthor(endpoint, PlainText(chat), sampling)


@asynccontextmanager
async def open_author(
    name: str,
    kind: str,
    sampling: SamplingConfig,
    context: RoleContext,
    chat: ChatTokens,
    endpoint: Endpoint | None,
) -> AsyncIterator[Author]:
    """Yield the author of a setting, which may be "frozen", too: its server is called ``name``.

    Requests to a frozen one wait until its server has started. Raises SpadeError when it does not start.
    """
    if kind != "frozen":
        yield author_of(kind, sampling, chat, context.shared["pool"], endpoint)
        return
    name = f"{context.instance}-{name}"
    async with open_frozen(context.config, context.directory, name=name) as server:
        yield TokenAuthor(server, chat, sampling)


@asynccontextmanager
async def open_designer(
    context: RoleContext, chat: ChatTokens, endpoint: Endpoint | None
) -> AsyncIterator[Author | Programs]:
    """Yield the author of designs, or a pool of programs. Raises as :func:`open_author`, and ConfigError."""
    designer = context.config.designer
    if designer.kind == "pool":
        yield await anyio.to_thread.run_sync(Programs.open, designer.pool)
        return
    sampling = designer.sampling
    async with open_author("frozen", designer.kind, sampling, context, chat, endpoint) as author:
        yield author


@asynccontextmanager
async def open_external(context: RoleContext) -> AsyncIterator[Endpoint | None]:
    """Yield the external endpoint for all that asks it (one rate limit, one budget); None without one.

    Raises ConfigError for a missing key.
    """
    designer = context.config.designer
    if "external" not in (designer.kind, designer.hint_writer, designer.judge):
        yield None
        return
    settings = designer.external
    add = run_total(context.bus, account(settings)) if settings.max_cost else None
    async with open_endpoint(settings, add) as endpoint:
        yield endpoint


def account(settings: EndpointConfig) -> str:
    """Return the key in the state bucket of the costs of an endpoint in this run."""
    name = f"{settings.base_url}\n{settings.model}".encode()
    return f"designer.spent.{hashlib.blake2b(name, digest_size=8).hexdigest()}"


def check_designer(config: Config) -> None:
    """Check before the start that the designer's key, model or programs exist. Raises ConfigError."""
    designer = config.designer
    if "external" in (designer.hint_writer, designer.judge):
        key_of(designer.external)
    match designer.kind:
        case "external":
            key_of(designer.external)
        case "pool":
            if next(read(designer.pool.source), None) is None:
                Programs.open(designer.pool)
        case "frozen" if designer.frozen.path and not designer.frozen.path.startswith(_BUILT):
            try:
                models.resolve(config_of(config), Path())
            except ConfigError as error:
                what = f"designer.frozen.path = {designer.frozen.path!r}: {error.what}"
                raise ConfigError(what, remedy=error.remedy) from error
        case _:
            pass


def prompts_for(config: Config, chat: ChatTokens, *, external: bool) -> PromptWriter:
    """Return the writer of prompts.

    A model with token ids gets the ids of its chat format; an ``external`` endpoint gets plain text, within
    its own context. Only a policy that was warm-started on it knows the nano form.
    """
    designer, preload = config.designer, config.sandbox.preload
    if not external:
        return PromptWriter(designer, chat, context=config.model.max_model_len, preload=preload)
    if designer.prompt == "nano":
        designer = msgspec.structs.replace(designer, prompt="full")
    return PromptWriter(designer, PlainText(chat), context=designer.external.context_tokens, preload=preload)
