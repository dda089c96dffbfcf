"""The elements that changed between two published versions, as a file (``docs/weights.md``).

Elements are compared by their bits in the served data type. Each changed one has a place, written as the gap
to the one before it, and a new value, written as the signed difference of its bits where that fits a byte.
A gap symbol of all ones says "so many further, nothing changed there", so that gaps fit one, two or four
bytes, whichever is shortest for the tensor. At a learning rate of 1e-6 in bfloat16 nearly every change is to
the neighbouring value: two bytes a changed element.

A delta applies to the bytes of a whole file (an image) in place and can be undone exactly.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from engine.weights.layout import WIDTHS, Bytes, Entry, Layout, group, read
from engine.weights.store import WeightFault

FORMAT = "spade-delta-1"
_STEP, _BITS, _GAPS = ":step", ":bits", ".gaps"
_BLOCK = 1 << 24  # elements compared at a time
_SMALL = 127  # the largest difference that fits the signed byte of a step

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """The changes of one tensor of one kind: ``step`` adds to the bits, otherwise they are replaced."""

    gaps: NDArray[np.integer]
    values: NDArray[np.integer]
    step: bool


@dataclass
class Undo:
    """What is needed to take applied deltas back: their parts, and the old values that no step can tell."""

    done: list[tuple[Entry, Part, NDArray[np.unsignedinteger] | None]] = field(default_factory=list)


@dataclass(frozen=True)
class Delta:
    """A delta as read: the digests of the whole files on both sides, and its parts by tensor."""

    base: str
    whole: str
    parts: dict[str, tuple[Part, ...]]


def write(path: Path, base: Bytes, new: Bytes, *, digests: tuple[str, str], version: int) -> bool:
    """Write what turns ``base`` into ``new`` to ``path``; both are the bytes of whole files.

    ``digests`` are their SHA-256 in hex digits, ``version`` is the packed one of ``new``. Returns False, and
    writes nothing, where no delta can be made (other names, shapes or types). Memory: that of the changes,
    and one block of 2**24 elements. Raises OSError.
    """
    layout = read(base, where="base")
    if layout.header > len(new) or not np.array_equal(base[: layout.header], new[: layout.header]):
        return False
    if len(base) != len(new):
        return False
    tensors: dict[str, NDArray[np.generic]] = {}
    for entry in layout.entries:
        tensors |= _parts(entry, entry.bits(base), entry.bits(new))
    metadata = {
        "format": FORMAT,
        "version": str(version),
        "base": digests[0],
        "whole": digests[1],
        "size": str(len(new)),
        "layers": json.dumps(_layer_digests(tensors), sort_keys=True),
    }
    save_file(tensors, path, metadata=metadata)
    return True


def load(path: Path) -> Delta:
    """Read and check a delta file. Raises WeightFault for one that is damaged, OSError."""
    data = np.fromfile(path, np.uint8)
    layout = read(data, where=str(path))
    meta = layout.metadata
    if meta.get("format") != FORMAT:
        raise WeightFault(f"no delta of the format {FORMAT}: {meta.get('format')!r}", where=str(path))
    tensors = {entry.name: _typed(entry, data) for entry in layout.entries}
    try:
        wanted = dict(json.loads(meta["layers"]))
    except (KeyError, ValueError, TypeError) as error:
        raise WeightFault(f"a delta without digests of its layers: {error!r}", where=str(path)) from error
    found = _layer_digests(tensors)
    torn = sorted(layer for layer in wanted.keys() | found.keys() if wanted.get(layer) != found.get(layer))
    if torn:
        raise WeightFault(f"the delta is damaged in {', '.join(torn[:5])}", where=str(path))
    return Delta(meta.get("base", ""), meta.get("whole", ""), _grouped(tensors, str(path)))


def apply(image: Bytes, layout: Layout, delta: Delta, undo: Undo, *, where: str) -> None:
    """Change ``image``, the bytes of the whole file that ``delta`` starts from, in place.

    What was done is noted in ``undo``. Raises WeightFault for places outside a tensor or tensors that are not
    there; the image is then half-way, and ``take_back`` brings it back.
    """
    entries = {entry.name: entry for entry in layout.entries}
    for name, parts in delta.parts.items():
        entry = entries.get(name)
        if entry is None:
            raise WeightFault(f"the delta changes {name}, which the weights do not have", where=where)
        for part in parts:
            _check(entry, part, where)
            places = _places(part.gaps)
            if len(places) != len(part.values):
                raise WeightFault(f"{len(places)} places, {len(part.values)} values of {name}", where=where)
            bits = entry.bits(image)
            if len(places) and places[-1] >= len(bits):
                raise WeightFault(f"the delta changes {name} beyond its end", where=where)
            undo.done.append((entry, part, None if part.step else bits[places]))
            _change(bits, places, part)


def take_back(image: Bytes, undo: Undo) -> None:
    """Undo, in the opposite order, what was applied."""
    for entry, part, old in reversed(undo.done):
        bits, places = entry.bits(image), _places(part.gaps)
        if old is None:
            bits[places] -= part.values.astype(bits.dtype)
        else:
            bits[places] = old
    undo.done.clear()


def _change(bits: NDArray[np.unsignedinteger], places: Places, part: Part) -> None:
    if part.step:
        bits[places] += part.values.astype(bits.dtype)  # wraps, as the difference did
    else:
        bits[places] = part.values


def _check(entry: Entry, part: Part, where: str) -> None:
    width = WIDTHS[entry.dtype]
    fits = part.values.dtype == np.int8 if part.step else part.values.dtype == np.dtype(f"<u{width}")
    if not fits:
        raise WeightFault(f"the delta has values of another width for {entry.name}", where=where)


def changes(base: NDArray[np.unsignedinteger], new: NDArray[np.unsignedinteger]) -> Places:
    """Return where two flat arrays differ in their bits, int64, rising."""
    found = [
        np.flatnonzero(base[start : start + _BLOCK] != new[start : start + _BLOCK]) + start
        for start in range(0, len(base), _BLOCK)
    ]
    return np.concatenate(found).astype(np.int64) if found else np.zeros(0, np.int64)


def _parts(
    entry: Entry, base: NDArray[np.unsignedinteger], new: NDArray[np.unsignedinteger]
) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Yield the named arrays that describe the changes of one tensor."""
    places = changes(base, new)
    signed = f"<i{base.dtype.itemsize}"
    difference = (new[places] - base[places]).view(signed)
    small = (difference >= -_SMALL) & (difference <= _SMALL)
    for kind, chosen in ((_STEP, small), (_BITS, ~small)):
        at = places[chosen]
        if len(at):
            values = difference[chosen].astype(np.int8) if kind == _STEP else new[at]
            yield f"{entry.name}{kind}", values
            yield f"{entry.name}{kind}{_GAPS}", encode_gaps(at)


