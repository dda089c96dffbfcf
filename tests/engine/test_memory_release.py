"""What the allocator keeps is given back."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Blocks below the mmap threshold, every second one freed: the holes stay resident until they are trimmed.
HOLES = """
import ctypes
from pathlib import Path
from engine import memory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
blocks = [libc.malloc(100_000) for _ in range(1000)]
for block in blocks:
    ctypes.memset(block, 1, 100_000)
for block in blocks[:-1:2]:
    libc.free(block)
before = resident()
released = memory.release()
print(int(released), before - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc_trim")
def test_holes_between_blocks_in_use_are_given_back() -> None:
    found = subprocess.run(
        [sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, timeout=50
    )
    released, freed = map(int, found.stdout.split())
    assert released
    assert freed > 40_000_000
