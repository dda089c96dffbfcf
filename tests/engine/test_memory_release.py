"""The allocator returns memory to the system."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Blocks below the mmap threshold, every second one freed: the holes stay resident until they are trimmed.
HOLES = """
import ctypes
from pathlib import Path
from engine import malloc

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
released = malloc.release()
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


ARENAS = """
import ctypes, re, sys, tempfile, threading
from engine import malloc

if sys.argv[1] == "shared":
    assert malloc.share_arenas(2)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
meet = threading.Barrier(12)

def work():
    meet.wait()
    libc.malloc(50_000)
    meet.wait()

threads = [threading.Thread(target=work) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.fopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.fclose.argtypes = [ctypes.c_void_p]
with tempfile.NamedTemporaryFile() as told:
    stream = libc.fopen(told.name.encode(), b"w")
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    print(len(re.findall(rb"<heap nr=", open(told.name, "rb").read())))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's mallopt")
def test_threads_share_few_heaps() -> None:
    counts = {
        how: int(
            subprocess.run(
                [sys.executable, "-c", ARENAS, how], capture_output=True, text=True, check=True, timeout=50
            ).stdout
        )
        for how in ("shared", "own")
    }
    assert counts["shared"] <= 2 < counts["own"]
