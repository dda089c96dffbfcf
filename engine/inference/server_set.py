"""The set of servers: which of them get requests, and which one is best. No clock, socket or task.

A server is admitted when it serves the version that was published last. A new one, or one whose breaker
opened, gets no requests before that. An admitted one may lag behind during an update, but by no more than
``max_lag`` versions (invariant I6).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import anyio

from bus.messages import PolicyPublished, ServerLost, ServerServing
from engine.inference.concurrency import Aimd, Breaker, IdleShare
from engine.inference.vllm import VllmClient
from engine.lineage import Lineage, Version

_AFFINITIES = 65536
_FLOOR = 8
_REMEMBERED = 256  # versions; no request spans more


@dataclass(eq=False)
class PooledServer:
    """One server epoch. ``version`` is the newest that it acknowledged: loaded and proved."""

    name: str
    epoch: str
    url: str
    version: int
    client: VllmClient
    limit: Aimd
    breaker: Breaker = field(default_factory=Breaker)
    idle: IdleShare = field(default_factory=IdleShare)
    admitted: bool = False
    gone: bool = False
    lag: int = 0
    load: int = 0
    answers: int = 0
    failures: int = 0
    scopes: set[anyio.CancelScope] = field(default_factory=set)
    watch: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    acknowledged: anyio.Event = field(default_factory=anyio.Event)
    proved: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def __post_init__(self) -> None:
        self.proved.append(self.version)

    def has_proved(self, versions: set[int]) -> bool:
        """Return whether the server has proved each of ``versions``, not only a newer one."""
        return versions.issubset(self.proved)

    def evict(self) -> None:
        """End every request in flight here; each moves to another server."""
        for scope in tuple(self.scopes):
            scope.cancel()

    def acknowledge(self, version: int) -> None:
        """Note that the server has proved ``version``: its tokens may be used."""
        if version not in self.proved:
            self.proved.append(version)
        if version > self.version:
            self.version = version
            event, self.acknowledged = self.acknowledged, anyio.Event()
            event.set()


class Roster:
    """Facts in, servers out. ``ceiling`` bounds the requests in flight on one server."""

    def __init__(self, *, ceiling: int, max_lag: int | None = None) -> None:
        self._ceiling, self._max_lag = ceiling, max_lag
        self._servers: dict[str, PooledServer] = {}
        self._affinity: OrderedDict[str, str] = OrderedDict()
        self._known: set[str] = set()
        self._lineage = Lineage()
        self._published: Version | None = None

    def __iter__(self) -> Iterator[PooledServer]:
        return iter(tuple(self._servers.values()))

    def __len__(self) -> int:
        return len(self._servers)

    def usable(self, server: PooledServer) -> bool:
        """Return whether ``server`` gets requests at all, now or as soon as it has a place."""
        recent = self._max_lag is None or server.lag <= self._max_lag
        return server.admitted and recent and server.breaker.closed

    def serving(self) -> list[PooledServer]:
        """Return the servers that get requests."""
        return [server for server in self._servers.values() if self.usable(server)]

    def published(self, message: PolicyPublished) -> None:
        """Take in the version that all servers have to load; the last one published counts."""
        version = Version.unpack(message.version)
        if version.fence > self._lineage.forks[-1][0]:
            self._lineage = self._lineage.fork(version.fence, version.step)
        if self._published is None or version > self._published:
            self._published = version
        for server in self._servers.values():
            self._measure(server)

    def find(self, message: ServerServing) -> PooledServer | None:
        """Return the server that ``message`` is about, None for a new one (or a new epoch)."""
        known = self._servers.get(message.server)
        same = known is not None and (known.epoch, known.url) == (message.epoch, message.url)
        return known if same else None

    def proved(self, server: PooledServer, version: int) -> None:
        """Note that the role of ``server`` has proved ``version``, and that the server works."""
        if server.breaker.retry_at is not None:
            server.limit.restart()
        server.breaker.reset()
        if version > server.version:
            server.limit.excuse(
                in_flight=server.load
            )  # a pause preempts all that runs, to be prefilled again
        server.acknowledge(version)
        self._judge(server)

    def probed(self, server: PooledServer, version: int) -> None:
        """Note that ``server``, whose breaker was open, has sampled a token with ``version``."""
        server.breaker.probed()
        server.limit.restart()
        if version == server.version:
            self._judge(server)

    def joined(self, message: ServerServing, client: VllmClient) -> PooledServer:
        """Add a new server, or a new epoch of one, and return it."""
        server = PooledServer(
            name=message.server,
            epoch=message.epoch,
            url=message.url,
            version=message.version,
            client=client,
            limit=Aimd(self._ceiling, floor=min(_FLOOR, self._ceiling)),
        )
        if server.name in self._known:
            server.limit.restart()
        self._known.add(server.name)
        self._servers[server.name] = server
        self._judge(server)
        return server

    def left(self, message: ServerLost) -> PooledServer | None:
        """Remove a lost server; return it if the loss is that of its present epoch."""
        server = self._servers.get(message.server)
        if server is None or server.epoch != message.epoch:
            return None
        return self.remove(server.name)

    def remove(self, name: str) -> PooledServer | None:
        """Forget a server."""
        return self._servers.pop(name, None)

    def suspend(self, server: PooledServer) -> None:
        """Stop sending to a failed server until it serves the current version again; move its requests."""
        server.admitted = False
        server.evict()

    def choose(self, key: str, avoid: Collection[PooledServer] = ()) -> PooledServer | None:
        """Return the server for the next request of ``key``, one place on it taken; None when none is free.

        It is the one that holds the prefix, else the least loaded one. Servers to ``avoid`` are taken when
        there is no other.
        """
        bound = self._servers.get(self._affinity.get(key, ""))
        if bound is None or bound in avoid or not self._free(bound):
            others = [server for server in self._servers.values() if server not in avoid]
            bound = self.least_loaded(others)
            if bound is None and not any(self.usable(server) for server in others):
                bound = self.least_loaded(self._servers.values())
            if bound is None:
                return None
            self._affinity[key] = bound.name
            if len(self._affinity) > _AFFINITIES:
                self._affinity.popitem(last=False)
        self._affinity.move_to_end(key)
        bound.load += 1
        return bound

    def least_loaded(self, servers: Collection[PooledServer]) -> PooledServer | None:
        """Return the one of ``servers`` with a free place and the least load."""
        free = [server for server in servers if self._free(server)]
        return min(free, key=lambda server: server.load, default=None)

    def behind(self, server: PooledServer) -> bool:
        """Return whether a newer version than the server's was published."""
        return self._published is not None and Version.unpack(server.version) < self._published

    def _free(self, server: PooledServer) -> bool:
        return self.usable(server) and server.load < server.limit.limit

    def _measure(self, server: PooledServer) -> None:
        current, version = self._published, Version.unpack(server.version)
        server.lag = self._lineage.age(current, version) if current and self.behind(server) else 0

    def _judge(self, server: PooledServer) -> None:
        """Admit a server whose version was just proved, if it is the current one."""
        self._measure(server)
        server.admitted = server.admitted or not self.behind(server)
