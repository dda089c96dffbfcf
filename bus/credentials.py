"""Keys of clients, the account that holds their allow-lists on an external broker, a CA to trust.

A seed file holds one line, the seed of an nkey user (``SU...``), as other NATS tools write it.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterable
from pathlib import Path

import nkeys

from bus.access import ADMIN, ROLES, check_role, permissions
from bus.errors import BusError
from bus.subjects import Names

SEEDS, ACCOUNT = "seeds", "account.conf"
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
        key = str(nkeys.from_seed(bytearray(seed.encode())).public_key.decode())
    except (nkeys.NkeysError, ValueError) as error:
        raise BusError(f"{source} holds no nkey seed", remedy=_AGAIN) from error
    if not key.startswith("U"):
        raise BusError(f"{source} is no user's nkey seed", remedy=_AGAIN)
    return key


def write_account(run: str, directory: Path, roles: Iterable[str] = ()) -> None:
    """Write a key for each role into ``seeds``, and ``account.conf`` with their allow-lists.

    The server's configuration includes the account, which holds no secret. ``roles``, and roles that got a
    key before, are added to the built-in ones; existing keys stay. Raises BusError: a broken key file, a
    directory of another run or one that cannot be written.
    """
    names, seeds, account = Names(run), directory / SEEDS, directory / ACCOUNT
    added = [check_role(role) for role in roles]
    title = f'"spade-{run}"'
    if account.exists() and not account.read_text().startswith(f"{title}:"):
        raise BusError(
            f"{directory} holds the keys of another run",
            remedy=f"Use another directory, and include its {ACCOUNT} in the server's accounts, too.",
        )
    try:
        seeds.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.chmod(0o700)
        added += sorted(path.stem for path in seeds.glob(f"*{SUFFIX}"))
        users = [
            _user(names, role, seeds / f"{role}{SUFFIX}") for role in dict.fromkeys((ADMIN, *ROLES, *added))
        ]
        write_private(account, f"{title}: {{\n  jetstream: enabled\n  users: [\n{''.join(users)}  ]\n}}\n")
    except OSError as error:
        raise BusError(
            f"{directory} cannot be written: {error}", remedy="Name a directory of yours."
        ) from error


def _user(names: Names, role: str, path: Path) -> str:
    """Return the entry of a role in the account; a role without a key gets one."""
    if not path.exists():
        seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER).decode()
        write_private(path, f"{seed}\n")
    rights = {verb: {"allow": subjects} for verb, subjects in permissions(names, role).items()}
    key = public_key(read_seed(path), str(path))
    return f"    {{ nkey: {key}, permissions: {json.dumps(rights)} }}  # {role}\n"


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, all of it or nothing."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def trust(ca: Path | str) -> ssl.SSLContext:
    """Return a TLS context that trusts the certificates in ``ca``. Raises BusError."""
    try:
        return ssl.create_default_context(cafile=str(Path(ca).expanduser()))
    except (OSError, ssl.SSLError) as error:
        raise BusError(
            f"the certificates in {ca} cannot be used: {error}", remedy="Name a PEM file of the broker's CA."
        ) from error
