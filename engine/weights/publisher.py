"""The learner's side of the ways ``file`` and ``bus``: writes versions, and puts them on the bus."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import msgspec

from bus import Blobs, NotFound
from engine.errors import SpadeError
from engine.lineage import Version
from engine.weights import bus_capacity, store
from engine.weights.loaders import BUS_SCHEME
from engine.weights.store import Release

if TYPE_CHECKING:
    import torch

INDEX = "weights.index"


class Policy(Protocol):
    """The part of the learner's trainer that a publisher reads."""

    @property
    def sharded(self) -> bool: ...

    def weights(self) -> Mapping[str, torch.Tensor]: ...

    def write_weights(self, path: Path, dtype: torch.dtype | None = None) -> Future[None]: ...

    def adapters(self) -> Mapping[str, torch.Tensor]: ...

    def adapter_settings(self) -> dict[str, Any]: ...


class Publisher(ABC):
    """Hands out the learner's versions."""

    def begin(
        self, version: Version, policy: Policy, *, dtype: torch.dtype | None = None
    ) -> Callable[[], Release]:
        """Begin to write or send ``version``; call what is returned, in any thread, for its announcement.

        The weights of ``policy`` may change as soon as this returns. Call it in the trainer's thread. Both
        raise SpadeError, OSError.
        """
        release = self.release(version, policy.weights(), dtype=dtype)
        return lambda: release

    @abstractmethod
    def release(
        self, version: Version, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None
    ) -> Release:
        """Write or send ``version`` and return its announcement; floating-point tensors go as ``dtype``.

        Raises SpadeError, OSError.
        """

    async def upload(self, blobs: Blobs, release: Release) -> None:  # noqa: B027 - most need none
        """Put ``release`` on the bus, if it has a name there, before it is announced. Raises BusError."""

    async def tidy(self, blobs: Blobs) -> None:  # noqa: B027
        """Remove versions from the bus that are no longer kept, after an announcement."""

    def attend(self, version: Version) -> tuple[str, ...]:
        """Send ``version`` to servers that started later and cannot fetch it; return them. Blocks."""
        return ()


class FilePublisher(Publisher):
    """Writes each version as one file under ``directory``; with ``bus`` it also goes to the broker.

    ``keep`` versions stay on the disk and at most as many on the bus, a version that is being uploaded
    among them. An upload may take ``seconds``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        bus: bool = False,
        keep: int = 3,
        seconds: float = 3600.0,
        file_name: str = store.FILE_NAME,
        metadata: dict[str, str] | None = None,
    ) -> None:
        self._directory, self._bus, self._keep = directory, bus, max(2, keep)
        self._file_name, self._metadata, self._seconds = file_name, metadata, seconds
        self._index: _Index | None = None

    def begin(
        self, version: Version, policy: Policy, *, dtype: torch.dtype | None = None
    ) -> Callable[[], Release]:
        """Copy the weights of ``policy``; they are written behind the training, by each rank its part."""
        write = partial(policy.write_weights, dtype=dtype)
        finish = store.begin(self._directory, version, write, keep=self._keep, name=self._file_name)
        return (lambda: self._on_bus(version, finish())) if self._bus else finish

    def release(
        self, version: Version, tensors: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None
    ) -> Release:
        """Write ``version``. Raises WeightFault when other weights were published under it, OSError."""
        release = store.publish(
            self._directory,
            version,
            tensors,
            keep=self._keep,
            dtype=dtype,
            name=self._file_name,
            metadata=self._metadata,
        )
        return self._on_bus(version, release) if self._bus else release

    def _on_bus(self, version: Version, release: Release) -> Release:
        """Return ``release`` as an object on the bus."""
        name = f"weights.whole.{version.fence}-{version.step}"
        return replace(release, uri=f"{BUS_SCHEME}:{name}", name=name, file=store.local_path(release.uri))

    async def upload(self, blobs: Blobs, release: Release) -> None:
        """Put the file of ``release`` on the bus, if it has a name there.

        Raises ConfigError when versions of its size do not fit there, SpadeError when it takes too long.
        """
        if not release.name:
            return
        bus_capacity.require(release.size, self._keep, await blobs.bound())
        with anyio.move_on_after(self._seconds) as scope:
            await self._upload(blobs, release)
        if scope.cancelled_caught:
            raise SpadeError(
                f"The upload of {release.name} ({release.size} bytes) to the bus did not end within "
                f"{self._seconds:g} s",
                where="server.weights",
                remedy=f"Is {bus_capacity.STREAM} full (spade bus top)? Then raise bus.store_gb. Else the "
                "way to the broker is too slow.",
            )

    async def _upload(self, blobs: Blobs, release: Release) -> None:
        index = self._index or await _read(blobs)
        known = [name for name in index.kept if name != release.name] + [release.name]
        surplus = [*index.surplus, *known[: -self._keep]]
        self._index = _Index(kept=known[-self._keep :], surplus=surplus)
        # The names are stored first: a learner that is killed leaves no object that nothing names.
        await blobs.put(INDEX, msgspec.json.encode(self._index))
        await self.tidy(blobs)  # before the new one comes, so that it has room
        await blobs.put(release.name, release.file)

    async def tidy(self, blobs: Blobs) -> None:
        """Remove the versions beyond the newest ``keep``."""
        if self._index is not None and self._index.surplus:
            for name in self._index.surplus:
                await blobs.remove(name)
            self._index = _Index(kept=self._index.kept)


class _Index(msgspec.Struct, frozen=True):
    """The names of the versions on the bus, oldest first, and of those that are being removed."""

    kept: list[str] = []
    surplus: list[str] = []


async def _read(blobs: Blobs) -> _Index:
    """Return the index of an earlier learner, whose versions stay until newer ones replace them."""
    try:
        return msgspec.json.decode(await blobs.get(INDEX), type=_Index)
    except NotFound:
        return _Index()
