"""Adapter-only updates through vLLM's routes for LoRA: each version is an adapter with a name of its own.

Nothing is paused: running requests end on the adapter they began with, new ones name the new one. A name is
never used for other weights, so a prefix cached under it stays true, and a token's version is the name that
its request gave. The server needs ``--enable-lora`` and ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1``.
"""

from __future__ import annotations

from pathlib import Path

import anyio.to_thread
import structlog

from bus.messages import PolicyPublished
from engine.inference.completion import InferenceError, ServerRefused
from engine.inference.vllm import VllmClient
from engine.inference.wire import ADAPTER
from engine.weights import store
from engine.weights.outcome import UpdateRefused
from engine.weights.paths import Cache, WeightPath

FILE_NAME = "adapter_model.safetensors"
_LOADED = "already been loaded"
_UNKNOWN = "cannot be found"

log = structlog.get_logger("spade.weights")


class AdapterPath(WeightPath):
    """``PolicyPublished.uri`` is a directory in PEFT's format that the server can read; digest and size are
    those of its ``adapter_model.safetensors``. The last ``keep`` adapters of a server stay loaded."""

    def __init__(self, *, keep: int = 2) -> None:
        self._keep = keep

    def adapter(self, policy: PolicyPublished) -> str:
        return adapter_name(policy.version)

    async def carries(self, client: VllmClient, policy: PolicyPublished) -> bool:
        return self.adapter(policy) in await client.adapters()

    async def bring(
        self, client: VllmClient, policy: PolicyPublished, *, cache: Cache, load_seconds: float
    ) -> float:
        directory = await anyio.to_thread.run_sync(_checked, policy)
        name = self.adapter(policy)
        try:
            await client.load_adapter(name, str(directory), deadline=load_seconds)
        except InferenceError as error:
            if _LOADED not in error.what:
                if isinstance(error, ServerRefused) or "HTTP 500" in error.what:
                    raise UpdateRefused(
                        f"vLLM refuses the adapter: {error.what}", where=client.url
                    ) from error
                raise
        await self._unload(client, name)
        return 0.0

    async def _unload(self, client: VllmClient, newest: str) -> None:
        older = [name for name in await client.adapters() if name != newest]
        for name in older[: len(older) - self._keep + 1]:
            try:
                await client.unload_adapter(name)
            except ServerRefused as error:
                if _UNKNOWN not in error.what:
                    raise
            log.info("adapter_unloaded", server=client.url, adapter=name)


def adapter_name(version: int) -> str:
    """Return the name under which a version is served."""
    return f"{ADAPTER}{version}"


def _checked(policy: PolicyPublished) -> Path:
    directory = store.local_path(policy.uri)
    try:
        store.fetch(str(directory / FILE_NAME), policy.sha256, policy.size)
    except (store.WeightFault, OSError) as error:
        raise UpdateRefused(f"the adapter is refused: {error}", where=str(directory)) from error
    return directory
