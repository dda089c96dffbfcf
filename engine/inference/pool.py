"""One pool over many vLLM servers.

Requests of one episode go to the server that holds their prefix, else to the least loaded one. A server
gets requests only while it serves a version that is recent enough (``engine.inference.server_set``). When it
fails or makes no progress, its requests move to another one. The version of a token comes from the spans of
its completion only (invariant I2). A completion is held back until its server has acknowledged all of its
versions: if the proof of a version fails, its label is wrong.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Collection, Container, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import aiohttp
import anyio
import structlog
from anyio.abc import TaskGroup

from bus.concurrency import flat_task_group
from bus.messages import Message, PolicyPublished, ServerLost, ServerServing
from engine.config import SamplingConfig
from engine.errors import SpadeError
from engine.inference.adapters import name as adapter_name
from engine.inference.completion import (
    Completion,
    InferenceError,
    InferenceUnavailable,
    ServerGone,
    ServerStuck,
)
from engine.inference.concurrency import RecentRate
from engine.inference.health_prober import HealthProber
from engine.inference.server_set import PooledServer, Roster
from engine.inference.vllm import VllmClient, open_session
from engine.inference.vllm_schema import UNLABELLED

if TYPE_CHECKING:
    from bus import Bus

_TAILS = (ServerServing.tail_form, ServerLost.tail_form, PolicyPublished.tail_form)
_ATTEMPTS = 6
_STUCK_SECONDS = (10.0, 60.0)

log = structlog.get_logger("spade.inference")


@dataclass(frozen=True)
class _Request:
    prompt: Sequence[int]
    sampling: SamplingConfig
    stop_token_ids: Sequence[int]
    key: str
    end: float
    experts_from: int | None


@dataclass(eq=False)
class _Waiter:
    key: str
    avoid: Collection[PooledServer]
    event: anyio.Event = field(default_factory=anyio.Event)
    server: PooledServer | None = None


class InferencePool:
    """Samples token ids, log-probs and versions from the best of several servers.

    ``max_concurrency`` bounds the requests in flight on one server, ``request_seconds`` is the default
    deadline of a request, ``max_waiting`` bounds the queue before the servers. Without progress for
    ``stuck_seconds`` a server is probed, and given up when a single token does not come within as long.
    ``max_lag`` bounds how many versions a server may be behind the one published last. With ``adapters``,
    the name of the run, requests name the adapter of the version that their server has announced last.
    Servers that are not ``updated`` serve weights without a version label: a label raises Thawed. With
    ``router_replay`` they return the routed experts that are asked for.
    """

    def __init__(
        self,
        *,
        max_concurrency: int,
        request_seconds: float,
        max_waiting: int = 8192,
        stuck_seconds: float | None = None,
        max_lag: int | None = None,
        adapters: str = "",
        updated: bool = True,
        router_replay: bool = False,
    ) -> None:
        self._router_replay = router_replay
        self._updated = updated
        self._request_seconds = request_seconds
        self._max_waiting = max_waiting
        self._adapters = adapters
        least, most = _STUCK_SECONDS
        self._stuck_seconds = stuck_seconds or min(most, max(least, request_seconds / 4))
        self._roster = Roster(ceiling=max_concurrency, max_lag=max_lag)
        self._waiters: deque[_Waiter] = deque()
        self._changed = anyio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._probers: TaskGroup | None = None
        self._token_rate, self._request_rate = RecentRate(), RecentRate()
        self._counts = dict.fromkeys(("requests", "tokens", "failures", "moved", "refused", "unproved"), 0)
        self._opened = self._cuts = 0  # of servers that are gone

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
        """Follow the servers' facts on the bus and watch each server, until cancelled."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.close)
            newest = await bus.last(PolicyPublished.tail_form)
            records = await stack.enter_async_context(bus.follow("EVENT", tails=_TAILS))
            if newest is not None:
                self.apply(newest.message)
            await stack.enter_async_context(self.probing())
            async for record in records:
                old = newest is not None and record.sequence <= newest.sequence
                if not (old and isinstance(record.message, PolicyPublished)):
                    self.apply(record.message)

    @asynccontextmanager
    async def probing(self) -> AsyncIterator[None]:
        """Watch each server in this context."""
        async with flat_task_group() as self._probers:
            try:
                for server in self._roster:
                    self._keep(server)
                yield
            finally:
                self._probers.cancel_scope.cancel()
                self._probers = None

    def apply(self, message: Message) -> None:
        """Take in one fact: a version is published, a server serves one, or is lost. Others are ignored."""
        if isinstance(message, PolicyPublished):
            self._roster.published(message)
            self._announce()  # a fork may bring a server within max_lag
        elif isinstance(message, ServerServing):
            self._serving(message)
        elif isinstance(message, ServerLost) and (server := self._roster.left(message)) is not None:
            self._drop(server)

    async def ready(self, deadline: float) -> None:
        """Return as soon as a server serves. ``deadline`` is in seconds from now.

        Raises InferenceUnavailable.
        """
        with anyio.move_on_after(deadline):
            while not self._roster.serving():
                await self._changed.wait()
            return
        raise InferenceUnavailable(f"no server served within {deadline:.0f} s", where="InferencePool.ready")

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: SamplingConfig,
        key: str,
        stop_token_ids: Sequence[int],
        deadline: float | None = None,
        experts_from: int | None = None,
    ) -> Completion:
        """Sample one continuation.

        ``key`` names the episode (same key, same server while it lasts); ``deadline`` is in seconds from now
        and covers queueing and every move. With router replay the answer has the experts of the tokens from
        ``experts_from`` on (None: of none). No seed is sent: batching and updates make sampling
        irreproducible anyhow, one generator per request costs vLLM an eighth of its speed, and vLLM 0.32 on
        CPU dies when the prefill of a seeded request is split ("CPU Generator does not use offset").

        Raises InferenceUnavailable when no server answered in time, ServerRefused when the request
        itself is at fault (such as a prompt beyond the context).
        """
        seconds = self._request_seconds if deadline is None else deadline
        end = anyio.current_time() + seconds
        experts_from = experts_from if self._router_replay else None
        request = _Request(prompt, sampling, stop_token_ids, key, end, experts_from)
        last: InferenceError | None = None
        failed: list[PooledServer] = []
        for attempt in range(_ATTEMPTS):
            if attempt and anyio.current_time() >= end:
                raise InferenceUnavailable(f"no answer in {seconds:.1f} s: {last}") from last
            server = await self._acquire(request, failed, last)
            with self._place(server):
                try:
                    return await self._attempt(server, request)
                except (ServerGone, ServerStuck) as error:
                    last = error
                    failed.append(server)
                    self._counts["failures"] += 1
        raise InferenceUnavailable(f"{_ATTEMPTS} attempts failed, the last one: {last}") from last

    def versions(self) -> dict[str, int]:
        """Return server name -> the newest version it is known to serve."""
        return {server.name: server.version for server in self._roster}

    def waiting(self, keys: Container[str]) -> int:
        """Return how many requests of ``keys`` wait for a place on a server."""
        return sum(waiter.key in keys for waiter in self._waiters)

    def statistics(self) -> dict[str, float]:
        """Return gauges and counters of the pool and of each server.

        Servers, load, limits, queue, rates over the last ten seconds, failures; for each server NAME:
        ``NAME.in_flight``, ``.limit``, ``.lag`` (versions behind), ``.usable``,
        ``.answers``, ``.failures``, ``.opened`` (times that its breaker opened), ``.cuts`` (of its limit),
        ``.idle`` (share of the time between its last two versions in which it had no request).
        """
        now = anyio.current_time()
        servers = list(self._roster)
        figures = {
            "servers": len(servers),
            "serving": len(self._roster.serving()),
            "in_flight": sum(server.load for server in servers),
            "limit": sum(server.limit.limit for server in servers),
            "limit_cuts": self._cuts + sum(server.limit.cuts for server in servers),
            "breakers_opened": self._opened + sum(server.breaker.opened for server in servers),
            "waiting": len(self._waiters),
            "tokens_per_second": self._token_rate.value(now),
            "requests_per_second": self._request_rate.value(now),
            **{name: float(count) for name, count in self._counts.items()},
        }
        for server in servers:
            of_server: dict[str, float] = {
                "in_flight": server.load,
                "limit": server.limit.limit,
                "lag": server.lag,
                "usable": self._roster.usable(server),
                "answers": server.answers,
                "failures": server.failures,
                "opened": server.breaker.opened,
                "cuts": server.limit.cuts,
            }
            if server.idle.last is not None:
                of_server["idle"] = server.idle.last
            figures |= {f"{server.name}.{name}": float(value) for name, value in of_server.items()}
        return figures

    # One request

    async def _attempt(self, server: PooledServer, request: _Request) -> Completion:
        if server.gone or server.breaker.retry_at is not None:
            self._counts["moved"] += 1
            raise ServerGone("it was lost before the request was sent", where=server.url)
        completion, why = None, "the request was moved away from a lost server"
        in_flight = server.load
        try:
            with anyio.CancelScope() as scope:
                server.scopes.add(scope)
                found = await server.client.generate(
                    request.prompt,
                    request.sampling,
                    deadline=max(0.001, request.end - anyio.current_time()),
                    stop_token_ids=request.stop_token_ids,
                    salt=str(server.version),
                    experts_from=request.experts_from,
                )
                if await self._acknowledged(server, found, request.end):
                    completion = found
                else:
                    why = "a version that sampled its answer was never proved"
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
            raise ServerGone(why, where=server.url)
        self._answered(server, completion, in_flight)
        return completion

    async def _acknowledged(self, server: PooledServer, completion: Completion, end: float) -> bool:
        """Return whether the server has proved all versions that sampled ``completion``.

        Waits until the newest of them is proved or passed over; a version passed over is never proved.
        """
        versions = {span.version for span in completion.spans}
        if not self._updated:
            if versions != {UNLABELLED}:
                raise Thawed("the server answers with weights that were pushed into it", where=server.url)
            return True
        if any(version < 0 for version in versions):
            raise _Unlabelled("its weights carry no version: they were never pushed", where=server.url)
        newest = max(versions, default=0)
        if newest <= server.version:
            return server.has_proved(versions)
        self._counts["unproved"] += 1
        with anyio.move_on_at(end):
            while newest > server.version:
                await server.acknowledged.wait()
            return server.has_proved(versions)
        raise _Unproved(f"version {newest} was not acknowledged in time", where=server.url)

    def _answered(self, server: PooledServer, completion: Completion, in_flight: int) -> None:
        now = anyio.current_time()
        server.answers += 1
        server.limit.ended(in_flight=in_flight, success=True)
        server.breaker.success()
        self._counts["requests"] += 1
        self._counts["tokens"] += len(completion.tokens)
        self._request_rate.add(now, 1)
        self._token_rate.add(now, len(completion.tokens))

    def _failed(self, server: PooledServer, error: InferenceError, in_flight: int) -> None:
        server.failures += 1
        server.limit.ended(in_flight=in_flight, success=False)
        if isinstance(error, _Unproved):
            return  # the server answered in time; its role or the bus did not
        if isinstance(error, ServerStuck):
            server.limit.congested(in_flight=in_flight)  # slow is not dead: the prober decides
            return
        now, breaker = anyio.current_time(), server.breaker
        hopeless = isinstance(error, _Unlabelled) and breaker.retry_at is None
        if breaker.trip(now) if hopeless else breaker.failure(now):
            log.warning("server_breaker_open", server=server.name, reason=str(error))
            self._roster.suspend(server)

    # Places

    async def _acquire(
        self, request: _Request, avoid: Sequence[PooledServer], last: InferenceError | None
    ) -> PooledServer:
        """Return a server with one place taken on it; the caller gives the place back."""
        if not self._waiters and (server := self._roster.choose(request.key, avoid)) is not None:
            return server
        if len(self._waiters) >= self._max_waiting:
            raise InferenceUnavailable(f"{self._max_waiting} requests wait already", where="InferencePool")
        waiter = _Waiter(request.key, avoid)
        self._waiters.append(waiter)
        self._dispatch()  # those before it may wait for another server
        try:
            with anyio.move_on_at(request.end):
                await waiter.event.wait()
        except BaseException:
            self._abandon(waiter)
            raise
        if waiter.server is not None:
            return waiter.server
        self._abandon(waiter)
        raise InferenceUnavailable(
            f"no place on a server before the deadline ({len(self._roster.serving())} of "
            f"{len(self._roster)} answer)" + (f"; last failure: {last}" if last else ""),
            where="InferencePool",
        )

    @contextmanager
    def _place(self, server: PooledServer) -> Iterator[None]:
        """Give back the place that was taken on ``server``."""
        server.idle.busy(anyio.current_time())
        try:
            yield
        finally:
            self._give_back(server)

    def _abandon(self, waiter: _Waiter) -> None:
        with suppress(ValueError):
            self._waiters.remove(waiter)
        if waiter.server is not None:
            self._give_back(waiter.server)

    def _give_back(self, server: PooledServer) -> None:
        server.load -= 1
        if not server.load:
            server.idle.free(anyio.current_time())
        self._dispatch()

    def _dispatch(self) -> None:
        """Hand free places to waiting requests, in order; skip those that avoid the only free server."""
        passed: list[_Waiter] = []
        while self._waiters and self._roster.least_loaded(list(self._roster)) is not None:
            first = self._waiters.popleft()
            first.server = self._roster.choose(first.key, first.avoid)
            if first.server is None:
                passed.append(first)
            else:
                first.event.set()
        self._waiters.extendleft(reversed(passed))

    # Servers

    def _serving(self, message: ServerServing) -> None:
        known = self._roster.find(message)
        if known is not None:
            if message.version > known.version:
                known.idle.end_round(anyio.current_time())
            self._roster.proved(known, message.version)
            known.client.adapter = self._adapter(known.version)
        else:
            if (former := self._roster.remove(message.server)) is not None:
                self._drop(former)
            if self._session is None:
                self._session = open_session()
            client = VllmClient(message.url, self._session, adapter=self._adapter(message.version))
            joined = self._roster.joined(message, client)
            joined.idle.end_round(anyio.current_time())
            self._keep(joined)
        self._announce()

    def _adapter(self, version: int) -> str:
        return adapter_name(self._adapters, version) if self._adapters else ""

    def _drop(self, server: PooledServer) -> None:
        self._opened += server.breaker.opened
        self._cuts += server.limit.cuts
        server.gone = True
        server.watch.cancel()
        server.evict()

    def _announce(self) -> None:
        """Wake all that wait for a server."""
        event, self._changed = self._changed, anyio.Event()
        event.set()
        self._dispatch()

    def _keep(self, server: PooledServer) -> None:
        if self._probers is not None:
            prober = HealthProber(server, self._roster, self._announce, stuck_seconds=self._stuck_seconds)
            self._probers.start_soon(prober.run)


class Thawed(SpadeError):
    """A server that nothing updates answers with other weights."""


class _Unproved(ServerStuck):
    """The version of the tokens was not announced in time."""


class _Unlabelled(ServerGone):
    """The tokens carry no version: the server was restarted without its role."""
