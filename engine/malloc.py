"""Free memory that the C allocator keeps: gives it back to the system."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

_ARENA_MAX = -8
"""``M_ARENA_MAX`` of glibc's malloc.h."""


def _of_glibc(name: str, *types: Any) -> Any:
    """Return a function of glibc that returns an int, None where the C library has none (musl, macOS)."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:
        function.argtypes, function.restype = types, ctypes.c_int
    return function


_malloc_trim = _of_glibc("malloc_trim", ctypes.c_size_t)
# A C library without malloc_trim is not glibc; its mallopt, if there is one, may do nothing.
_mallopt = _of_glibc("mallopt", ctypes.c_int, ctypes.c_int) if _malloc_trim is not None else None


def release() -> bool:
    """Give the free pages of the C heap back to the system; return whether there were any.

    Tensors of changing sizes (micro-batches, prefills) leave holes that glibc keeps: a learner on a CPU
    doubles its resident memory within an hour. Takes milliseconds and delays threads that allocate.
    """
    return bool(_malloc_trim(0)) if _malloc_trim is not None else False


def share_arenas(count: int = 2) -> bool:
    """Let the threads of this process share ``count`` heaps; return whether the C library does that.

    glibc gives each thread a heap of its own, up to eight per core, and free blocks between used ones stay
    there: worker threads of a process that lives for weeks fill one after another. Existing heaps stay.
    """
    return bool(_mallopt(_ARENA_MAX, count)) if _mallopt is not None else False
