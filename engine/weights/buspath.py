"""Weights through the broker: named blobs, fetched into a local cache that the servers of a role share."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import msgspec
import structlog

from bus import BusError, NotFound
from bus.interface import Blobs
from engine.weights.outcome import FetchFailed, UpdateRefused
from engine.weights.paths import FilePath
from engine.weights.update_plan import Route

SCHEME = "bus"
_REMEMBERED = 2  # routes whose files are kept: that of the newest version, and of the one before

log = structlog.get_logger("spade.weights")


class BusPath(FilePath):
    """Fetches what a route needs once for all servers that read ``directory``, and checks its digest.

    The directory holds the files of the last two routes; what else lies there is removed.
    """

    def __init__(self, blobs: Blobs, directory: Path, *, hold: bool = False) -> None:
        super().__init__(hold=hold)
        self._blobs, self._directory = blobs, directory
        self._fetching = anyio.Lock()
        self._used: deque[set[str]] = deque(maxlen=_REMEMBERED)
        self.fetched_bytes = 0

    async def localise(self, route: Route) -> Route:
        async with self._fetching:
            self._tidy(route)
            uri = await self._fetch(route.uri, route.start, route.size) if route.uri else ""
            deltas = [
                msgspec.structs.replace(delta, uri=await self._fetch(delta.uri, delta.sha256, delta.size))
                for delta in route.deltas
            ]
        return Route(uri, route.start, route.sha256, route.size, tuple(deltas))

    def discard(self, route: Route) -> None:
        for digest in _digests(route):
            self._path(digest).unlink(missing_ok=True)

    def forget(self) -> None:
        """Empty the cache."""
        self._used.clear()
        if self._directory.is_dir():
            for path in self._directory.iterdir():
                path.unlink(missing_ok=True)

    async def _fetch(self, uri: str, sha256: str, size: int) -> str:
        parts = urlsplit(uri)
        if parts.scheme != SCHEME:
            return uri
        path = self._path(sha256)
        if path.is_file() and path.stat().st_size == size:
            return path.as_uri()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            info = await self._blobs.save(parts.path, path)
        except NotFound as error:
            raise UpdateRefused(f"the weights are not on the bus any more: {error}", where=uri) from error
        except (BusError, OSError) as error:
            raise FetchFailed(f"the weights could not be fetched: {error}", where=uri) from error
        if (info.sha256, info.size) != (sha256, size):
            path.unlink(missing_ok=True)
            raise UpdateRefused(
                f"the bus holds SHA-256 {info.sha256} ({info.size} bytes), "
                f"{sha256} ({size} bytes) was published",
                where=uri,
            )
        self.fetched_bytes += size
        return path.as_uri()

    def _path(self, sha256: str) -> Path:
        return self._directory.resolve() / f"{sha256}.safetensors"

    def _tidy(self, route: Route) -> None:
        """Make room: before a fetch, so that the bound holds at any time."""
        wanted = _digests(route)
        if wanted not in self._used:
            self._used.append(wanted)
        kept = {f"{digest}.safetensors" for used in self._used for digest in used}
        if self._directory.is_dir():
            for path in self._directory.iterdir():
                if path.name not in kept:
                    path.unlink(missing_ok=True)


def _digests(route: Route) -> set[str]:
    return {delta.sha256 for delta in route.deltas} | ({route.start} if route.uri else set())
