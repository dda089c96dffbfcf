"""External brokers of the tests: a server on loopback, with keys and with TLS."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bus import Bus
from bus.access import ADMIN
from bus.credentials import ACCOUNT, SEEDS, write_account
from bus.server import locate
from bus.subjects import CONSUMERS, SECOND


def free_ports(count: int) -> list[int]:
    """Return ports without a listener at this moment."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("127.0.0.1", 0))
        return [int(listener.getsockname()[1]) for listener in listeners]


TOKEN = "a token of the tests"
SERVER = "server.conf"
JETSTREAM = 'jetstream { store_dir: "store", max_file: 8589934592, sync_interval: "100ms" }\n'
USUAL = f"max_payload: 8MB\n{JETSTREAM}"


@contextmanager
def plain_server(
    directory: Path, config: str = f'{USUAL}authorization {{ token: "{TOKEN}" }}\n'
) -> Iterator[str]:
    """Run one nats-server, for a whole test session for instance, without our launcher."""
    directory.mkdir(parents=True, exist_ok=True)
    place = directory / "nats.conf"
    place.write_text(f'listen: "127.0.0.1:-1"\nports_file_dir: "{directory}"\n{config}')
    with (directory / "nats.log").open("wb") as log:
        process = subprocess.Popen([str(locate()), "-c", str(place)], stderr=log, cwd=directory)
        try:
            yield _ports(directory / f"nats-server_{process.pid}.ports")
        finally:
            process.terminate()
            process.wait(10)


def _ports(path: Path) -> str:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            return str(json.loads(path.read_text())["nats"][0])
        time.sleep(0.005)
    raise TimeoutError(f"no ports file {path}")


@dataclass
class Broker:
    """A server that runs, or may be started."""

    run: str
    directory: Path
    port: int
    ca: Path | None
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def seed(self, role: str = ADMIN) -> Path:
        return self.directory / SEEDS / f"{role}.seed"

    def login(self, role: str = ADMIN) -> dict[str, Any]:
        """Return how a role logs in, as arguments of ``bus.connect``."""
        return {"seed_file": self.seed(role), "tls": self.ca}

    def start(self) -> None:
        with (self.directory / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                [str(locate()), "-c", SERVER], cwd=self.directory, stdout=log, stderr=log
            )

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait(10)


@contextmanager
def broker(
    directory: Path, run: str, *, tls: bool = False, start: bool = True, roles: Iterable[str] = ()
) -> Iterator[Broker]:
    """Configure and run a server; it may not listen yet (clients try again until it does)."""
    directory.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    write_account(run, directory, roles)
    (directory / SERVER).write_text(configuration(port) + (certify(directory) if tls else ""))
    running = Broker(run, directory, port, directory / "ca.pem" if tls else None)
    try:
        if start:
            running.start()
        yield running
    finally:
        running.kill()


def configuration(port: int, host: str = "127.0.0.1") -> str:
    """Return the configuration that docs/bus-security.md shows, for the directory it lies in."""
    return (
        f'listen: "{host}:{port}"\nmax_payload: 8MB\n'
        'jetstream { store_dir: "store", max_file: 20GB, sync_interval: "100ms" }\n'
        f'accounts {{ include "{ACCOUNT}" }}\n'
    )


async def shorten_leases(bus: Bus, seconds: float) -> None:
    """Let work that is not acknowledged come back sooner."""
    stream = bus.names.stream("TASK")
    for name in CONSUMERS:
        config = (await bus.connection.api(f"CONSUMER.INFO.{stream}.{name}"))["config"]
        body = {"stream_name": stream, "config": {**config, "ack_wait": int(seconds * SECOND)}}
        await bus.connection.api(f"CONSUMER.DURABLE.CREATE.{stream}.{name}", body)


def certify(directory: Path) -> str:
    """Make a CA and a certificate for 127.0.0.1; return the part of the configuration that names it."""
    authority = ec.generate_private_key(ec.SECP256R1())
    signer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "CA of the tests")])
    ca = _certificate(signer, signer, authority, authority, ca=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "broker of the tests")])
    leaf = _certificate(name, signer, key, authority, ca=False)
    (directory / "ca.pem").write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    (directory / "server.pem").write_bytes(leaf.public_bytes(serialization.Encoding.PEM))
    (directory / "server.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return f'tls {{ cert_file: "{directory}/server.pem", key_file: "{directory}/server.key", timeout: 5 }}\n'


def _certificate(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    *,
    ca: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    usage = dict.fromkeys(
        (
            "digital_signature", "content_commitment", "key_encipherment", "data_encipherment",
            "key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
        ),
        False,
    )  # fmt: skip
    usage |= {"key_cert_sign": True, "crl_sign": True} if ca else {"digital_signature": True}
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
    )
    if not ca:
        name = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(x509.SubjectAlternativeName([name]), critical=False)
    return builder.sign(signer, hashes.SHA256())
