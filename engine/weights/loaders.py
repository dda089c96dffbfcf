"""The server's side of new weights: loaders bring a published version into a running vLLM server.

A loader proves the file before it changes anything: it checks the digest, the names and the shapes while the
server goes on sampling. Only the load itself stands inside the pause.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import structlog

from bus import Blobs, BusError, NotFound
from bus.messages import PolicyPublished
from engine.inference.completion import InferenceError, ServerStuck
from engine.inference.vllm import CONTROL_SECONDS, VllmClient
from engine.lineage import Version
from engine.weights import store

Cache = Literal["recompute", "keep"]
Turn = Callable[[], Awaitable[None]]

BUS_SCHEME = "bus"
_CACHED = 2  # files kept in the cache: the newest version's, and the one before
_POLL_SECONDS = 0.5

log = structlog.get_logger("spade.weights")


class UpdateRefused(InferenceError):
    """The new weights are missing, damaged or of another model. The server keeps the old ones."""


class FetchFailed(InferenceError):
    """The new weights could not be fetched this time. The server keeps the old ones; try again."""


class ServerBroken(InferenceError):
    """The server's weights are unknown or wrong: restart it before it serves."""


class WeightLoader(ABC):
    """Brings versions into servers. One object serves all servers of a role."""

    @abstractmethod
    async def bring(
        self,
        client: VllmClient,
        policy: PolicyPublished,
        *,
        cache: Cache,
        load_seconds: float,
        turn: Turn | None = None,
    ) -> float:
        """Bring ``policy`` into the server behind ``client``; return the seconds without sampling.

        ``turn`` is awaited before the pause. Loaders whose servers are paused by the learner ignore it.

        Raises UpdateRefused or FetchFailed (nothing was changed), ServerBroken (restart the server), or
        ServerGone and ServerStuck before anything was changed.
        """

    async def carries(self, client: VllmClient, policy: PolicyPublished) -> bool:
        """Return whether the server samples with ``policy``.

        A paused server with that label does not: its role died before the resume, or a canary failed.
        """
        return await client.version() == policy.version and not await client.paused()

    async def reject(self, client: VllmClient, policy: PolicyPublished) -> None:
        """Stop sampling with ``policy``, whose canary failed for good."""
        await client.pause(clear_cache=False)

    async def settled(self, client: VllmClient, policy: PolicyPublished) -> None:  # noqa: B027 - most keep none
        """Release what came before ``policy``, which was announced just now."""

    def ended(self, client: VllmClient) -> None:  # noqa: B027 - most keep none
        """Release what was kept for the server behind ``client``, which has ended or is unreachable."""

    async def overtaken(self, client: VllmClient, policy: PolicyPublished) -> bool:
        """Return whether the learner has brought a newer version than ``policy`` into the server."""
        return False


class FileLoader(WeightLoader):
    """Loads files from a disk that the learner, this role and the server all see."""

    def __init__(self) -> None:
        self._fetching = anyio.Lock()
        self._checked: tuple[Path, int, str, Path | None] | None = None

    async def bring(
        self,
        client: VllmClient,
        policy: PolicyPublished,
        *,
        cache: Cache,
        load_seconds: float,
        turn: Turn | None = None,
    ) -> float:
        """Check the file, wait for the turn, pause, load, label and resume."""
        root, _ = await client.model()
        async with self._fetching:
            path = await self._fetch(policy, Path(root) if root else None)
        if turn is not None:
            await turn()
            if not path.is_file():
                raise UpdateRefused("the published weights are gone", where=str(path))
        with anyio.CancelScope(shield=True):
            # Bounded by its deadlines. A cancellation waits, so that no half-loaded server stays behind.
            await _open(client)
            started = time.perf_counter()
            try:
                await client.pause(clear_cache=cache == "recompute")
            except InferenceError:
                await _close(client)
                await client.resume()
                raise
            try:
                await client.update_weights({"path": str(path)}, deadline=load_seconds)
                await client.finish_update(policy.version)
                await client.resume()
            except InferenceError as error:
                raise ServerBroken(f"loading new weights failed: {error.what}", where=client.url) from error
        return time.perf_counter() - started

    async def _fetch(self, policy: PolicyPublished, model: Path | None) -> Path:
        """Return the local file of ``policy`` after its check, once for all servers of the same ``model``.

        Names and shapes are compared where the directory ``model`` is visible here.
        """
        try:
            path = await self._local(policy)
            seen = (path, path.stat().st_mtime_ns if path.is_file() else 0, policy.sha256, model)
            if self._checked != seen:
                check = partial(store.check, model=model)
                await anyio.to_thread.run_sync(check, path, policy.sha256, policy.size)
                self._checked = seen
        except store.WeightFault as fault:
            raise UpdateRefused(fault.what, where=fault.where) from fault
        except OSError as error:
            raise FetchFailed(f"the weights cannot be read: {error}", where=policy.uri) from error
        return path

    async def _local(self, policy: PolicyPublished) -> Path:
        """Return the path of the file of ``policy`` on this host."""
        return store.local_path(policy.uri)