def encode_gaps(places: Places) -> NDArray[np.unsignedinteger]:
    """Return rising places as gap symbols of the width that takes the fewest bytes."""
    gaps = np.diff(places, prepend=-1) - 1

    def cost(width: int) -> int:
        return width * (len(gaps) + int((gaps // _escape(width)).sum()))

    width = min((1, 2, 4), key=cost)
    escape = _escape(width)
    ends = np.cumsum(gaps // escape + 1) - 1
    symbols = np.full(int(ends[-1]) + 1 if len(ends) else 0, escape, f"<u{width}")
    symbols[ends] = gaps % escape
    return symbols


def _places(symbols: NDArray[np.integer]) -> Places:
    escape = _escape(symbols.dtype.itemsize)
    real = symbols != escape
    places: Places = (np.cumsum(symbols.astype(np.int64) + real) - 1)[real]
    return places


def _escape(width: int) -> int:
    return int((1 << 8 * width) - 1)


def _typed(entry: Entry, data: Bytes) -> NDArray[np.integer]:
    bits = entry.bits(data)
    return bits.view(np.int8) if entry.dtype == "I8" else bits


def _grouped(tensors: dict[str, NDArray[np.integer]], where: str) -> dict[str, tuple[Part, ...]]:
    parts: dict[str, list[Part]] = {}
    for name, gaps in tensors.items():
        if not name.endswith(_GAPS):
            continue
        values = tensors.get(name.removesuffix(_GAPS))
        tensor, _, kind = name.removesuffix(_GAPS).rpartition(":")
        if values is None or kind not in ("step", "bits") or gaps.dtype.itemsize > 4:
            raise WeightFault(f"the delta has a stray part {name}", where=where)
        parts.setdefault(tensor, []).append(Part(gaps, values, kind == "step"))
    if 2 * sum(map(len, parts.values())) != len(tensors):
        raise WeightFault("the delta has values without places", where=where)
    return {name: tuple(found) for name, found in parts.items()}


def _layer_digests(
    tensors: dict[str, NDArray[np.integer]] | dict[str, NDArray[np.generic]],
) -> dict[str, str]:
    """Return the SHA-256 of each layer's parts: their names and bytes in the order of the names."""
    layers: dict[str, hashlib._Hash] = {}
    for name in sorted(tensors):
        digest = layers.setdefault(group(name.rpartition(":")[0]), hashlib.sha256())
        digest.update(f"{name}\0".encode())
        digest.update(np.ascontiguousarray(tensors[name]).data)
    return {layer: digest.hexdigest() for layer, digest in layers.items()}
