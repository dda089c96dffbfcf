"""The archive of a run: every accepted program whole, in a file named by the SHA-256 of its text."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

FOLDER = "archive"


class Archive:
    """Programs below ``directory/archive``. What is read back is what was written, or nothing."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER

    def path(self, environment: str) -> Path:
        """Return where the program with this digest lies, or would lie."""
        return self._folder / f"{environment}.py"

    def put(self, source: str) -> str:
        """Write a program atomically, unless it is there and whole; return its digest. Raises OSError."""
        data = source.encode()
        environment = hashlib.sha256(data).hexdigest()
        target = self.path(environment)
        if self.get(environment) is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace(target, data)
        return environment

    def get(self, environment: str) -> str | None:
        """Return a program, None when it is not there or is not what its name says."""
        try:
            data = self.path(environment).read_bytes()
        except FileNotFoundError:
            return None
        return data.decode() if hashlib.sha256(data).hexdigest() == environment else None

    def __iter__(self) -> Iterator[str]:
        """Yield the digests of all programs, sorted."""
        yield from sorted(path.stem for path in self._folder.glob("*.py"))


def replace(target: Path, data: bytes, *, durable: bool = False) -> None:
    """Write ``data`` to ``target`` so that a reader, or whoever comes after a crash, finds the old bytes or
    the new ones and nothing between. ``durable`` waits until the disk has them. Raises OSError.
    """
    handle, partial = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        Path(partial).replace(target)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
