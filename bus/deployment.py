"""Configuration of external servers: one, or a cluster, with one account a run and one key a role.

Everything is a plain text file; :func:`write` has the server itself check it (``nats-server -t``).
"""

from __future__ import annotations

import ipaddress
import json
import re
import secrets
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from bus.access import ADMIN, ROLES, check_role, permissions
from bus.errors import BusError
from bus.keys import SUFFIX, provide_seeds, write_private
from bus.server import sync_interval
from bus.server_binary import locate
from bus.subjects import Names

PORT, CLUSTER_PORT = 4222, 6222
SEEDS, ACCOUNT = "seeds", "account.conf"
_SECRET = "routes.secret"
_NAME = re.compile(r"[A-Za-z0-9_.-]+|\[[0-9a-fA-F:.]+\]")
_CHECK_SECONDS = 20.0


@dataclass(frozen=True)
class Tls:
    """Paths on the servers: certificate, its key, and the CA that the cluster's other members use."""

    certificate: str
    key: str
    ca: str = ""


@dataclass(frozen=True)
class Server:
    """One server, as others reach it. Its ``name`` is unique in the cluster."""

    name: str
    host: str
    port: int = PORT
    cluster_port: int = CLUSTER_PORT

    @property
    def file(self) -> str:
        return f"{self.name}.conf"

    @property
    def listen(self) -> str:
        """The address to listen on: loopback for a loopback host, else all."""
        return self.host if is_loopback(self.host) else "0.0.0.0"


@dataclass(frozen=True)
class Deployment:
    """What to write. ``store`` is a directory on the servers; each uses a subdirectory of its own."""

    run: str
    servers: Sequence[Server]
    store: str
    store_gb: float = 64.0
    max_payload_mb: int = 8
    sync: str = "100ms"
    tls: Tls | None = None
    roles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Written:
    """What :func:`write` wrote: configuration files, seed files by role, and notes for a person."""

    configurations: list[Path] = field(default_factory=list)
    seeds: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def is_loopback(host: str) -> bool:
    """Whether only this host can reach ``host``."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def parse_servers(text: str) -> list[Server]:
    """Read ``HOST[:PORT[:CLUSTERPORT]]``, separated by commas. Raises BusError."""
    servers = []
    for number, item in enumerate((part.strip() for part in text.split(",")), start=1):
        match = re.fullmatch(r"(\[[^]]*\]|[^:]*)(?::(\d+))?(?::(\d+))?", item)
        if match is None or not _NAME.fullmatch(match[1]):
            raise BusError(f"{item!r} is no host", remedy="Use HOST, HOST:PORT or HOST:PORT:CLUSTERPORT.")
        ports = [int(match[2] or PORT), int(match[3] or CLUSTER_PORT)]
        if any(not 0 < port < 65536 for port in ports):
            raise BusError(f"{item!r} has a port outside 1 to 65535", remedy="Use another port.")
        servers.append(Server(f"n{number}", match[1], *ports))
    if len({(server.host, server.port) for server in servers}) != len(servers):
        raise BusError(f"{text!r} names a server twice", remedy="On one host they need ports of their own.")
    return servers


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


def configuration(deployment: Deployment, server: Server, secret: str) -> str:
    """Return the configuration of one server; ``secret`` is the password between the members."""
    quote = json.dumps
    text = f"""# nats-server -c {server.file}
