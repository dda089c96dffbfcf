"""LoRA adapters as published weights: the learner writes them, servers load them beside their weights.

A version is one safetensors file in PEFT's format, with the settings of the adapter (PEFT's
``adapter_config.json``) in its metadata: one file travels, and one digest covers both.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import structlog

from bus import Blobs, BusError, NotFound
from bus.messages import PolicyPublished
from engine.inference import adapters
from engine.inference.completion import InferenceError, ServerRefused
from engine.inference.vllm import CONTROL_SECONDS, VllmClient
from engine.lineage import Version
from engine.weights import store
from engine.weights.loaders import BUS_SCHEME, Cache, FetchFailed, Turn, UpdateRefused, WeightLoader
from engine.weights.publisher import FilePublisher, Policy
from engine.weights.store import Release

if TYPE_CHECKING:
    import torch

FILE_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
_METADATA = "adapter_config"
_FORGET_SECONDS = 5.0
_CONFIG_KEYS = frozenset({"peft_type", "r", "lora_alpha", "target_modules"})

log = structlog.get_logger("spade.weights")


class AdapterPublisher(FilePublisher):
    """Writes adapters, each into a directory that PEFT loads; ``settings`` is their adapter_config.json."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, Any],
        *,
        bus: bool = False,
        keep: int = 3,
        seconds: float = 3600.0,
    ) -> None:
        self._settings = json.dumps(settings, sort_keys=True)
        super().__init__(
            directory,
            bus=bus,
            keep=keep,
            seconds=seconds,
            file_name=FILE_NAME,
            metadata={_METADATA: self._settings},
        )

    def begin(
        self, version: Version, policy: Policy, *, dtype: torch.dtype | None = None
    ) -> Callable[[], Release]:
        """Write the adapters of ``policy`` at once: they are small."""
        release = self.release(version, policy.adapters(), dtype=dtype)
        return lambda: release

    def release(
        self, version: Version, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None
    ) -> Release:
        """Write ``version``. Raises WeightFault when another adapter was published under it, OSError."""
        release = super().release(version, tensors, dtype=dtype)
        home = self._directory / f"{version.fence}-{version.step}"
        (home / CONFIG_NAME).write_text(self._settings)
        return release


@dataclass
class _Copy:
    """A copy that a server may still read: vLLM reads an adapter again after it left its memory."""

    directory: Path
    unloaded_at: float | None = None


