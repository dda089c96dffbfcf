"""A safetensors file that several processes write at once, each its own tensors into their places.

All of them know names, types and shapes of all tensors, which are the layout.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_KINDS = {
    f"torch.{name}": kind
    for name, kind in {
        "bfloat16": "BF16", "float16": "F16", "float32": "F32", "float64": "F64", "uint8": "U8", "int8": "I8",
        "int16": "I16", "int32": "I32", "int64": "I64", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3",
    }.items()
}  # fmt: skip
_PIECE = 1 << 26


def write(
    path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write the header and the tensors, and flush them to the disk.

    Others write those on the meta device, perhaps meanwhile. Wide elements come first, so that each tensor is
    aligned. Raises OSError.
    """
    import torch

    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in sorted(tensors, key=lambda name: -tensors[name].element_size()):
        tensor, start = tensors[name], offset
        offset += tensor.nbytes
        kind = _KINDS[str(tensor.dtype)]
        table[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [start, offset]}
    encoded = json.dumps(table, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        _put(handle, memoryview(len(encoded).to_bytes(8, "little") + encoded), 0)
        for name, tensor in tensors.items():
            if not tensor.is_meta:
                data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                _put(handle, data.data, 8 + len(encoded) + table[name]["data_offsets"][0])
        os.fsync(handle)
    finally:
        os.close(handle)


def _put(handle: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done : done + _PIECE], offset + done)
