"""A look at the servers that a run is to adopt, before it starts anything."""

from __future__ import annotations

from engine.config import Config
from engine.errors import ConfigError
from engine.inference.completion import ServerGone, ServerRefused, ServerStuck
from engine.inference.vllm import VllmClient, open_session

_SECONDS = 5.0  # of a question; who is slow is waited for by its role


async def check_adopted(config: Config) -> None:
    """Ask each of ``server.urls``: is it there, is it vLLM, does it let weights be loaded, take the context?

    A server that listens but is not ready yet passes: its role waits for it (``server.start_seconds``).
    Raises ConfigError that names the URL and what to do.
    """
    if not config.server.urls or "server" not in config.run.roles:
        return
    async with open_session() as session:
        for url in config.server.urls:
            try:
                await _ask(VllmClient(url, session), config)
            except ServerStuck:
                continue
            except ServerGone as error:
                if not _absent(error):
                    continue
                raise ConfigError(
                    f"server.urls: nothing answers at {url} ({error.what}).",
                    remedy="Start that server first, or take it out of server.urls. "
                    "`spade run RECIPE --dry-run` shows the command line that it needs.",
                ) from error


def _absent(error: ServerGone) -> bool:
    """Whether no connection came about, as opposed to an answer that says wait."""
    return isinstance(error.__cause__, OSError)


async def _ask(client: VllmClient, config: Config) -> None:
    try:
        await client.health(deadline=_SECONDS)
    except ServerRefused as error:
        raise ConfigError(
            f"server.urls: what answers at {client.url} is no vLLM server "
            f"({error.what.partition(': <')[0][:100]}).",
            remedy="Give the root of one, such as http://127.0.0.1:8000.",
        ) from error
    _, length = await client.model(deadline=_SECONDS)
    if length and length < config.model.max_model_len:
        raise ConfigError(
            f"server.urls: {client.url} takes {length} tokens of prompt and completion together, "
            f"model.max_model_len = {config.model.max_model_len}.",
            remedy="Start it with --max-model-len, or lower model.max_model_len.",
        )
    if config.adapters:
        return
    try:
        await client.version(deadline=_SECONDS)
    except ServerRefused as error:
        raise ConfigError(
            f"server.urls: {client.url} lets nobody load weights ({error.what}).",
            remedy="Start it with VLLM_SERVER_DEV_MODE=1 in its environment and the flags that "
            "`spade run RECIPE --dry-run` shows.",
        ) from error
