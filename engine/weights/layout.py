"""Where the tensors of a safetensors file lie: its header, read without copying what follows it."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.weights.store import WeightFault

Bytes = NDArray[np.uint8]

WIDTHS = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes of an element by safetensors' name of its type."""

_LENGTH = 8
_LARGEST_HEADER = 100 << 20


@dataclass(frozen=True)
class Entry:
    """One tensor: its bytes are ``[start, stop)`` of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def bits(self, data: Bytes) -> NDArray[np.unsignedinteger]:
        """Return its elements in the bytes of its file: flat unsigned integers of their width (a view)."""
        return data[self.start : self.stop].view(f"<u{WIDTHS[self.dtype]}")


@dataclass(frozen=True)
class Layout:
    """The tensors of a file in the order of their bytes, its metadata, and where its header ends."""

    entries: tuple[Entry, ...]
    metadata: dict[str, str]
    header: int

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape."""
        return {entry.name: entry.shape for entry in self.entries}


def read(data: Bytes, *, where: str) -> Layout:
    """Return the layout of the safetensors file whose bytes are ``data``.

    Raises WeightFault, with ``where``, when they are none: a header that cannot be read, an unknown type, a
    tensor that does not fit its place, or bytes that belong to no tensor.
    """
    if len(data) < _LENGTH:
        raise WeightFault("no safetensors file: it has no header", where=where)
    length = int(data[:_LENGTH].view("<u8")[0])
    end = _LENGTH + length
    if length > _LARGEST_HEADER or end > len(data):
        raise WeightFault("no safetensors file: its header is cut or too long", where=where)
    try:
        table = json.loads(data[_LENGTH:end].tobytes())
        metadata = {str(key): str(value) for key, value in table.pop("__metadata__", {}).items()}
        entries = sorted(
            (_entry(name, row, end) for name, row in table.items()),
            key=lambda entry: (entry.start, entry.stop),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise WeightFault(
            f"no safetensors file: its header cannot be read ({error!r})", where=where
        ) from error
    place = end
    for entry in entries:
        size = int(np.prod(entry.shape, dtype=np.int64)) * WIDTHS[entry.dtype]
        if entry.start != place or entry.stop - entry.start != size:
            raise WeightFault(f"no safetensors file: tensor {entry.name} is out of place", where=where)
        place = entry.stop
    if place != len(data):
        raise WeightFault(f"the file has {len(data)} bytes, its tensors end at {place}", where=where)
    return Layout(tuple(entries), metadata, end)


def group(name: str) -> str:
    """Return the layer that a tensor belongs to: its name up to the first number, else without its last part.

    ``model.layers.3.mlp.up_proj.weight`` is of ``model.layers.3``, ``model.norm.weight`` of ``model.norm``.
    """
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1]) or name


def _entry(name: str, row: dict[str, object], offset: int) -> Entry:
    dtype, shape, place = row["dtype"], row["shape"], row["data_offsets"]
    if dtype not in WIDTHS or not isinstance(shape, list) or not isinstance(place, list):
        raise ValueError(f"tensor {name} has type {dtype!r} and shape {shape!r}")
    start, stop = (int(edge) for edge in place)
    if not 0 <= start <= stop or any(int(size) < 0 for size in shape):
        raise ValueError(f"tensor {name} has bytes {start} to {stop}")
    return Entry(name, str(dtype), tuple(int(size) for size in shape), offset + start, offset + stop)
