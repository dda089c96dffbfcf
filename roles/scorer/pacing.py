"""Pacing: rounds that are trained, versions that servers answer with, servers that were lost. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from bus.messages import BatchTrained, PolicyPublished, ServerLost, ServerServing
from engine.lineage import Lineage, Version

_ROUNDS_KEPT = 512


class KnownServer(msgspec.Struct, array_like=True):
    """A server: its process (epoch) and the version it answers with."""

    epoch: str
    version: int


class TrainingProgress(msgspec.Struct, kw_only=True):
    """``trained`` maps round -> version after its batch, along the surviving weights, newest rounds only."""

    servers: dict[str, KnownServer] = {}
    lineage: Lineage = Lineage()
    trained: dict[int, int] = {}

    def allows(self, needed: int) -> bool:
        """Return whether round ``needed`` is trained and every known server has its weights or later ones.

        At least one server must be known; a negative ``needed`` asks for nothing else.
        """
        if not self.servers:
            return False
        least = Version(0, 0)
        if needed >= 0:
            if needed not in self.trained:
                return False
            least = Version.unpack(self.trained[needed])
        served = [Version.unpack(known.version) for known in self.servers.values()]
        return all(version >= least and self.lineage.survives(version) for version in served)

    def is_trained(self, round_: int) -> bool:
        """Return whether the batch of ``round_`` reached its terminal state along the surviving weights."""
        return round_ in self.trained or (bool(self.trained) and round_ < min(self.trained))

    def batch_trained(self, message: BatchTrained) -> None:
        """Take in a trained batch, unless it lies on an abandoned branch."""
        if self.lineage.survives(Version.unpack(message.version)):
            self.trained[message.round] = message.version
            while len(self.trained) > _ROUNDS_KEPT:
                del self.trained[min(self.trained)]

    def published(self, message: PolicyPublished) -> None:
        """A newer fence is a learner that went back to its checkpoint: what lay beyond is abandoned."""
        version = Version.unpack(message.version)
        if version.fence > self.lineage.forks[-1][0]:
            self.lineage = self.lineage.fork(version.fence, version.step)
            survives = self.lineage.survives
            self.trained = {r: v for r, v in self.trained.items() if survives(Version.unpack(v))}

    def serving(self, message: ServerServing) -> None:
        """A server answers with a version; a new process replaces the old one of that name."""
        self.servers[message.server] = KnownServer(message.epoch, message.version)

    def lost(self, message: ServerLost) -> None:
        """A server's process ended; news about an earlier process of that name is old news."""
        known = self.servers.get(message.server)
        if known and known.epoch == message.epoch:
            del self.servers[message.server]


TICK_SECONDS = 5.0
PATIENCE = 12


class HeartbeatWatch:
    """Detects orphaned servers: their supervising role stopped sending heartbeats.

    A server role announces the end of its servers, but not its own: after a kill or a lost host its servers
    would stay known at their last version, and no round could be admitted (invariant I10). Server
    ``<instance>-<index>`` belongs to the role instance ``<instance>``. A tick in which no role at all was
    heard shows an outage of the bus, not of a server: it does not count.
    """

    def __init__(self, patience: int = PATIENCE) -> None:
        self._patience = patience
        self._heard: set[str] = set()
        self._silent: Counter[str] = Counter()

    def heard(self, instance: str) -> None:
        """Take in a heartbeat."""
        self._heard.add(instance)

    def tick(self, servers: Mapping[str, KnownServer]) -> dict[str, str]:
        """Return server -> epoch of the known servers that have been silent for ``patience`` ticks."""
        heard, self._heard = self._heard, set()
        if not heard:
            return {}
        owners = {server: server.rpartition("-")[0] for server in servers}
        silent = set(owners.values()) - heard
        self._silent = Counter({owner: self._silent[owner] + 1 for owner in silent})
        return {
            server: servers[server].epoch
            for server, owner in owners.items()
            if self._silent[owner] >= self._patience
        }
