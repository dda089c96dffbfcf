"""One pool over many vLLM servers.

Requests of one episode go to the server that holds their prefix, else to the least loaded one. A server
gets traffic only while it serves: between ``ServerServing`` and ``ServerLost`` on the bus, with a closed
breaker. When it fails or makes no progress, its requests move to another. The version of a token comes
from the spans of its completion and from nowhere else (invariant I2).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import aiohttp
import anyio
import structlog
from anyio.abc import TaskGroup

from bus.messages import Message, ServerLost, ServerServing
from engine import serving
from engine.config import Sampling
from engine.inference.completion import (
    Completion,
    InferenceError,
    InferenceUnavailable,
    ServerGone,
    ServerStuck,
)
from engine.inference.concurrency import Aimd, Breaker, Rate
from engine.inference.metrics import congestion
from engine.inference.vllm import VllmClient, open_session

if TYPE_CHECKING:
    from bus import Bus

_TAILS = ("event.server.serving", "event.server.lost")
_ATTEMPTS = 6
_AFFINITIES = 65536
_WATCH_SECONDS = 2.0

log = structlog.get_logger("spade.inference")


@dataclass(eq=False)
class _Server:
    """One server epoch and what the pool knows of it."""

    name: str
    epoch: str
    url: str
    version: int
    client: VllmClient
    limit: Aimd
    breaker: Breaker = field(default_factory=Breaker)
    load: int = 0
    answers: int = 0
    scopes: set[anyio.CancelScope] = field(default_factory=set)
    keeper: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def admits(self) -> bool:
        return self.breaker.closed and self.load < self.limit.limit

    def evict(self) -> None:
        """End every request in flight here; each moves to another server."""
        for scope in tuple(self.scopes):
            scope.cancel()


@dataclass(eq=False)
class _Waiter:
    key: str
    event: anyio.Event = field(default_factory=anyio.Event)
    server: _Server | None = None


class InferencePool:
    """Token ids in, token ids, log-probs and versions out, from whichever server is best.

    ``max_concurrency`` bounds the requests in flight on one server, ``request_seconds`` is the default
    deadline of a request, ``max_waiting`` bounds the queue before the servers. Without progress for
    ``stuck_seconds`` a server is probed, and given up when a single token does not come within as long.

    Seeds are not sent unless ``send_seeds``: batching and updates in flight make sampling irreproducible in
    any case, a generator a request costs vLLM an eighth of its speed, and vLLM 0.32 on CPU dies when the
    prefill of a seeded request is split ("CPU Generator does not use offset").
    """

    def __init__(
        self,
        *,
        max_concurrency: int,
        request_seconds: float,
        max_waiting: int = 8192,
        stuck_seconds: float | None = None,
        send_seeds: bool = False,
    ) -> None:
        self._max_concurrency = max_concurrency
        self._request_seconds = request_seconds
        self._max_waiting = max_waiting
        self._send_seeds = send_seeds
        self._stuck_seconds = stuck_seconds if stuck_seconds is not None else max(10.0, request_seconds / 4)
        self._watch_seconds = min(_WATCH_SECONDS, self._stuck_seconds / 2)
        self._servers: dict[str, _Server] = {}
        self._affinity: OrderedDict[str, str] = OrderedDict()
        self._waiters: deque[_Waiter] = deque()
        self._changed = anyio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._keepers: TaskGroup | None = None
        self._token_rate, self._request_rate = Rate(), Rate()
        self._counts = dict.fromkeys(("requests", "tokens", "failures", "moved", "refused"), 0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections. The pool may be used again afterwards."""
        session, self._session = self._session, None
        if session is not None:
            with anyio.CancelScope(shield=True):
                await session.close()

    async def watch(self, bus: Bus) -> None:
        """Follow the servers' facts on the bus and keep an eye on each server, for ever."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            known = await serving.read(bus)
            records = await stack.enter_async_context(
                bus.follow("EVENT", start=known.position + 1, tails=_TAILS)
            )
            for fact in known.facts:
                self.apply(fact)
            self._keepers = await stack.enter_async_context(anyio.create_task_group())
            try:
                for server in self._servers.values():
                    self._keepers.start_soon(self._keep, server)
                async for record in records:
                    self.apply(record.message)
            finally:
                self._keepers.cancel_scope.cancel()
                self._keepers = None

    def apply(self, message: Message) -> None:
        """Take in one fact: a server serves a version, or is lost. Other messages are ignored."""
        if isinstance(message, ServerServing):
            self._serving(message)
        elif isinstance(message, ServerLost):
            self._lost(message)

    async def ready(self, deadline: float) -> None:
        """Return as soon as a server serves. ``deadline`` is in seconds from now.

        Raises InferenceUnavailable.
        """
        with anyio.move_on_after(deadline):
            while not any(server.breaker.closed for server in self._servers.values()):
                await self._changed.wait()
            return
        raise InferenceUnavailable(f"no server served within {deadline:.0f} s", where="InferencePool.ready")

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: Sampling,
        seed: int | None,
        key: str,
        stop_token_ids: Sequence[int],
        deadline: float | None = None,
    ) -> Completion:
        """Sample one continuation. ``key`` names the episode (same key, same server while it lasts),
        ``deadline`` is in seconds from now and covers queueing and every move.

        Raises InferenceUnavailable when no server answered in time, ServerRefused when the request
        itself is at fault (such as a prompt beyond the context).
        """
        seconds = self._request_seconds if deadline is None else deadline
        end = anyio.current_time() + seconds
        last: InferenceError | None = None
        for attempt in range(_ATTEMPTS):
            if attempt and anyio.current_time() >= end:
                raise InferenceUnavailable(f"no answer in {seconds:.1f} s: {last}") from last
            server = await self._acquire(key, end, last)
            try:
                return await self._attempt(
                    server, prompt, sampling, seed if self._send_seeds else None, stop_token_ids, end
                )
            except (ServerGone, ServerStuck) as error:
                last = error
                self._counts["failures"] += 1
            finally:
                server.load -= 1
                self._dispatch()
        raise InferenceUnavailable(f"{_ATTEMPTS} attempts failed, the last one: {last}") from last

    def versions(self) -> dict[str, int]:
        """Return server name -> the newest version it is known to serve."""
        return {name: server.version for name, server in self._servers.items()}

    def statistics(self) -> dict[str, float]:
        """Gauges and counters: servers, load, limits, queue, rates over the last ten seconds, failures."""
        now = anyio.current_time()
        servers = list(self._servers.values())
        return {
            "servers": len(servers),
            "serving": sum(server.breaker.closed for server in servers),
            "in_flight": sum(server.load for server in servers),
            "limit": sum(server.limit.limit for server in servers),
            "limit_cuts": sum(server.limit.cuts for server in servers),
            "waiting": len(self._waiters),
            "tokens_per_second": self._token_rate.value(now),
            "requests_per_second": self._request_rate.value(now),
            **{name: float(count) for name, count in self._counts.items()},
        }

    async def _attempt(
        self,
        server: _Server,
        prompt: Sequence[int],
        sampling: Sampling,
        seed: int | None,
        stop_token_ids: Sequence[int],
        end: float,
    ) -> Completion:
        completion: Completion | None = None
        in_flight = server.load
        try:
            with anyio.CancelScope() as scope:
                server.scopes.add(scope)
                completion = await server.client.generate(
                    prompt,
                    sampling,
                    deadline=max(0.001, end - anyio.current_time()),
                    seed=seed,
                    stop_token_ids=stop_token_ids,
                    salt=str(server.version),
                )
        except (ServerGone, ServerStuck) as error:
            self._failed(server, error, in_flight)
            raise
        except InferenceError:
            self._counts["refused"] += 1
            raise
        finally:
            server.scopes.discard(scope)
        if completion is None:
            self._counts["moved"] += 1
            raise ServerGone("the request was moved away from a lost server", where=server.url)
        if any(span.version < 0 for span in completion.spans):
            raise ServerGone("its weights carry no version: they were never pushed", where=server.url)
        self._answered(server, completion, in_flight)
        return completion

    def _answered(self, server: _Server, completion: Completion, in_flight: int) -> None:
        now = anyio.current_time()
        server.answers += 1
        server.limit.ended(in_flight=in_flight, success=True)
        if not server.breaker.closed:
            self._announce()
        server.breaker.success()
        if completion.spans:
            server.version = max(server.version, completion.spans[-1].version)
        self._counts["requests"] += 1
        self._counts["tokens"] += len(completion.tokens)
        self._request_rate.add(now, 1)
        self._token_rate.add(now, len(completion.tokens))

    def _failed(self, server: _Server, error: InferenceError, in_flight: int) -> None:
        server.limit.ended(in_flight=in_flight, success=False)
        if isinstance(error, ServerStuck):
            server.limit.congested(in_flight=in_flight)  # slow is not dead: the keeper's probe decides
        elif server.breaker.failure(anyio.current_time()):
            log.warning("server_breaker_open", server=server.name, reason=str(error))
            server.evict()

    # Routing

    async def _acquire(self, key: str, end: float, last: InferenceError | None) -> _Server:
        """Return a server with one place taken on it; the caller gives the place back."""
        if not self._waiters and (server := self._choose(key)) is not None:
            return server
        if len(self._waiters) >= self._max_waiting:
            raise InferenceUnavailable(f"{self._max_waiting} requests wait already", where="InferencePool")
        waiter = _Waiter(key)
        self._waiters.append(waiter)
        try:
            with anyio.move_on_at(end):
                await waiter.event.wait()
        except BaseException:
            self._abandon(waiter)
            raise
        if waiter.server is not None:
            return waiter.server
        self._abandon(waiter)
        serving = sum(server.breaker.closed for server in self._servers.values())
        raise InferenceUnavailable(
            f"no place on a server before the deadline ({serving} of {len(self._servers)} answer)"
            + (f"; last failure: {last}" if last else ""),
            where="InferencePool",
        )

    def _abandon(self, waiter: _Waiter) -> None:
        with suppress(ValueError):
            self._waiters.remove(waiter)
        if waiter.server is not None:
            waiter.server.load -= 1
            self._dispatch()

    def _dispatch(self) -> None:
        """Hand free places to waiting requests, in their order."""
        while self._waiters and (server := self._choose(self._waiters[0].key)) is not None:
            waiter = self._waiters.popleft()
            waiter.server = server
            waiter.event.set()

    def _choose(self, key: str) -> _Server | None:
        bound = self._servers.get(self._affinity.get(key, ""))
        if bound is None or not bound.admits():
            open_servers = [server for server in self._servers.values() if server.admits()]
            if not open_servers:
                return None
            bound = min(open_servers, key=lambda server: server.load)
            self._affinity[key] = bound.name
            if len(self._affinity) > _AFFINITIES:
                self._affinity.popitem(last=False)
        self._affinity.move_to_end(key)
        bound.load += 1
        return bound

    # Servers

    def _serving(self, message: ServerServing) -> None:
        known = self._servers.get(message.server)
        if known is not None and known.epoch == message.epoch and known.url == message.url:
            known.version = max(known.version, message.version)
            known.breaker.success()
            self._announce()
            return
        if known is not None:
            self._drop(known)
        if self._session is None:
            self._session = open_session()
        server = _Server(
            name=message.server,
            epoch=message.epoch,
            url=message.url,
            version=message.version,
            client=VllmClient(message.url, self._session),
            limit=Aimd(self._max_concurrency, floor=min(8, self._max_concurrency)),
        )
        self._servers[message.server] = server
        if self._keepers is not None:
            self._keepers.start_soon(self._keep, server)
        self._announce()

    def _lost(self, message: ServerLost) -> None:
        server = self._servers.get(message.server)
        if server is not None and server.epoch == message.epoch:
            del self._servers[message.server]
            self._drop(server)

    def _drop(self, server: _Server) -> None:
        server.breaker.trip(anyio.current_time())
        server.keeper.cancel()
        server.evict()

    def _announce(self) -> None:
        """Wake whoever waits for a server."""
        event, self._changed = self._changed, anyio.Event()
        event.set()
        self._dispatch()

    async def _keep(self, server: _Server) -> None:
        """Probe a server that is open or makes no progress; feed its queue to the limit."""
        with server.keeper:
            answers, since = server.answers, anyio.current_time()
            preemptions: float | None = None
            while True:
                await anyio.sleep(self._watch_seconds)
                now = anyio.current_time()
                if server.answers != answers or not server.load:
                    answers, since = server.answers, now
                retry_at = server.breaker.retry_at
                if (retry_at is not None and now >= retry_at) or now - since >= self._stuck_seconds:
                    await self._probe(server)
                    answers, since = server.answers, anyio.current_time()
                elif server.breaker.closed and server.load:
                    preemptions = await self._observe(server, preemptions)

    async def _probe(self, server: _Server) -> None:
        try:
            await server.client.probe(deadline=self._stuck_seconds)
        except InferenceError as error:
            if await self._updating(server):
                return
            if server.breaker.trip(anyio.current_time()):
                log.warning("server_stuck", server=server.name, reason=str(error))
                server.evict()
            return
        if not server.breaker.closed:
            server.breaker.success()
            self._announce()

    async def _updating(self, server: _Server) -> bool:
        """Whether the server stands still because new weights are being loaded: its role watches that."""
        try:
            return await server.client.paused(deadline=self._stuck_seconds)
        except InferenceError:
            return False

    async def _observe(self, server: _Server, before: float | None) -> float | None:
        """Cut the limit when the server preempts or queues. Returns its count of preemptions so far."""
        try:
            waiting, preemptions = congestion(await server.client.metrics(deadline=self._stuck_seconds))
        except InferenceError as error:
            server.breaker.failure(anyio.current_time())
            log.debug("server_metrics_failed", server=server.name, reason=str(error))
            return before
        if waiting > 0 or (before is not None and preemptions > before):
            server.limit.congested(in_flight=server.load)
        return preemptions
