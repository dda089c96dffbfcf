"""One server, one version: brings new weights into a running server and proves them.

check the file -> pause (keep requests) -> load -> label -> resume -> canary -> checksums. The update may be
repeated: a server that samples under the version's label is only proved again. A load that fails, or a
version whose proof fails twice, leaves the server paused, to be restarted, so that no token is sampled by
unknown weights.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

import structlog

from bus.messages import PolicyPublished
from engine.inference.completion import InferenceError
from engine.inference.server_checks import HandshakeRefused, canary_error
from engine.inference.vllm import CONTROL_SECONDS, VllmClient
from engine.lineage import Version
from engine.weights.loaders import (
    Cache,
    FetchFailed,
    ServerBroken,
    Turn,
    UpdateRefused,
    WeightLoader,
)
from engine.weights.proof import Proof

_ATTEMPTS = 2

log = structlog.get_logger("spade.weights")


@dataclass(frozen=True)
class Updated:
    """``canary_error`` is the largest absolute difference of a canary token's log-prob from the learner's.

    ``paused`` and ``seconds`` are the time without sampling and the time of the whole operation.
    """

    version: int
    canary_error: float
    paused: float
    seconds: float
    attempts: int


async def update(
    client: VllmClient,
    policy: PolicyPublished,
    *,
    cache: Cache,
    tolerance: float,
    load_seconds: float,
    loader: WeightLoader,
    turn: Turn | None = None,
    proof: Proof | None = None,
    fresh: bool = True,
) -> Updated:
    """Bring ``policy`` into the server behind ``client`` by ``loader`` and prove it.

    ``cache`` "recompute" drops all KV, so that running requests are prefilled again under the new weights;
    "keep" leaves their old KV in place and relies on ``cache_salt`` for new requests. ``load_seconds``
    bounds the load itself. ``turn`` is awaited before the pause: other servers may have to load first.
    ``proof`` compares the checksums of every engine. A ``fresh`` client may find a server that carries
    ``policy`` already, loaded by a role that died. A failed canary or proof is answered by one more full
    load (``attempts`` 2): tokens that were sampled in between carry a wrong label, and the caller must
    discard them.

    Raises UpdateRefused and FetchFailed (the old version serves on), ServerBroken (restart it), or ServerGone
    and ServerStuck before anything was changed.
    """
    started = time.perf_counter()
    paused, fault, why = 0.0, "", f"after {_ATTEMPTS} loads"
    for attempt in range(1, _ATTEMPTS + 1):
        if attempt > 1 or not (fresh and await loader.carries(client, policy)):
            try:
                paused += await loader.bring(
                    client, policy, cache=cache, load_seconds=load_seconds, turn=turn
                )
            except (UpdateRefused, FetchFailed) as refusal:
                if attempt == 1:
                    raise
                why = f"and could not be loaded again: {refusal.what}"  # the old weights are gone already
                break
        try:
            error = await canary_error(client, policy, deadline=CONTROL_SECONDS)
        except HandshakeRefused as refusal:
            raise UpdateRefused(refusal.what, where=client.url) from refusal
        if error > tolerance and await loader.overtaken(client, policy):
            raise FetchFailed("newer weights have arrived before these were proved", where=client.url)
        if error > tolerance:
            fault = (
                f"the canary's log-probs differ from the learner's by {error:.3g}, {tolerance:.3g} is allowed"
            )
        else:
            fault = await proof.fault(client, policy) if proof is not None else ""
        if not fault:
            seconds = time.perf_counter() - started
            return Updated(policy.version, error, paused, seconds, attempt)
        log.warning("proof_failed", server=client.url, version=policy.version, fault=fault, attempt=attempt)
    with suppress(InferenceError):
        await loader.reject(client, policy)
    raise ServerBroken(
        f"version {Version.unpack(policy.version)}: {fault}, {why}",
        where=client.url,
        remedy="Server and learner differ in weights, data type or settings (server.canary_tolerance).",
    )


__all__ = ["FetchFailed", "ServerBroken", "UpdateRefused", "Updated", "update"]
