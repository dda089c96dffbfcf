"""Who is how far: what the learner has trained and which version every server answers with. Pure."""

from __future__ import annotations

import msgspec

from bus.messages import BatchTrained, PolicyPublished, ServerLost, ServerServing
from engine.lineage import Lineage, Version

_ROUNDS_KEPT = 512


class Known(msgspec.Struct, array_like=True):
    """A server: its process (epoch) and the version it answers with."""

    epoch: str
    version: int


class Progress(msgspec.Struct, kw_only=True):
    """``trained`` maps round -> version after its batch, along the surviving weights, newest rounds only."""

    servers: dict[str, Known] = {}
    lineage: Lineage = Lineage()
    trained: dict[int, int] = {}

    def allows(self, needed: int) -> bool:
        """Whether round ``needed`` is trained and every known server has its weights or later ones.

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
        """Whether the batch of ``round_`` reached its terminal state along the surviving weights."""
        return round_ in self.trained or (bool(self.trained) and round_ < min(self.trained))

    def batch_trained(self, message: BatchTrained) -> bool:
        """Take in a trained batch; False when it lies on an abandoned branch."""
        if not self.lineage.survives(Version.unpack(message.version)):
            return False
        self.trained[message.round] = message.version
        while len(self.trained) > _ROUNDS_KEPT:
            del self.trained[min(self.trained)]
        return True

    def published(self, message: PolicyPublished) -> None:
        """A newer fence is a learner that went back to its checkpoint: what lay beyond is abandoned."""
        version = Version.unpack(message.version)
        if version.fence > self.lineage.forks[-1][0]:
            self.lineage = self.lineage.fork(version.fence, version.step)
            survives = self.lineage.survives
            self.trained = {r: v for r, v in self.trained.items() if survives(Version.unpack(v))}

    def serving(self, message: ServerServing) -> None:
        """A server answers with a version; a new process replaces the old one of that name."""
        self.servers[message.server] = Known(message.epoch, message.version)

    def lost(self, message: ServerLost) -> None:
        """A server's process ended; news about an earlier process of that name is old news."""
        known = self.servers.get(message.server)
        if known and known.epoch == message.epoch:
            del self.servers[message.server]
