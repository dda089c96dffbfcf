"""Keys and certificates of clients: one nkey a role in a file of its own, a CA to trust.

A seed file holds one line, the seed of an nkey user (``SU...``), as other NATS tools write it.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable
from pathlib import Path

import nkeys

from bus.access import check_role
from bus.errors import BusError

SUFFIX = ".seed"
_AGAIN = "`spade bus provision` writes one for each role, with --role NAME for one of yours, too."


def seed_file(place: Path | str, role: str) -> Path:
    """Return the seed file for ``role``: ``place`` itself, or ROLE.seed in it when it is a directory.

    Raises BusError when there is none.
    """
    path = Path(place).expanduser()
    if path.is_dir():
        path = path / f"{check_role(role)}{SUFFIX}"
    if not path.is_file():
        raise BusError(f"there is no key of role {role} at {path}", remedy=_AGAIN)
    return path


def read_seed(path: Path | str) -> str:
    """Return the seed in a file. Raises BusError: unreadable, readable by others, no user's seed."""
    path = Path(path)
    try:
        text = path.read_text().strip()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise BusError(f"the key {path} cannot be read: {error}", remedy=_AGAIN) from error
    if mode & 0o077:
        raise BusError(f"the key {path} can be read by others", remedy=f"chmod 600 {path}")
    public_key(text, str(path))
    return text


def public_key(seed: str, source: str = "the seed") -> str:
    """Return the public key (``U...``) of a user's seed. Raises BusError that names ``source``."""
    try:
        prefix, _ = nkeys.decode_seed(bytearray(seed.encode()))
        if prefix != nkeys.PREFIX_BYTE_USER:
            raise BusError(f"{source} is no user's nkey seed", remedy=_AGAIN)
        pair = nkeys.from_seed(bytearray(seed.encode()))
    except (nkeys.NkeysError, ValueError) as error:
        raise BusError(f"{source} holds no nkey seed", remedy=_AGAIN) from error
    try:
        return str(pair.public_key.decode())
    finally:
        pair.wipe()


def make_seed() -> str:
    """Return the seed of a new user."""
    return str(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER).decode())


def provide_seeds(directory: Path, roles: Iterable[str]) -> dict[str, str]:
    """Return the public key of each role; a role without a seed file in ``directory`` gets one (0600).

    Raises BusError when an existing file is no seed: it is not replaced.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = {}
    for role in roles:
        path = directory / f"{check_role(role)}{SUFFIX}"
        if not path.exists():
            write_private(path, make_seed() + "\n")
        found[role] = public_key(read_seed(path), str(path))
    return found


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, all of it or nothing."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def trust(ca: Path | str | None) -> ssl.SSLContext:
    """Return a TLS context that trusts the certificates in ``ca`` (None: the system's). Raises BusError."""
    try:
        return ssl.create_default_context(cafile=str(Path(ca).expanduser()) if ca else None)
    except (OSError, ssl.SSLError) as error:
        raise BusError(
            f"the certificates in {ca} cannot be used: {error}", remedy="Name a PEM file of the broker's CA."
        ) from error
