"""The archive of a run: every accepted program in a file named by the SHA-256 of its text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from engine.files import replace

FOLDER = "archive"


class ProgramArchive:
    """Programs below ``directory/archive``. Damaged files count as missing."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER

    def path(self, environment: str) -> Path:
        """Return the file of the program with this digest."""
        return self._folder / f"{environment}.py"

    def put(self, source: str) -> str:
        """Write a program atomically, unless it exists undamaged; return its digest. Raises OSError."""
        data = source.encode()
        environment = hashlib.sha256(data).hexdigest()
        target = self.path(environment)
        if self.get(environment) is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace(target, data)
        return environment

    def get(self, environment: str) -> str | None:
        """Return a program, None when it is missing or does not match its name."""
        try:
            data = self.path(environment).read_bytes()
        except FileNotFoundError:
            return None
        return data.decode() if hashlib.sha256(data).hexdigest() == environment else None

    def __iter__(self) -> Iterator[str]:
        """Yield the digests of all programs, sorted."""
        yield from sorted(path.stem for path in self._folder.glob("*.py"))
