"""A checkpoint on a vLLM server of its own whose weights never change: the frozen designer.

It is not on the bus, so no role updates it or sends it episodes. It is started without a weight-transfer
engine and without the routes of an update, and a token that carries a version label, which only an update can
set, is refused.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import msgspec
import structlog

from bus.concurrency import flat_task_group
from bus.messages import ServerLost, ServerServing
from engine import models
from engine.config import Config
from engine.inference.completion import Completion, InferenceError
from engine.inference.pool import InferencePool
from engine.inference.process import Ended, ServerFailed, external_server, serve
from engine.inference.vllm import CONTROL_SECONDS, VllmClient, open_session
from engine.inference.vllm_schema import UNLABELLED

PROBE_SECONDS = 15.0
_FAILED_STARTS = 3
_LONGEST_BACKOFF = 60.0
_NAME = "frozen"
_NO_UPDATES = {"VLLM_SERVER_DEV_MODE": "0"}

log = structlog.get_logger("spade.inference")

Opens = Callable[[], AbstractAsyncContextManager[tuple[VllmClient, Ended]]]


def config_of(config: Config) -> Config:
    """Return the recipe as the frozen server sees it: ``[designer.frozen]`` over model and ``[server]``."""
    frozen, server = config.designer.frozen, config.server
    replace = msgspec.structs.replace
    return replace(
        config,
        model=replace(config.model, path=frozen.path or config.model.path),
        server=replace(
            server,
            count=1,
            devices=frozen.devices,
            urls=(),
            port=frozen.port,
            args=server.args | frozen.args,
            environment=server.environment | frozen.environment | _NO_UPDATES,
            weights="file",
            max_concurrency=config.designer.concurrency * config.designer.designs_per_ticket,
        ),
    )


class FrozenServer:
    """One frozen server, restarted when it ends or makes no progress. Use :func:`open_frozen`.

    ``opens`` yields a healthy client and a coroutine function that waits for the server's end. Requests go
    through an inference pool with this one server.
    """

    def __init__(self, opens: Opens, *, request_seconds: float, max_concurrency: int) -> None:
        self._opens, self._request_seconds = opens, request_seconds
        self._pool = InferencePool(
            max_concurrency=max_concurrency, request_seconds=request_seconds, updated=False
        )
        self._started = anyio.Event()
        self._starts = 0
        self.url = ""

    async def generate(self, prompt: Sequence[int], **request: Any) -> Completion:
        """Sample one continuation (:meth:`InferencePool.generate`). The first start counts to no deadline.

        Raises Thawed when the weights are not those of the start.
        """
        await self._started.wait()
        return await self._pool.generate(prompt, **request)

    def waiting(self, keys: Container[str]) -> int:
        """Return how many requests of ``keys`` wait for a place."""
        return self._pool.waiting(keys)

    def statistics(self) -> dict[str, float]:
        """Return the gauges of the pool, and the number of starts."""
        return self._pool.statistics() | {"starts": float(self._starts)}

    async def keep(self) -> None:
        """Keep the server up until cancelled. Raises SpadeError when it does not start (again)."""
        failed = 0  # starts in a row without an answer
        async with self._pool, self._pool.probing():
            while True:
                answers = self._pool.statistics()["requests"]
                try:
                    async with self._opens() as (client, ended):
                        await self._serve(client, ended)
                except (ServerFailed, InferenceError) as failure:
                    error = failure
                failed = 0 if self._pool.statistics()["requests"] > answers else failed + 1
                if not self._starts or failed >= _FAILED_STARTS:
                    raise error
                log.warning("frozen_restart", reason=error.what)
                await anyio.sleep(min(_LONGEST_BACKOFF, 2.0**failed))

    async def _serve(self, client: VllmClient, ended: Ended) -> None:
        """Offer the server to the pool while it is up. Raises ServerFailed when it is not any more."""
        self._starts += 1
        self.url, epoch = client.url, str(self._starts)
        self._pool.apply(
            ServerServing(
                server=_NAME, epoch=epoch, url=client.url, version=UNLABELLED, canary_error=0.0, seconds=0.0
            )
        )
        self._started.set()
        reason = await self._until_failed(client, ended)
        self._pool.apply(ServerLost(server=_NAME, epoch=epoch, reason=reason))
        raise ServerFailed(reason, where="designer.frozen")

    async def _until_failed(self, client: VllmClient, ended: Ended) -> str:
        """Return the reason when the server has ended, or does not sample a token in time (I10)."""
        reasons: list[str] = []

        async def watch(wait: Callable[[], Awaitable[str]]) -> None:
            reasons.append(await wait())
            tasks.cancel_scope.cancel()

        async def stuck() -> str:
            while True:
                await anyio.sleep(PROBE_SECONDS)
                try:
                    await client.probe(deadline=max(CONTROL_SECONDS, self._request_seconds / 2))
                except InferenceError as error:
                    return f"it makes no progress: {error.what}"

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch, ended)
            tasks.start_soon(watch, stuck)
        return reasons[0]


@asynccontextmanager
async def open_frozen(config: Config, directory: Path, *, name: str) -> AsyncIterator[FrozenServer]:
    """Yield the frozen server of a recipe, started under ``directory`` (a run's) or external.

    It starts in the background; requests wait for it. ``name`` is that of its log. Raises ConfigError for a
    model that cannot be used, SpadeError when the server does not start.
    """
    frozen, server = config.designer.frozen, config.server
    async with open_session() as session, flat_task_group() as tasks:
        opens: Opens = partial(_started, config_of(config), directory, name, session)
        if frozen.url:
            opens = partial(
                external_server, frozen.url, session, seconds=server.start_seconds, key="designer.frozen.url"
            )
        kept = FrozenServer(
            opens,
            request_seconds=server.request_seconds,
            max_concurrency=config_of(config).server.max_concurrency,
        )
        tasks.start_soon(kept.keep)
        yield kept
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def _started(
    config: Config, directory: Path, name: str, session: aiohttp.ClientSession
) -> AsyncIterator[tuple[VllmClient, Ended]]:
    model = await anyio.to_thread.run_sync(models.resolve, config, directory)
    log_path = directory / "logs" / f"{name}.log"
    async with serve(config, model, index=0, log_path=log_path, session=session, updates=False) as process:
        yield VllmClient(process.url, session), process.wait