class AdapterLoader(WeightLoader):
    """Loads each version's adapter beside earlier ones, and unloads those that no request uses any more.

    The ``keep`` newest stay. An older one is unloaded when the server reports no request with it, or
    ``request_seconds`` after a newer one came: until then a request that names it may be on its way. Its copy
    under ``directory`` is removed ``request_seconds`` later, as are copies of servers that ended.
    """

    def __init__(
        self,
        run: str,
        blobs: Blobs,
        directory: Path,
        *,
        keep: int,
        request_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._blobs, self._directory = run, blobs, directory
        self._keep, self._request_seconds, self._clock = keep, request_seconds, clock
        self._copies: dict[tuple[str, str], _Copy] = {}  # by server and name
        self._surpassed: dict[tuple[str, str], float] = {}
        self._started = False

    async def carries(self, client: VllmClient, policy: PolicyPublished) -> bool:
        """Return whether requests may name the adapter of ``policy``.

        It may have been loaded by a role that died, or by a call whose answer was lost. An adapter of another
        run of the same name does not count.
        """
        name = adapters.name(self._run, policy.version)
        await self._start()
        loaded = await client.adapters()
        self._reconcile(client, loaded)
        root = loaded.get(name)
        if root is None or not await anyio.to_thread.run_sync(_is_copy, Path(root), policy):
            return False
        client.adapter = name
        return True

    async def bring(
        self,
        client: VllmClient,
        policy: PolicyPublished,
        *,
        cache: Cache,
        load_seconds: float,
        turn: Turn | None = None,
    ) -> float:
        """Load the adapter under a name of its own; sampling goes on, so no turn is needed.

        One that is loaded already has failed its canary and is loaded again, from another path: vLLM's prefix
        cache goes by name and path.
        """
        name = adapters.name(self._run, policy.version)
        await self._start()
        loaded = await client.adapters()
        self._reconcile(client, loaded)
        if name in loaded:
            await self._unload(client, name)
        place = await self._localise(policy)
        try:
            await client.load_adapter(name, str(place), deadline=load_seconds)
        except ServerRefused as error:
            # A request that was sent again after a lost answer is refused as well: it is there already.
            if (await client.adapters()).get(name) != str(place):
                self._retire(client, name, place)
                raise UpdateRefused(
                    f"the adapter was refused: {error.what}",
                    where=client.url,
                    remedy="A server that you start yourself needs the flags for adapters (docs/weights.md), "
                    "and must be able to read the role's weights-cache.",
                ) from error
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._forget(client, name, place)
            raise
        self._hold(client, name, place)
        client.adapter = name
        return 0.0

    async def _start(self) -> None:
        """Note the copies that an earlier role left: a server that goes on may still read them."""
        if self._started:
            return
        self._started = True
        home = self._directory.resolve()
        left = await anyio.to_thread.run_sync(lambda: list(home.iterdir()) if home.is_dir() else [])
        for path in left:
            self._copies["", path.name] = _Copy(path, self._clock())

    def statistics(self) -> dict[str, float]:
        """Copies on the disk, and loaded adapters that a newer one has surpassed."""
        return {"copies": float(len(self._copies)), "surpassed": float(len(self._surpassed))}

    def ended(self, client: VllmClient) -> None:
        """Retire the server's copies. A server that is seen again keeps its adapters."""
        self._reconcile(client, {})

    def _hold(self, client: VllmClient, name: str, place: Path) -> None:
        """Keep a copy of ours while the server has it, also a retired one."""
        if place.parent == self._directory.resolve():
            self._copies = {key: one for key, one in self._copies.items() if one.directory != place}
            self._copies[client.url, name] = _Copy(place)

    def _reconcile(self, client: VllmClient, loaded: Mapping[str, str]) -> None:
        """Keep the adapters that the server has ``loaded`` (name -> path), retire the rest.

        The server may have been restarted, or an earlier role may have loaded them.
        """
        for url, name in [key for key in self._surpassed if key[0] == client.url]:
            if name not in loaded:
                del self._surpassed[url, name]
        for key, copy in list(self._copies.items()):
            if key[0] == client.url and copy.unloaded_at is None and key[1] not in loaded:
                del self._copies[key]
                self._retire(client, key[1], copy.directory)
        for name, root in loaded.items():
            if (client.url, name) not in self._copies:
                self._hold(client, name, Path(root))

    async def reject(self, client: VllmClient, policy: PolicyPublished) -> None:
        """Unload an adapter that failed its canary; no request has named it."""
        await self._unload(client, adapters.name(self._run, policy.version))
        client.adapter = ""

    async def settled(self, client: VllmClient, policy: PolicyPublished) -> None:
        """Unload unused adapters, now that ``policy`` was announced; failures are repeated next time."""
        now, current = self._clock(), adapters.name(self._run, policy.version)
        try:
            loaded = await client.adapters()
            self._reconcile(client, loaded)
            names = [name for name in loaded if name != current and adapters.run_of(name) == self._run]
            for name in names:
                self._surpassed.setdefault((client.url, name), now)
            old = names[: max(0, len(names) + 1 - self._keep)]
            used = await self._in_use(client) if old else None
            for name in old:
                late = now - self._surpassed[client.url, name] >= self._request_seconds
                if late or (used is not None and name not in used):
                    await self._unload(client, name)
        except InferenceError as error:
            log.warning("adapters_not_unloaded", server=client.url, reason=error.what)
        await anyio.to_thread.run_sync(self._tidy, now)

    async def _in_use(self, client: VllmClient) -> set[str] | None:
        """Return the adapters of running and waiting requests, None when the server does not report them."""
        return adapters.adapters_in_use(await client.metrics(deadline=CONTROL_SECONDS))

    async def _unload(self, client: VllmClient, name: str) -> None:
        try:
            await client.unload_adapter(name)
        except ServerRefused as error:
            log.debug("adapter_not_unloaded", server=client.url, adapter=name, reason=error.what)
        self._surpassed.pop((client.url, name), None)
        if (client.url, name) in self._copies:
            self._retire(client, name, self._copies.pop((client.url, name)).directory)

    async def _forget(self, client: VllmClient, name: str, place: Path) -> None:
        """Unload an adapter whose load failed or has an unknown outcome."""
        try:
            await client.unload_adapter(name, deadline=_FORGET_SECONDS)
        except InferenceError as error:
            log.debug("adapter_not_unloaded", server=client.url, adapter=name, reason=error.what)
        self._retire(client, name, place)

    def _retire(self, client: VllmClient, name: str, place: Path) -> None:
        self._copies[client.url, f"{name} in {place.name}"] = _Copy(place, self._clock())

    def _tidy(self, now: float) -> None:
        """Remove copies that no request can need any more."""
        for key, copy in list(self._copies.items()):
            gone = copy.unloaded_at
            if gone is not None and now - gone >= self._request_seconds:
                shutil.rmtree(copy.directory, ignore_errors=True)
                del self._copies[key]

    async def _localise(self, policy: PolicyPublished) -> Path:
        """Return a new directory with the adapter as PEFT has it, checked against its digest.

        Raises UpdateRefused or FetchFailed.
        """
        place = self._directory.resolve() / f"{Version.unpack(policy.version)}-{uuid.uuid4().hex[:8]}"
        try:
            await anyio.to_thread.run_sync(lambda: place.mkdir(parents=True))
            await self._fetch(policy, place / FILE_NAME)
            await anyio.to_thread.run_sync(_prove, policy, place)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(lambda: shutil.rmtree(place, ignore_errors=True))
            if isinstance(error, store.WeightFault):
                raise UpdateRefused(error.what, where=policy.uri) from error
            if isinstance(error, OSError):
                raise FetchFailed(f"the adapter could not be written: {error}", where=policy.uri) from error
            raise
        return place

    async def _fetch(self, policy: PolicyPublished, path: Path) -> None:
        parts = urlsplit(policy.uri)
        if parts.scheme != BUS_SCHEME:
            source = store.local_path(policy.uri)
            if not source.is_file():
                raise store.WeightFault("the published adapter is gone", where=str(source))
            await anyio.to_thread.run_sync(shutil.copyfile, source, path)
            return
        try:
            await self._blobs.save(parts.path, path)
        except NotFound as error:
            what = f"the adapter is not on the bus any more: {error}"
            raise UpdateRefused(what, where=policy.uri) from error
        except BusError as error:
            raise FetchFailed(f"the adapter could not be fetched: {error}", where=policy.uri) from error


def _is_copy(place: Path, policy: PolicyPublished) -> bool:
    """Return whether ``place`` holds the adapter of ``policy``."""
    try:
        store.check(place / FILE_NAME, policy.sha256, policy.size)
    except (store.WeightFault, OSError):
        return False
    return True


def _prove(policy: PolicyPublished, place: Path) -> None:
    """Check the file, and write its settings beside it. Raises store.WeightFault."""
    from safetensors import SafetensorError, safe_open

    path = place / FILE_NAME
    store.check(path, policy.sha256, policy.size)
    try:
        with safe_open(path, framework="numpy") as file:
            settings = (file.metadata() or {}).get(_METADATA, "")
    except SafetensorError as error:
        raise store.WeightFault(f"this is no safetensors file: {error}", where=policy.uri) from error
    try:
        known = json.loads(settings)
    except ValueError:
        known = None
    if not isinstance(known, dict) or not known.keys() >= _CONFIG_KEYS:
        raise store.WeightFault(
            "these are whole weights, not an adapter",
            where=policy.uri,
            remedy="Learner and servers must have the same [learner.lora] publish.",
        )
    (place / CONFIG_NAME).write_text(settings)
