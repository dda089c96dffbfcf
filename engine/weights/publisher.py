"""The learner's side of the paths ``file`` and ``bus``: whole files, deltas, blobs on the bus."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import anyio
import msgspec
import numpy as np

from bus import NotFound
from bus.interface import Blobs
from bus.messages import WeightDelta
from engine.errors import SpadeError
from engine.lineage import Version
from engine.weights import bus_capacity, delta, store
from engine.weights.buspath import SCHEME

if TYPE_CHECKING:
    import torch

DELTA_NAME = "delta.safetensors"
INDEX = "weights.index"


@dataclass(frozen=True)
class Release:
    """A version as it is announced (the fields of ``PolicyPublished``). ``uploads`` are (name, file) of the
    blobs that have to lie on the bus first, ``names`` all blobs that lead to it.
    """

    uri: str
    sha256: str
    size: int
    start: str = ""
    deltas: tuple[WeightDelta, ...] = ()
    uploads: tuple[tuple[str, Path], ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Link:
    version: Version
    delta: WeightDelta
    file: Path


class Outlet(ABC):
    """Where the learner hands out its versions."""

    @abstractmethod
    def release(
        self, version: Version, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None
    ) -> Release:
        """Bring ``version`` on its way and say how it is announced; floating-point tensors go as ``dtype``.

        Blocks; call it in the trainer's thread. Raises SpadeError, OSError.
        """

    async def upload(self, blobs: Blobs, release: Release) -> None:  # noqa: B027 - most need none
        """Put on the bus what ``release`` needs, before it is announced. Raises BusError, OSError."""

    async def tidy(self, blobs: Blobs) -> None:  # noqa: B027
        """Remove from the bus what leads to no version that is kept, after an announcement."""

    def attend(self, version: Version) -> tuple[str, ...]:
        """Bring ``version`` to servers that came later and cannot fetch it; return them. Blocks."""
        return ()


class Publisher(Outlet):
    """Writes versions one after another. ``deltas`` also writes what changed since the last.

    A whole version goes out (a keyframe) first, after ``keyframe_every`` - 1 deltas, and where deltas save
    nothing: a version that changed too much, or a chain that has grown as large as a whole file. ``keep``
    whole files stay on the disk; the bus never holds more than what leads to ``keep`` versions, the one that
    is put there among them: as much as ``keep`` whole files, or one more with deltas. An upload may take
    ``seconds``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        bus: bool = False,
        deltas: bool = False,
        keyframe_every: int = 8,
        keep: int = 3,
        seconds: float = 3600.0,
        file_name: str = store.FILE_NAME,
        metadata: dict[str, str] | None = None,
    ) -> None:
        self._directory, self._bus, self._keep = directory, bus, max(2, keep)
        self._file_name, self._metadata = file_name, metadata
        self._seconds = seconds
        self._longest = keyframe_every - 1 if deltas else 0
        self._whole: tuple[Version, store.Published] | None = None
        self._chain: list[_Link] = []
        self._key: tuple[Version, store.Published] | None = None
        self._index: _Index | None = None
        self.delta_seconds = 0.0  # of the last release, 0 for one without a delta

    def release(
        self, version: Version, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None
    ) -> Release:
        """Write ``version``. Raises WeightFault when other weights were published under it, OSError."""
        published = store.publish(
            self._directory,
            version,
            tensors,
            keep=self._keep,
            dtype=dtype,
            name=self._file_name,
            metadata=self._metadata,
        )
        began = perf_counter()
        link = self._link(version, published)
        self.delta_seconds = perf_counter() - began if link is not None else 0.0
        if link is None:
            self._chain, self._key = [], (version, published)
        else:
            self._chain.append(link)
        self._whole = (version, published)
        return self._on_bus(published) if self._bus else self._on_disk(published)

    async def upload(self, blobs: Blobs, release: Release) -> None:
        """Put on the bus what ``release`` needs. Raises ConfigError when versions of its size have no room
        there, SpadeError when it takes too long.
        """
        if not release.uploads:
            return
        bus_capacity.require(release.size, self._keep, await blobs.bound(), deltas=self._longest > 0)
        with anyio.move_on_after(self._seconds) as scope:
            await self._upload(blobs, release)
        if scope.cancelled_caught:
            size = sum(file.stat().st_size for _, file in release.uploads)
            raise SpadeError(
                f"The upload of {release.uploads[0][0]} ({size} bytes) to the bus did not end within "
                f"{self._seconds:g} s",
                where="server.weights",
                remedy=f"Is {bus_capacity.STREAM} full (spade bus top)? Then raise bus.store_gb. Else the "
                "way to the broker is too slow.",
            )

    async def _upload(self, blobs: Blobs, release: Release) -> None:
        index = self._index or await _read(blobs)
        known = [*index.releases, release.names]
        releases = known[-self._keep :]
        needed = {name for names in releases for name in names}
        surplus = {name for names in known for name in names} | set(index.surplus)
        self._index = _Index(releases=releases, surplus=sorted(surplus - needed))
        # The names are written down first: a learner that is killed leaves no blob that nobody knows.
        await blobs.put(INDEX, msgspec.json.encode(self._index))
        # Before the new one comes, so that it has room: servers are on their way to what stays.
        await self.tidy(blobs)
        for name, file in release.uploads:
            await blobs.put(name, file)

    async def tidy(self, blobs: Blobs) -> None:
        if self._index is not None and self._index.surplus:
            for name in self._index.surplus:
                await blobs.remove(name)
            self._index = _Index(releases=self._index.releases)

    def _link(self, version: Version, published: store.Published) -> _Link | None:
        """Write the delta to the last version; None where this one has to be whole."""
        if self._whole is None or len(self._chain) >= self._longest or self._whole[0] == version:
            return None
        base = self._whole[1]
        file = store.local_path(published.uri).with_name(DELTA_NAME)
        digests = (base.sha256, published.sha256)
        if not delta.write(file, _bytes(base), _bytes(published), digests=digests, version=version.pack()):
            return None
        size = file.stat().st_size
        if size + sum(link.delta.size for link in self._chain) >= published.size:
            file.unlink()
            return None
        made = WeightDelta(
            base=base.sha256,
            whole=published.sha256,
            uri=file.resolve().as_uri(),
            sha256=store.file_digest(file),
            size=size,
        )
        return _Link(version, made, file)

    def _on_disk(self, published: store.Published) -> Release:
        there = set(store.versions(self._directory))
        chain = [link.delta for link in self._chain if link.version in there]
        return Release(published.uri, published.sha256, published.size, deltas=tuple(chain))

    def _on_bus(self, published: store.Published) -> Release:
        assert self._key is not None
        key = f"weights.whole.{_name(self._key[0])}"
        links = [(f"weights.delta.{_name(link.version)}", link) for link in self._chain]
        uploads = [(name, link.file) for name, link in links[-1:]]
        if not links:
            uploads = [(key, store.local_path(published.uri))]
        return Release(
            f"{SCHEME}:{key}",
            published.sha256,
            published.size,
            start=self._key[1].sha256 if links else "",
            deltas=tuple(msgspec.structs.replace(link.delta, uri=f"{SCHEME}:{name}") for name, link in links),
            uploads=tuple(uploads),
            names=(key, *(name for name, _ in links)),
        )


class _Index(msgspec.Struct, frozen=True):
    """Which blobs lead to each kept version, oldest first, and which others may still be there."""

    releases: list[tuple[str, ...]] = []
    surplus: list[str] = []


async def _read(blobs: Blobs) -> _Index:
    """Return what a former learner wrote down; all of it is kept until newer versions take its place."""
    try:
        return msgspec.json.decode(await blobs.get(INDEX), type=_Index)
    except NotFound:
        return _Index()


def _name(version: Version) -> str:
    return f"{version.fence}-{version.step}"


def _bytes(published: store.Published) -> np.memmap[tuple[int, ...], np.dtype[np.uint8]]:
    return np.memmap(store.local_path(published.uri), np.uint8, mode="r")
