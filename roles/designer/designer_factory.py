"""Opens the author of designs that a recipe names (``designer.kind``)."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import msgspec

from engine import models
from engine.errors import ConfigError
from engine.inference.endpoint import Endpoint, key_of, open_endpoint
from engine.inference.frozen import config_of, open_frozen
from engine.inference.spending import run_total
from roles.designer.design_backends import Author, EndpointAuthor, PlainText, PolicyAuthor, TokenAuthor
from roles.designer.environment_pool import Programs, read
from roles.designer.prompt import PromptWriter

if TYPE_CHECKING:
    from engine.config import Config
    from engine.config import EndpointConfig as EndpointSettings
    from engine.inference.tokens import ChatTokens
    from roles.base import RoleContext

_BUILT = (models.WARMSTART, models.PACKAGE)


@asynccontextmanager
async def open_designer(
    context: RoleContext, chat: ChatTokens, endpoint: Endpoint | None
) -> AsyncIterator[Author | Programs]:
    """Yield the author of designs; requests to a frozen one wait until its server has started.

    Raises ConfigError for a missing model or directory, SpadeError when a server does not start.
    """
    config, designer = context.config, context.config.designer
    match designer.kind:
        case "frozen":
            name = f"{context.instance}-frozen"
            async with open_frozen(config, context.directory, name=name) as server:
                yield TokenAuthor(server, chat, designer.sampling, config.model.max_model_len)
        case "external":
            assert endpoint is not None
            room = designer.external.context_tokens
            yield EndpointAuthor(endpoint, PlainText(chat), designer.sampling, room)
        case "pool":
            yield await anyio.to_thread.run_sync(Programs.open, designer.pool)
        case _:
            pool = context.shared["pool"]
            yield PolicyAuthor(pool, chat, designer.sampling, config.model.max_model_len)


@asynccontextmanager
async def open_external(context: RoleContext) -> AsyncIterator[Endpoint | None]:
    """Yield the external endpoint for designs, hints or both (one rate limit, one budget); None without one.

    Raises ConfigError for a missing key.
    """
    designer = context.config.designer
    if "external" not in (designer.kind, designer.hint_writer):
        yield None
        return
    settings = designer.external
    add = run_total(context.bus, account(settings)) if settings.max_cost else None
    async with open_endpoint(settings, add) as endpoint:
        yield endpoint


def account(settings: EndpointSettings) -> str:
    """Return the key in the state bucket of the costs of an endpoint in this run."""
    name = f"{settings.base_url}\n{settings.model}".encode()
    return f"designer.spent.{hashlib.blake2b(name, digest_size=8).hexdigest()}"


def check_designer(config: Config) -> None:
    """Check before the start that the designer's key, model or programs exist. Raises ConfigError."""
    designer = config.designer
    if designer.hint_writer == "external":
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


def prompts_for(config: Config, chat: ChatTokens) -> PromptWriter:
    """Return the writer of design prompts.

    A model with token ids gets the ids of its chat format; an endpoint gets plain text, within its own
    context.
    """
    if config.designer.kind != "external":
        return PromptWriter(config, chat)
    model = msgspec.structs.replace(config.model, max_model_len=config.designer.external.context_tokens)
    return PromptWriter(msgspec.structs.replace(config, model=model), PlainText(chat))
