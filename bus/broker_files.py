"""Files for an external broker: one server configuration, one account per run, one key per role.

:func:`write` has the server itself check the configuration (``nats-server -t``). A cluster needs a
``cluster`` block in the configuration of each member (documentation of NATS); account and keys stay the
same.
"""

from __future__ import annotations

import ipaddress
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bus.access import ADMIN, ROLES, check_role, permissions
from bus.errors import BusError
from bus.keys import SUFFIX, provide_seeds, write_private
from bus.server_binary import locate
from bus.subjects import Names

PORT = 4222
SEEDS, ACCOUNT, SERVER = "seeds", "account.conf", "server.conf"
_HOST = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9a-fA-F:.]+\]")
_CHECK_SECONDS = 20.0


@dataclass(frozen=True)
class Tls:
    """Paths on the server: certificate and key (PEM)."""

    certificate: str
    key: str


@dataclass(frozen=True)
class BrokerPlan:
    """The server to configure: ``host`` and ``port`` as clients reach it, ``store`` a directory on it."""

    run: str
    store: str
    host: str = "127.0.0.1"
    port: int = PORT
    store_gb: float = 64.0
    max_payload_mb: int = 8
    sync: str = "100ms"
    tls: Tls | None = None
    roles: tuple[str, ...] = ()


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def parse_host(text: str) -> tuple[str, int]:
    """Read ``HOST[:PORT]``. Raises BusError."""
    match = re.fullmatch(r"(\[[^]]*\]|[^:]*)(?::(\d+))?", text.strip())
    port = int(match[2] or PORT) if match is not None else 0
    if match is None or not _HOST.fullmatch(match[1]) or not 0 < port < 65536:
        raise BusError(f"{text!r} is no host", remedy="Use HOST or HOST:PORT.")
    return match[1], port


def account(run: str, keys: Mapping[str, str]) -> str:
    """Return the account of a run: its roles by public key with their allow-lists. It holds no secret."""
    names = Names(run)
    users = []
    for role, key in keys.items():
        allowed = permissions(names, role)
        users.append(
            f"    # {role}\n    {{ nkey: {key}\n      permissions: {{\n"
            f"        publish: {{ allow: {_list(allowed.publish)} }}\n"
            f"        subscribe: {{ allow: {_list(allowed.subscribe)} }}\n      }} }}\n"
        )
    return f'"spade-{run}": {{\n  jetstream: enabled\n  users: [\n{"".join(users)}  ]\n}}\n'


def _list(subjects: Iterable[str]) -> str:
    lines = "".join(f"\n          {json.dumps(subject)}" for subject in subjects)
    return f"[{lines}\n        ]"


def jetstream_settings(*, max_payload_mb: int, store: str, store_gb: float, sync: str) -> str:
    """Return the settings of all brokers of ours: limits and storage."""
    sync = "always" if sync == "paranoid" else sync
    return f"""max_payload: {max_payload_mb}MB
max_pending: {max(64, 2 * max_payload_mb)}MB
write_deadline: "10s"
disable_sublist_cache: true  # hardly any subject comes twice
lame_duck_duration: "30s"
lame_duck_grace_period: "2s"
jetstream {{
  store_dir: {json.dumps(store)}
  max_mem: 268435456
  max_file: {int(store_gb * (1 << 30))}
  sync_interval: {json.dumps(sync)}
}}
"""


def configuration(plan: BrokerPlan) -> str:
    """Return the configuration of the server."""
    listen = plan.host if is_loopback(plan.host) else "0.0.0.0"
    common = jetstream_settings(
        max_payload_mb=plan.max_payload_mb, store=plan.store, store_gb=plan.store_gb, sync=plan.sync
    )
    text = f"# nats-server -c {SERVER}\nlisten: {json.dumps(f'{listen}:{plan.port}')}\n{common}"
    text += f"accounts {{\n  include {json.dumps(ACCOUNT)}\n}}\n"
    if plan.tls is not None:
        cert, key = json.dumps(plan.tls.certificate), json.dumps(plan.tls.key)
        text += f"tls {{\n  cert_file: {cert}\n  key_file: {key}\n  timeout: 5\n}}\n"
    return text


def write(plan: BrokerPlan, directory: Path, *, binary: Path | None = None) -> list[str]:
    """Write keys and configuration into ``directory`` (0700); return notes for a person.

    Existing keys stay as they are. ``plan.roles``, and roles that got a key before, are added to the built-in
    ones. Raises BusError: a broken key file, a directory of another run or one that cannot be written, a
    configuration that the server refuses.
    """
    # Nothing is written for a plan that cannot be right.
    Names(plan.run)
    for role in plan.roles:
        check_role(role)
    _check_owner(directory / ACCOUNT, plan.run)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        known = sorted(path.stem for path in (directory / SEEDS).glob(f"*{SUFFIX}"))
        keys = provide_seeds(directory / SEEDS, dict.fromkeys((ADMIN, *ROLES, *plan.roles, *known)))
        write_private(directory / ACCOUNT, account(plan.run, keys))
        write_private(directory / SERVER, configuration(plan))
    except OSError as error:
        raise BusError(
            f"{directory} cannot be written: {error}", remedy="Name a directory of yours."
        ) from error
    here = plan.tls is None or all(Path(path).is_file() for path in (plan.tls.certificate, plan.tls.key))
    _check(plan if here else replace(plan, tls=None), directory, locate(binary))
    if not here:
        return ["The certificate is not on this host, so that part was not checked."]
    if plan.tls is None and not is_loopback(plan.host):
        return [
            "There is no TLS: keys keep roles apart, but anybody on the network can read and alter "
            "the traffic. Pass --tls-cert and --tls-key."
        ]
    return []


def _check_owner(path: Path, run: str) -> None:
    """Raise BusError when a directory was written for another run: its keys would change hands."""
    if not path.exists():
        return
    owner = path.read_text().partition(":")[0].strip().strip('"').removeprefix("spade-")
    if owner != run:
        raise BusError(
            f"{path.parent} holds the keys of run {owner}",
            remedy=f"Use another directory, and include its {path.name} in the accounts of the server, too.",
        )


def _check(plan: BrokerPlan, directory: Path, program: Path) -> None:
    """Have the server read its configuration. Raises BusError when it refuses."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / SERVER
        (Path(scratch) / ACCOUNT).write_text((directory / ACCOUNT).read_text())
        write_private(path, configuration(plan))
        try:
            result = subprocess.run(
                [str(program), "-t", "-c", str(path)], capture_output=True, text=True, timeout=_CHECK_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise BusError(f"{program} -t did not end within {_CHECK_SECONDS:g} s") from error
    if result.returncode != 0:
        why = (result.stderr or result.stdout).strip().replace(f"{path.parent}/", "")
        raise BusError(
            f"nats-server refuses the configuration {SERVER}: {why.rstrip('.')}",
            remedy=f"It lies in {directory}. Give other values; keys that were written stay as they are.",
        )
