"""The bytes of one version's whole file in memory: what deltas are applied to, proved before it is used."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from bus.messages import WeightDelta
from engine.weights import delta
from engine.weights.layout import Bytes, Layout, read
from engine.weights.store import WeightFault, fetch, local_path

_CHUNK = 1 << 24
_TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}


class Image:
    """Holds at most one version; ``digest`` is the SHA-256 of its file in hex digits, empty without one.

    Memory: the size of the file and, while deltas are applied, theirs.
    """

    def __init__(self) -> None:
        self.digest = ""
        self._data: Bytes = np.zeros(0, np.uint8)
        self._layout = Layout((), {}, 0)

    @property
    def layout(self) -> Layout:
        """The layout of what it holds."""
        return self._layout

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor (a view, valid until the next change) in the order of the file."""
        for entry in self._layout.entries:
            raw = torch.from_numpy(self._data[entry.start : entry.stop])
            yield entry.name, raw.view(_TORCH[entry.dtype]).view(entry.shape)

    def read(self, uri: str, sha256: str, size: int) -> None:
        """Hold the whole file at ``uri``. Raises WeightFault when it is not what it should be: where that
        is seen only by its digest, the image then holds nothing, for the memory was used again.
        """
        if self.digest == sha256:
            return
        path = local_path(uri)
        try:
            self._fill(path, size)
        except OSError as error:
            raise WeightFault(f"weights cannot be read: {error}", where=str(path)) from error
        found = digest_of(self._data)
        if found != sha256:
            raise WeightFault(f"weights have SHA-256 {found}, {sha256} was published", where=str(path))
        self._layout = read(self._data, where=str(path))
        self.digest = sha256

    def apply(self, deltas: Sequence[WeightDelta]) -> None:
        """Apply a chain to what it holds. Raises WeightFault for a delta with another base, damaged ones, and
        a result without the promised digest: the image then holds what it held before.
        """
        undo = delta.Undo()
        before, self.digest = self.digest, ""
        reached, where = before, ""
        try:
            for one in deltas:
                where = one.uri
                found = self._load(one, reached)
                delta.apply(self._data, self._layout, found, undo, where=where)
                reached = found.whole
            if (made := digest_of(self._data)) != reached:
                raise WeightFault(f"the deltas lead to SHA-256 {made}, {reached} was published", where=where)
        except BaseException:
            delta.take_back(self._data, undo)
            self.digest = before
            raise
        self.digest = reached

    def _load(self, one: WeightDelta, held: str) -> delta.Delta:
        if one.base != held:
            raise WeightFault(f"the delta starts from {one.base}, {held or 'nothing'} is held", where=one.uri)
        try:
            found = delta.load(fetch(one.uri, one.sha256, one.size))
        except OSError as error:
            raise WeightFault(f"the delta cannot be read: {error}", where=one.uri) from error
        if (found.base, found.whole) != (one.base, one.whole):
            raise WeightFault("the delta leads from or to other weights than was said", where=one.uri)
        return found

    def _fill(self, path: Path, size: int) -> None:
        with path.open("rb", buffering=0) as stream:
            found = os.fstat(stream.fileno()).st_size
            if found != size:
                raise WeightFault(f"weights have {found} bytes, {size} were published", where=str(path))
            self.digest = ""
            if len(self._data) != size:
                self._data = np.zeros(0, np.uint8)  # the old memory first
                self._data = np.empty(size, np.uint8)
            view, place = self._data.data, 0
            while place < size:
                count = stream.readinto(view[place : place + _CHUNK])
                if not count:
                    raise WeightFault(f"weights end at {place} of {size} bytes", where=str(path))
                place += count


def digest_of(data: Bytes) -> str:
    """Return the hex SHA-256 of an array's bytes."""
    return hashlib.sha256(data.data).hexdigest()
