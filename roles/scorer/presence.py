"""Which servers nobody looks after any more. Pure: heartbeats and ticks in, verdicts out.

A server role announces the end of its servers, but not its own: after a kill or a lost host its servers
would be known for ever at their last version, and no round could be admitted (invariant I10).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from roles.scorer.progress import Known

TICK_SECONDS = 5.0
PATIENCE = 12


class Presence:
    """Counts the ticks without a heartbeat of the role instance behind each server.

    Server ``<instance>-<index>`` belongs to the role instance ``<instance>``. A tick in which no role at all
    was heard says something about the bus and nothing about a server: it does not count.
    """

    def __init__(self, patience: int = PATIENCE) -> None:
        self._patience = patience
        self._heard: set[str] = set()
        self._silent: Counter[str] = Counter()

    def heard(self, instance: str) -> None:
        """Take in a heartbeat."""
        self._heard.add(instance)

    def tick(self, servers: Mapping[str, Known]) -> dict[str, str]:
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
