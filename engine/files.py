"""Files that are replaced at once or not at all, and the room on their disk."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path


def replace(target: Path, data: bytes, *, durable: bool = False) -> None:
    """Replace ``target`` by ``data`` atomically.

    Readers see the old bytes or the new ones, also after a crash. ``durable`` waits until the disk has them.
    Raises OSError.
    """
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        with partial.open("xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until the disk has a file, or the entries of a directory. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_mb(path: Path) -> int:
    """Return the free megabytes of the disk that holds ``path`` (or its nearest existing parent)."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free >> 20
