"""Memory that the allocator keeps although nobody uses it."""

from __future__ import annotations

import ctypes
import sys


def _trim() -> ctypes._NamedFuncPointer | None:
    """Return glibc's ``malloc_trim``, None where the C library has none (musl, macOS)."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if function is not None:
        function.argtypes, function.restype = [ctypes.c_size_t], ctypes.c_int
    return function


_function = _trim()


def release() -> bool:
    """Give the free pages of the C heap back to the system; return whether there were any.

    Tensors of ever other sizes (micro-batches, prefills) leave holes that glibc keeps: a learner on a CPU
    doubles its resident memory within an hour. Takes milliseconds and holds up threads that allocate.
    """
    return bool(_function(0)) if _function is not None else False
