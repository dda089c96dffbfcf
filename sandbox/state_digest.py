"""A digest of an environment's state, to compare instances. Stdlib only: runs beside the program.

Only plain values are read, so that no code of the program runs. The seed and generators derived from it are
ignored: storing the seed doesn't make two games different.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

from sandbox.contract import MODULE

_DEPTH, _NODES, _TEXT = 8, 20_000, 4096


def digest(env: object, seed: int) -> str:
    """Return a hash of the plain values that ``env`` holds after a reset with ``seed``."""
    hashed = hashlib.sha256()
    left = [_NODES]
    _feed(hashed, env, seed, left, _DEPTH)
    return hashed.hexdigest()


def _feed(hashed: Any, value: Any, seed: int, left: list[int], depth: int) -> None:
    left[0] -= 1
    if left[0] < 0 or depth < 0:
        return
    kind = type(value)
    if kind is int:
        text = "seed" if value == seed else hex(value) if value.bit_length() < 4 * _TEXT else "large"
    elif kind is str:
        text = value[:_TEXT].replace(str(seed), "seed")
    elif value is None or kind in (bool, float):
        text = repr(value)
    else:
        text = ""
    hashed.update(f"{kind.__name__}:{text};".encode("utf-8", "replace"))
    if not text:
        for part in _parts(kind, value):
            _feed(hashed, part, seed, left, depth - 1)


def _parts(kind: type, value: Any) -> Any:
    if kind is dict:
        return [part for pair in value.items() for part in pair]
    if kind in (list, tuple):
        return value
    if kind in (set, frozenset):
        # of plain values only: others have an order that depends on addresses
        return sorted(value, key=repr) if all(type(part) in (str, int, float) for part in value) else ()
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and value.size <= _NODES:
        return [value.tolist()]
    held = getattr(kind, "__dictoffset__", 0) and object.__getattribute__(value, "__dict__")
    return [part for pair in held.items() for part in pair] if type(held) is dict and _own(kind) else ()


def _own(kind: type) -> bool:
    """Return true when the class is one of the program's."""
    return bool(type.__getattribute__(kind, "__module__") == MODULE)
