"""Watches one server of the pool: progress, recovery, congestion."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import anyio
import structlog

from engine.inference.completion import InferenceError, ServerStuck
from engine.inference.server_set import PooledServer, Roster

_WATCH_SECONDS = 2.0
_WAITING, _PREEMPTIONS = "vllm:num_requests_waiting", "vllm:num_preemptions_total"
_CACHE_USAGE, _FULL = "vllm:kv_cache_usage_perc", 0.9
_UPDATE_PATIENCE = 4

log = structlog.get_logger("spade.inference")


class HealthProber:
    """Probes a server whose breaker is open or that makes no progress, and cuts its limit on congestion.

    A probe is a one-token generation with the deadline ``stuck_seconds`` (invariant I10). A few failures are
    ignored while the server is updated, because its role watches the update. ``announce`` is called when the
    server may get requests again.
    """

    def __init__(
        self, server: PooledServer, roster: Roster, announce: Callable[[], None], *, stuck_seconds: float
    ) -> None:
        self._server, self._roster, self._announce = server, roster, announce
        self._stuck_seconds = stuck_seconds
        self._watch_seconds = min(_WATCH_SECONDS, stuck_seconds / 2)
        self._forgiven = 0
        self._preemptions: float | None = None

    async def run(self) -> None:
        """Watch until the server's ``watch`` scope is cancelled."""
        server = self._server
        with server.watch:
            answers, since = server.answers, anyio.current_time()
            while True:
                await anyio.sleep(self._watch_seconds)
                now = anyio.current_time()
                if server.answers != answers or not server.load:
                    answers, since, self._forgiven = server.answers, now, 0
                retry_at = server.breaker.retry_at
                if (retry_at is not None and now >= retry_at) or now - since >= self._stuck_seconds:
                    await self._probe()
                    answers, since = server.answers, anyio.current_time()
                elif server.breaker.closed and server.load:
                    await self._observe()

    async def _probe(self) -> None:
        server = self._server
        try:
            version = await server.client.probe(deadline=self._stuck_seconds)
        except InferenceError as error:
            if self._forgiven < _UPDATE_PATIENCE and await self._updating():
                self._forgiven += 1
            elif server.breaker.trip(anyio.current_time()):
                log.warning("server_stuck", server=server.name, reason=str(error))
                self._roster.suspend(server)
            return
        self._forgiven = 0
        if server.breaker.retry_at is not None:
            self._roster.probed(server, version)
            self._announce()

    async def _updating(self) -> bool:
        """Return whether the server makes no progress because it loads new weights.

        During the load it may not be able to answer; then it counts whether newer weights were published.
        """
        try:
            return await self._server.client.paused(deadline=self._stuck_seconds)
        except ServerStuck:
            return self._roster.behind(self._server)
        except InferenceError:
            return False

    async def _observe(self) -> None:
        """Cut the limit when the server preempts or queues, except for preemptions by its own update."""
        server = self._server
        try:
            waiting, preemptions = congestion(await server.client.metrics(deadline=self._stuck_seconds))
        except InferenceError as error:
            log.debug("server_metrics_failed", server=server.name, reason=str(error))
            return
        more = self._preemptions is not None and preemptions > self._preemptions
        if (waiting > 0 or more) and not self._roster.behind(server):
            server.limit.congested(in_flight=server.load)
        self._preemptions = preemptions


def congestion(metrics: str) -> tuple[float, float]:
    """Return (requests that wait for cache now, preemptions so far), summed over engines.

    ``metrics`` is vLLM's Prometheus text; series that are missing or unreadable count as zero. Requests that
    wait while the cache has room wait for the prefill of others, as after every burst: fewer requests would
    only make the server slower, so these do not count.
    """
    usage = _values(metrics, _CACHE_USAGE)
    waiting = sum(_values(metrics, _WAITING)) if max(usage, default=1.0) >= _FULL else 0.0
    return waiting, sum(_values(metrics, _PREEMPTIONS))


def _values(metrics: str, name: str) -> list[float]:
    found = []
    for line in metrics.splitlines():
        if line.startswith(name) and line[len(name) : len(name) + 1] in ("{", " "):
            with suppress(ValueError):
                found.append(float(line.rsplit(" ", 1)[1]))
    return found
