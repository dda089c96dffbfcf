"""Proof by checksum that a push reached every engine of a server, beside the canary.

One optimiser step at a small learning rate moves log-probs by less than bfloat16 rounds them, so a canary
cannot tell the versions on both sides of it apart. vLLM's weight checker hashes each tensor of each worker.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import structlog

from bus.messages import PolicyPublished
from engine.inference.completion import ServerRefused
from engine.inference.vllm import VllmClient

log = structlog.get_logger("spade.weights")


class Proof:
    """The checksums of one server process, and the digest of the version that they belong to.

    ``seconds`` bounds one reading: the engines stand still meanwhile. A server without the route is proved by
    the canary alone.
    """

    def __init__(self, *, seconds: float) -> None:
        self._seconds = seconds
        self._known: dict[str, str] | None = None
        self._digest = ""
        self._possible = True

    async def note(self, client: VllmClient) -> None:
        """Read the checksums before the first load, so that a change can be told."""
        if self._known is None:
            self._known = await self._read(client)

    async def fault(self, client: VllmClient, policy: PolicyPublished) -> str:
        """Return what is wrong with the weights after ``policy`` was loaded, "" if nothing.

        Where its bytes are not those of the version before, no worker may hold the same as before.
        """
        found = await self._read(client)
        if found is None:
            return ""
        if apart := unequal_engines(found):
            return f"its data-parallel engines hold different weights: {', '.join(apart)}"
        changed = self._digest not in ("", policy.sha256)
        if changed and (same := unchanged_workers(self._known or {}, found)):
            return f"no tensor changed in {', '.join(same)}, and the published bytes did"
        self._known, self._digest = found, policy.sha256
        return ""

    async def _read(self, client: VllmClient) -> dict[str, str] | None:
        if not self._possible:
            return None
        try:
            return await client.checksums(deadline=self._seconds)
        except ServerRefused as error:
            log.warning("no_checksums", server=client.url, reason=error.what)
            self._possible = False
            return None


def unchanged_workers(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the workers of which no tensor has another checksum than before (keys ``WORKER:tensor``)."""
    changed: defaultdict[str, bool] = defaultdict(bool)
    for key, digest in after.items():
        changed[key.rpartition(":")[0]] |= before.get(key) != digest
    return sorted(worker for worker, any_changed in changed.items() if not any_changed)


def unequal_engines(found: Mapping[str, str]) -> list[str]:
    """Return the engines (``dpN``) whose copy of a tensor differs from the first engine's.

    Experts may lie on one engine only (expert parallelism) and are not compared.
    """
    first: dict[str, str] = {}
    apart = set()
    for key, digest in sorted(found.items()):
        engine, _, rest = key.partition(":")
        if ".experts." not in rest and first.setdefault(rest, digest) != digest:
            apart.add(engine)
    return sorted(apart)
