"""The cache of models that are built or unpacked once: ``$SPADE_CACHE``, else ``.cache/spade`` here."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import SpadeError

_LOCK_SECONDS = 1800.0
_POLL_SECONDS = 0.5


def directory() -> Path:
    """Return the absolute directory where built and unpacked models are kept between runs."""
    return Path(os.environ.get("SPADE_CACHE") or ".cache/spade").resolve()


def built_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return the directory ``target``. When it does not exist, ``build`` fills a new one that takes its name.

    Of several processes one builds and the others wait. Raises SpadeError when that takes too long.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock")):
        if target.is_dir():
            return target
        for leftover in target.parent.glob(f"{target.name}-*"):
            # Only a builder that was killed leaves one: the lock is ours now.
            shutil.rmtree(leftover, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}-", dir=target.parent))
        try:
            build(scratch)
            scratch.chmod(0o755)
            scratch.rename(target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    deadline = time.monotonic() + _LOCK_SECONDS
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise SpadeError(
                        f"Another process has been building {path.stem} for {_LOCK_SECONDS:.0f} s.",
                        where=str(path),
                        remedy="End that process; the lock goes with it.",
                    ) from None
                # File locks of other processes cannot be awaited with a deadline.
                time.sleep(_POLL_SECONDS)
        yield
