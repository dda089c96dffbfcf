"""One server, one version: the owned operation that brings new weights into a running server.

start -> check the file -> pause (keep requests) -> load -> finish (label) -> resume -> canary. It may be
repeated: a server that samples under the version's label is only proved again. Until the load begins
nothing is changed; a load that fails, or a version that cannot be proved, leaves the server paused, to be
restarted, so that no token is sampled by weights that nobody can name.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import anyio
import numpy as np
import structlog

from bus.messages import PolicyPublished
from engine.inference.completion import InferenceError
from engine.inference.vllm import CONTROL_SECONDS, VllmClient
from engine.lineage import Version
from engine.weights.plugin import REFUSED

_ATTEMPTS = 2

log = structlog.get_logger("spade.weights")


class UpdateRefused(InferenceError):
    """The new weights were refused (missing file, wrong digest, wrong names): the old ones serve on."""


class ServerBroken(InferenceError):
    """The server's weights are unknown or wrong: it must be restarted before it may serve."""


@dataclass(frozen=True)
class Updated:
    """``canary_error`` is the largest absolute difference of a canary token's log-prob from the learner's;
    ``paused`` and ``seconds`` are the time without sampling and the time of the whole operation."""

    version: int
    canary_error: float
    paused: float
    seconds: float
    attempts: int


async def update(
    client: VllmClient,
    policy: PolicyPublished,
    *,
    cache: Literal["recompute", "keep"],
    tolerance: float,
    load_seconds: float,
) -> Updated:
    """Bring ``policy`` into the server behind ``client`` and prove it.

    ``cache`` "recompute" drops all KV, so that running requests are prefilled again under the new weights;
    "keep" leaves their old KV in place and relies on ``cache_salt`` for new requests. ``load_seconds``
    bounds the load itself. A canary that fails is answered by one more full load.

    Raises UpdateRefused (the old version serves on), ServerBroken (restart it), or ServerGone and
    ServerStuck before anything was changed.
    """
    started = time.perf_counter()
    paused, error = 0.0, float("inf")
    for attempt in range(1, _ATTEMPTS + 1):
        if attempt > 1 or not await _carries(client, policy.version):
            paused += await _load(client, policy, cache, load_seconds)
        error = await canary_error(client, policy, deadline=CONTROL_SECONDS)
        if error <= tolerance:
            seconds = time.perf_counter() - started
            return Updated(policy.version, error, paused, seconds, attempt)
        log.warning("canary_failed", server=client.url, version=policy.version, error=error, attempt=attempt)
    with suppress(InferenceError):
        await client.pause(clear_cache=False)
    raise ServerBroken(
        f"version {Version.unpack(policy.version)}: the canary's log-probs differ from the learner's by "
        f"{error:.3g}, {tolerance:.3g} is allowed, after {_ATTEMPTS} loads",
        where=client.url,
        remedy="Server and learner differ in weights, data type or settings (server.canary_tolerance).",
    )


async def canary_error(client: VllmClient, policy: PolicyPublished, *, deadline: float) -> float:
    """Return the largest absolute log-prob difference on the policy's canary prompt (0 for no canary).

    Not-a-number on either side counts as infinite.
    """
    tokens = np.frombuffer(policy.canary_tokens, "<i4").tolist()
    expected = np.frombuffer(policy.canary_logprobs, "<f4").astype(np.float64)
    if len(expected) != max(0, len(tokens) - 1):
        raise UpdateRefused(f"the canary has {len(tokens)} tokens and {len(expected)} log-probs")
    if not len(expected):
        return 0.0
    found = np.asarray(await client.prompt_logprobs(tokens, deadline=deadline))
    error = float(np.max(np.abs(found - expected)))
    return error if np.isfinite(error) else float("inf")


async def _carries(client: VllmClient, version: int) -> bool:
    """Whether the server samples with ``version``. A paused one with that label was left by a role that
    died before the resume, or by a proof that failed: it has to load again."""
    return await client.version() == version and not await client.paused()


async def _load(client: VllmClient, policy: PolicyPublished, cache: str, load_seconds: float) -> float:
    """Check the file while the server still samples, then load it under a pause.

    Returns the seconds without sampling.
    """
    info: dict[str, object] = {"uri": policy.uri, "sha256": policy.sha256, "size": policy.size}
    await _open(client)
    await _check(client, info, load_seconds)
    started = time.perf_counter()
    with anyio.CancelScope(shield=True):
        # Bounded by its deadlines; a cancellation waits, so that no half-loaded server stays behind.
        try:
            await client.pause(clear_cache=cache == "recompute")
        except InferenceError:
            await client.resume()
            raise
        try:
            await client.update_weights(info | {"check_only": False}, deadline=load_seconds)
            await client.finish_update(policy.version)
            await client.resume()
        except InferenceError as error:
            raise ServerBroken(f"loading new weights failed: {error.what}", where=client.url) from error
    return time.perf_counter() - started


async def _open(client: VllmClient) -> None:
    """Open a session; one that a dead predecessor left open is closed first (it has loaded nothing)."""
    try:
        await client.start_update()
    except InferenceError as error:
        if "already active" not in str(error):
            raise
        await client.finish_update(None)
        await client.start_update()


async def _check(client: VllmClient, info: dict[str, object], seconds: float) -> None:
    try:
        await client.update_weights(info | {"check_only": True}, deadline=seconds)
    except InferenceError as error:
        if REFUSED in error.what:
            raise UpdateRefused(error.what, where=client.url) from error
        raise


__all__ = ["ServerBroken", "UpdateRefused", "Updated", "canary_error", "update"]
