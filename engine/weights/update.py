"""One server, one version: the owned operation that brings new weights into a running server.

prove the weights -> pause (keep requests) -> load -> finish (label) -> resume -> canary. It may be repeated:
a server that samples under the version's label is only proved again. Until the load begins nothing is
changed; a load that fails, or a version that cannot be proved, leaves the server paused, to be restarted, so
that no token is sampled by weights that nobody can name.
"""

from __future__ import annotations

import time
from contextlib import suppress

import structlog

from bus.messages import PolicyPublished
from engine.inference.completion import InferenceError
from engine.inference.server_checks import HandshakeRefused, canary_error
from engine.inference.vllm import CONTROL_SECONDS, VllmClient
from engine.lineage import Version
from engine.weights.outcome import FetchFailed, ServerBroken, Updated, UpdateRefused
from engine.weights.paths import Cache, FilePath, Turn, WeightPath

_ATTEMPTS = 2

log = structlog.get_logger("spade.weights")


async def update(
    client: VllmClient,
    policy: PolicyPublished,
    *,
    cache: Cache,
    tolerance: float,
    load_seconds: float,
    path: WeightPath | None = None,
    turn: Turn | None = None,
) -> Updated:
    """Bring ``policy`` into the server behind ``client`` by ``path`` (files, if None) and prove it.

    ``cache`` "recompute" drops all KV, so that running requests are prefilled again under the new weights;
    "keep" leaves their old KV in place and relies on ``cache_salt`` for new requests. ``load_seconds``
    bounds the load itself. ``turn`` is awaited before the pause: others may have to load first. A failed
    canary is answered by one more full load (``attempts`` 2): tokens that were sampled in between carry a
    label that was not true, and whoever calls must see to it that nobody uses them.

    Raises UpdateRefused and FetchFailed (the old version serves on), ServerBroken (restart it), or ServerGone
    and ServerStuck before anything was changed.
    """
    started, path = time.perf_counter(), path or FilePath()
    paused, error, why = 0.0, float("inf"), f"after {_ATTEMPTS} loads"
    for attempt in range(1, _ATTEMPTS + 1):
        if attempt > 1 or not await path.carries(client, policy):
            try:
                paused += await path.bring(client, policy, cache=cache, load_seconds=load_seconds, turn=turn)
            except (UpdateRefused, FetchFailed) as fault:
                if attempt == 1:
                    raise
                why = f"and could not be loaded again: {fault.what}"  # the old weights are gone already
                break
        try:
            error = await canary_error(client, policy, deadline=CONTROL_SECONDS)
        except HandshakeRefused as fault:
            raise UpdateRefused(fault.what, where=client.url) from fault
        if error > tolerance and await path.overtaken(client, policy):
            raise FetchFailed("newer weights have come before these were proved", where=client.url)
        if error <= tolerance:
            seconds = time.perf_counter() - started
            return Updated(policy.version, error, paused, seconds, attempt)
        log.warning("canary_failed", server=client.url, version=policy.version, error=error, attempt=attempt)
    with suppress(InferenceError):
        await path.reject(client, policy)
    raise ServerBroken(
        f"version {Version.unpack(policy.version)}: the canary's log-probs differ from the learner's by "
        f"{error:.3g}, {tolerance:.3g} is allowed, {why}",
        where=client.url,
        remedy="Server and learner differ in weights, data type or settings (server.canary_tolerance).",
    )


__all__ = ["FetchFailed", "ServerBroken", "UpdateRefused", "Updated", "update"]