listen: {quote(f"{server.listen}:{server.port}")}
server_name: {quote(server.name)}
max_payload: {deployment.max_payload_mb}MB
max_pending: {max(64, 2 * deployment.max_payload_mb)}MB
write_deadline: "10s"
disable_sublist_cache: true  # hardly any subject comes twice
lame_duck_duration: "30s"
lame_duck_grace_period: "2s"
jetstream {{
  store_dir: {quote(f"{deployment.store}/{server.name}")}
  max_mem: 268435456
  max_file: {int(deployment.store_gb * (1 << 30))}
  sync_interval: {quote(sync_interval(deployment.sync))}
}}
accounts {{
  include {quote(ACCOUNT)}
}}
"""
    if deployment.tls is not None:
        text += _tls(deployment.tls)
    if len(deployment.servers) > 1:
        text += _cluster(deployment, server, secret)
    return text


def _tls(tls: Tls, indent: str = "") -> str:
    quote = json.dumps
    lines = [f"cert_file: {quote(tls.certificate)}", f"key_file: {quote(tls.key)}", "timeout: 5"]
    if tls.ca:
        lines.append(f"ca_file: {quote(tls.ca)}")
    return f"{indent}tls {{\n" + "".join(f"{indent}  {line}\n" for line in lines) + f"{indent}}}\n"


def _cluster(deployment: Deployment, server: Server, secret: str) -> str:
    others = [other for other in deployment.servers if other is not server]
    routes = "".join(
        f'\n    "nats-route://spade:{secret}@{other.host}:{other.cluster_port}"' for other in others
    )
    tls = _tls(deployment.tls, "  ") if deployment.tls is not None else ""
    return f"""cluster {{
  name: "spade"
  listen: "{server.listen}:{server.cluster_port}"
  authorization {{ user: "spade", password: {json.dumps(secret)}, timeout: 5 }}
  routes: [{routes}
  ]
{tls}}}
"""


def write(deployment: Deployment, directory: Path, *, binary: Path | None = None) -> Written:
    """Write keys and configurations into ``directory`` (0700); existing keys stay as they are.

    ``deployment.roles``, and roles that got a key before, are added to the built-in ones. Raises BusError:
    a broken key file, a directory of another run or one that cannot be written, a configuration that the
    server refuses.
    """
    if len(deployment.servers) == 2:
        raise BusError("a cluster of two servers stops with either", remedy="Use one server, or three.")
    written = Written()
    # Nothing is written for what cannot be.
    Names(deployment.run)
    for role in deployment.roles:
        check_role(role)
    _check_owner(directory / ACCOUNT, deployment.run)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        known = sorted(path.stem for path in (directory / SEEDS).glob(f"*{SUFFIX}"))
        roles = dict.fromkeys((ADMIN, *ROLES, *deployment.roles, *known))
        keys = provide_seeds(directory / SEEDS, roles)
        written.seeds.update({role: directory / SEEDS / f"{role}{SUFFIX}" for role in keys})
        write_private(directory / ACCOUNT, account(deployment.run, keys))
        secret = _secret(directory)
        for server in deployment.servers:
            path = directory / server.file
            write_private(path, configuration(deployment, server, secret))
            written.configurations.append(path)
    except OSError as error:
        raise BusError(
            f"{directory} cannot be written: {error}", remedy="Name a directory of yours."
        ) from error
    program = locate(binary)
    for server in deployment.servers:
        _check(deployment, server, directory, program)
    written.notes.extend(_notes(deployment))
    return written


def _check_owner(path: Path, run: str) -> None:
    """Raise BusError when a directory was written for another run: its keys would change hands."""
    try:
        owner = path.read_text().partition(":")[0].strip().strip('"').removeprefix("spade-")
    except FileNotFoundError:
        return
    if owner != run:
        raise BusError(
            f"{path.parent} holds the keys of run {owner}",
            remedy=f"Use another directory, and include its {path.name} in the accounts of the server, too.",
        )


def _secret(directory: Path) -> str:
    path = directory / _SECRET
    if not path.exists():
        write_private(path, secrets.token_hex(24))
    return path.read_text().strip()


def _is_here(tls: Tls) -> bool:
    return all(Path(path).is_file() for path in (tls.certificate, tls.key, tls.ca) if path)


def _check(deployment: Deployment, server: Server, directory: Path, program: Path) -> None:
    """Have the server read its configuration; certificates that lie elsewhere are left out of it."""
    checked = deployment
    if deployment.tls is not None and not _is_here(deployment.tls):
        checked = replace(deployment, tls=None)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / server.file
        (Path(scratch) / ACCOUNT).write_text((directory / ACCOUNT).read_text())
        write_private(path, configuration(checked, server, _secret(directory)))
        try:
            result = subprocess.run(
                [str(program), "-t", "-c", str(path)], capture_output=True, text=True, timeout=_CHECK_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise BusError(f"{program} -t did not end within {_CHECK_SECONDS:g} s") from error
    if result.returncode != 0:
        why = (result.stderr or result.stdout).strip().replace(f"{path.parent}/", "")
        raise BusError(
            f"nats-server refuses the configuration {server.file}: {why.rstrip('.')}",
            remedy=f"It lies in {directory}. Give other values; keys that were written stay as they are.",
        )


def _notes(deployment: Deployment) -> list[str]:
    notes = []
    remote = [server.host for server in deployment.servers if not is_loopback(server.host)]
    if deployment.tls is None and remote:
        notes.append(
            "There is no TLS: keys keep roles apart, but who sees the network can read and alter what they "
            "say. Pass --tls-cert and --tls-key."
        )
    elif deployment.tls is not None and not _is_here(deployment.tls):
        notes.append("The certificates are not on this host, so that part was not checked.")
    return notes
