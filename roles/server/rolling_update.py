"""Decides which server loads new weights next, so that some servers always keep sampling.

No lease is needed: the order follows from the servers' facts, which are one stream for all roles. Among the
servers that serve, the one with the oldest version loads first, of equals the one with the lesser name, and
the next turn begins with its announcement. So a server that has just loaded cannot overtake one that waits,
however fast versions follow each other. A server that does not serve yet neither waits nor is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio
import structlog

from bus.messages import Message, ServerLost, ServerServing

LEAST_PATIENCE = 15.0
_SLOWER = 4.0

log = structlog.get_logger("spade.server")


@dataclass(frozen=True)
class Announced:
    """The last announcement of a server."""

    epoch: str
    version: int


class UpdateOrder:
    """The order of loads: facts in, the server to wait for out. Pure.

    ``patience`` is the number of seconds to wait for one server; it follows the slowest update seen.
    """

    def __init__(self) -> None:
        self._standings: dict[str, Announced] = {}
        self._slow: dict[str, Announced] = {}
        self._slowest = 0.0

    def note(self, message: Message) -> None:
        """Take in one fact; an older one of the same server changes nothing."""
        if isinstance(message, ServerServing):
            known = self._standings.get(message.server)
            if known is None or known.epoch != message.epoch or known.version < message.version:
                self._standings[message.server] = Announced(message.epoch, message.version)
                self._slowest = max(self._slowest, message.seconds)
        elif isinstance(message, ServerLost):
            known = self._standings.get(message.server)
            if known is not None and known.epoch == message.epoch:
                del self._standings[message.server]

    def before(self, server: str, version: int) -> str | None:
        """Return a server that has to load ``version`` before ``server`` may, None when it is its turn."""
        own = self._standings.get(server)
        if own is None:
            return None
        ahead = [
            (standing.version, name)
            for name, standing in self._standings.items()
            if (standing.version, name) < (own.version, server)
            and standing.version < version
            and self._slow.get(name) != standing
        ]
        return min(ahead)[1] if ahead else None

    def overstayed(self, server: str) -> None:
        """Do not let others wait for ``server`` before it announces something new."""
        if server in self._standings:
            self._slow[server] = self._standings[server]

    def carried(self, version: int, *, beside: str) -> bool:
        """Return whether another server than ``beside`` serves ``version`` or a later one."""
        return any(found >= version for found in self._others(beside))

    def serves(self, version: int, *, beside: str) -> bool:
        """Return whether another server than ``beside`` serves exactly ``version``."""
        return version in self._others(beside)

    def _others(self, beside: str) -> list[int]:
        return [standing.version for name, standing in self._standings.items() if name != beside]

    def detour(self, server: str, version: int) -> float:
        """Return the most seconds until another server's turn to load ``version`` has come.

        The others may not know that ``server`` does not take it: each waits ``patience`` for those before it.
        """
        waiting = [
            name
            for name, standing in self._standings.items()
            if name != server and standing.version < version and self._slow.get(name) != standing
        ]
        return self.patience * len(waiting)

    @property
    def patience(self) -> float:
        """Seconds to wait for one server."""
        return max(LEAST_PATIENCE, _SLOWER * self._slowest)


class RollingUpdate(UpdateOrder):
    """The order with its waiting. ``waited`` counts seconds, ``passed`` servers given up on."""

    def __init__(self, *, rolling: bool) -> None:
        super().__init__()
        self._rolling = rolling
        self._changed = anyio.Event()
        self.waited = 0.0
        self.passed = 0

    def note(self, message: Message) -> None:
        """Take in a fact of the bus, or one that was just published."""
        super().note(message)
        self._announce()

    def refused(self, server: str) -> None:
        """Note that ``server`` refused the new weights: the others of this role do not wait for it.

        Those of other role processes do not know, and wait for ``patience`` (see ``detour``).
        """
        self.overstayed(server)
        self._announce()

    def detour(self, server: str, version: int) -> float:
        """Return the most seconds until another server's turn comes; 0 when all load at once."""
        return super().detour(server, version) if self._rolling else 0.0

    async def others_carry(self, version: int, *, beside: str, seconds: float) -> bool:
        """Return whether another server than ``beside`` serves ``version`` or a later one within ``seconds``.

        Servers that serve an older version may be on their way to it.
        """
        with anyio.move_on_after(seconds):
            await self.until(
                lambda: self.carried(version, beside=beside) or not self.carried(0, beside=beside)
            )
        return self.carried(version, beside=beside)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when ``condition``, which is about the servers, holds."""
        while not condition():
            await self._changed.wait()

    async def turn(self, server: str, version: int) -> None:
        """Return when ``server`` may load ``version``: it waits ``patience`` for each server before it."""
        if not self._rolling:
            return
        started = anyio.current_time()
        try:
            while (front := self.before(server, version)) is not None:
                with anyio.move_on_after(self.patience) as waiting:
                    await self.until(partial(self._gave_way, front, server, version))
                if waiting.cancelled_caught and self.before(server, version) == front:
                    log.warning("rollout_passes", server=server, slow=front)
                    self.passed += 1
                    self.overstayed(front)
        finally:
            self.waited += anyio.current_time() - started

    def _gave_way(self, front: str, server: str, version: int) -> bool:
        return self.before(server, version) != front

    def _announce(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