class BusLoader(FileLoader):
    """Fetches files from the broker into ``directory``, once for all servers of the role.

    The directory holds the files of the last two versions; everything else in it is removed.
    """

    def __init__(self, blobs: Blobs, directory: Path) -> None:
        super().__init__()
        self._blobs, self._directory = blobs, directory.resolve()
        self._used: deque[str] = deque(maxlen=_CACHED)

    async def _fetch(self, policy: PolicyPublished, model: Path | None) -> Path:
        try:
            return await super()._fetch(policy, model)
        except UpdateRefused:
            self._cached(policy).unlink(missing_ok=True)
            raise

    def _cached(self, policy: PolicyPublished) -> Path:
        return self._directory / f"{policy.sha256}.safetensors"

    async def _local(self, policy: PolicyPublished) -> Path:
        parts, path = urlsplit(policy.uri), self._cached(policy)
        if parts.scheme != BUS_SCHEME:
            return await super()._local(policy)
        self._make_room(path.name)
        if path.is_file() and path.stat().st_size == policy.size:
            return path
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            await self._blobs.save(parts.path, path)
        except NotFound as error:
            raise UpdateRefused(
                f"the weights are not on the bus any more: {error}", where=policy.uri
            ) from error
        except BusError as error:
            raise FetchFailed(f"the weights could not be fetched: {error}", where=policy.uri) from error
        return path

    def _make_room(self, name: str) -> None:
        """Remove old files before a fetch, so that the directory never holds more than two versions."""
        if name not in self._used:
            self._used.append(name)
        if self._directory.is_dir():
            for path in self._directory.iterdir():
                if path.name not in self._used:
                    path.unlink(missing_ok=True)


class NcclLoader(WeightLoader):
    """Waits while the learner writes the version into the server's device (``engine.weights.nccl``)."""

    async def bring(
        self,
        client: VllmClient,
        policy: PolicyPublished,
        *,
        cache: Cache,
        load_seconds: float,
        turn: Turn | None = None,
    ) -> float:
        """Return when the server carries the version. Raises FetchFailed if a newer one has arrived."""
        with anyio.move_on_after(load_seconds):
            while not await self.carries(client, policy):  # the server announces nothing: poll it
                if await self.overtaken(client, policy):
                    raise FetchFailed("newer weights have arrived already", where=client.url)
                await anyio.sleep(_POLL_SECONDS)
            return 0.0
        raise ServerStuck(
            f"the learner did not bring version {Version.unpack(policy.version)} in {load_seconds:.0f} s",
            where=client.url,
        )

    async def overtaken(self, client: VllmClient, policy: PolicyPublished) -> bool:
        """Return whether the server carries a newer version: the learner writes before it announces."""
        return await client.version() > policy.version


async def _open(client: VllmClient) -> None:
    """Open a session, after closing one that a dead role left open (it has loaded nothing).

    Raises UpdateRefused for a server that was started without our weight-transfer engine.
    """
    try:
        await client.start_update()
    except InferenceError as error:
        if "not configured" in error.what or "HTTP 404" in error.what:
            raise UpdateRefused(
                f"the server cannot take weights from files: {error.what}",
                where=client.url,
                remedy="Start it with the flags that `spade run --dry-run` shows (docs/weights.md).",
            ) from error
        if "already active" not in error.what:
            raise
        await client.finish_update(None)
        await client.start_update()


async def _close(client: VllmClient) -> None:
    """Close a session that has loaded nothing."""
    try:
        await client.finish_update(None, deadline=CONTROL_SECONDS)
    except InferenceError as error:
        log.debug("session_not_closed", server=client.url, reason=error.what)
