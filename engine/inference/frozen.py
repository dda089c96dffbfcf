"""A checkpoint on a vLLM server of its own whose weights never change: the frozen designer.

It is not on the bus, so no role updates it or sends it episodes. It is started without a weight-transfer
engine and without the routes of an update, and a token that carries a version label, which only an update can
set, is refused.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
import anyio
import msgspec
import structlog

from bus.concurrency import flat_task_group
from engine import models
from engine.config import Config, SamplingConfig
from engine.errors import SpadeError
from engine.inference.completion import (
    Completion,
    InferenceError,
    InferenceUnavailable,
    ServerGone,
    ServerStuck,
)
from engine.inference.process import Ended, ServerFailed, external_server, serve
from engine.inference.vllm import CONTROL_SECONDS, VllmClient, open_session
from engine.inference.vllm_schema import UNLABELLED

PROBE_SECONDS = 15.0
_FAILED_STARTS = 3
_LONGEST_BACKOFF = 60.0
_PAUSE = 0.2
_NO_UPDATES = {"VLLM_SERVER_DEV_MODE": "0"}

log = structlog.get_logger("spade.inference")

Opens = Callable[[], AbstractAsyncContextManager[tuple[VllmClient, Ended]]]


class Thawed(SpadeError):
    """A frozen server answers with other weights."""


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

    ``opens`` yields a healthy client and a coroutine function that waits for the server's end.
    """

    def __init__(self, opens: Opens, *, request_seconds: float) -> None:
        self._opens, self._request_seconds = opens, request_seconds
        self._client: VllmClient | None = None
        self._changed = anyio.Event()
        self._counts: Counter[str] = Counter()
        self._in_flight = 0

    @property
    def url(self) -> str:
        """The root URL of the server, "" while it is not up."""
        return self._client.url if self._client else ""

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: SamplingConfig,
        seed: int | None,
        key: str,
        stop_token_ids: Sequence[int],
        deadline: float | None = None,
    ) -> Completion:
        """Sample one continuation; ``deadline`` is in seconds and covers a restart, not the first start.

        ``seed`` is not sent (see ``InferencePool``), and ``key`` is not used.

        Raises InferenceUnavailable, ServerRefused, and Thawed when the weights are not those of the start.
        """
        seconds = self._request_seconds if deadline is None else deadline
        if not self._counts["starts"]:
            await self._up(math.inf)  # the first start has a deadline of its own
        end = anyio.current_time() + seconds
        last = "it is not up"
        self._in_flight += 1
        try:
            while (left := end - anyio.current_time()) > 0:
                client = await self._up(end)
                if client is None:
                    break
                self._counts["requests"] += 1
                try:
                    found = await client.generate(
                        prompt, sampling, deadline=left, stop_token_ids=stop_token_ids
                    )
                except (ServerGone, ServerStuck) as error:
                    last = str(error)
                    self._counts["failures"] += 1
                    await anyio.sleep(_PAUSE)
                else:
                    return self._checked(found)
        finally:
            self._in_flight -= 1
        raise InferenceUnavailable(f"the frozen server gave no answer in {seconds:.1f} s: {last}")

    def statistics(self) -> dict[str, float]:
        """Gauges: whether it is up, requests in flight, tokens, failures, restarts."""
        return {"up": float(self._client is not None), "in_flight": float(self._in_flight), **self._counts}

    async def keep(self) -> None:
        """Keep the server up until cancelled. Raises SpadeError when it does not start (again)."""
        failed = 0  # starts in a row without an answer
        while True:
            answers = self._counts["answers"]
            try:
                async with self._opens() as (client, ended):
                    self._set(client)
                    raise ServerFailed(await self._until_failed(client, ended), where="designer.frozen")
            except (ServerFailed, InferenceError) as failure:
                error = failure
            finally:
                self._set(None)
            failed = 0 if self._counts["answers"] > answers else failed + 1
            if not self._counts["starts"] or failed >= _FAILED_STARTS:
                raise error
            self._counts["restarts"] += 1
            log.warning("frozen_restart", reason=error.what)
            await anyio.sleep(min(_LONGEST_BACKOFF, 2.0**failed))

    def _set(self, client: VllmClient | None) -> None:
        self._client = client
        self._counts["starts"] += client is not None
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def _up(self, end: float) -> VllmClient | None:
        """Return the client, None when the server is not up in time."""
        with anyio.move_on_at(end):
            while self._client is None:
                await self._changed.wait()
        return self._client

    def _checked(self, completion: Completion) -> Completion:
        self._counts["answers"] += 1
        self._counts["tokens"] += len(completion.tokens)
        if any(span.version != UNLABELLED for span in completion.spans):
            raise Thawed(
                "the frozen server answers with weights that were pushed into it",
                where="designer.frozen.url",
                remedy="Name a server that no run updates, or leave url empty: then one is started.",
            )
        return completion

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
        kept = FrozenServer(opens, request_seconds=server.request_seconds)
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
