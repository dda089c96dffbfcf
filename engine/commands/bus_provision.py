"""``spade bus provision``: keys and configurations for an external broker, and a run's streams on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from engine.errors import ConfigError

if TYPE_CHECKING:
    from bus.broker_files import BrokerPlan

Run = Annotated[str, typer.Option(help="Run, as in run.name.", show_default=False)]
Url = Annotated[str, typer.Option(help="URL of the broker; several servers separated by commas.")]
Output = Annotated[
    Path | None, typer.Option("--directory", "-D", help="Directory of keys and configuration.")
]
Host = Annotated[str, typer.Option(help="Server to configure, as clients reach it: HOST[:PORT].")]
Replicas = Annotated[
    int | None,
    typer.Option(
        min=1, max=5, help="Copies of each stream; default: 3 for three servers in --url, else unchanged."
    ),
]
Roles = Annotated[list[str] | None, typer.Option("--role", help="A role of your own that needs a key.")]
Certificate = Annotated[str, typer.Option(help="Certificate (PEM), path on the server.")]
Key = Annotated[str, typer.Option(help="Its key, path on the server.")]
Ca = Annotated[str, typer.Option(envvar="SPADE_BUS_CA", help="CA that signed the broker's certificate.")]
Store = Annotated[str, typer.Option(help="Directory of the streams on the server; default: store in -D.")]
StoreGb = Annotated[float, typer.Option(min=0.1, help="Total size of the run's streams.")]
PayloadMb = Annotated[int, typer.Option(min=1, max=64, help="Largest message.")]
Sync = Annotated[str, typer.Option(help="Interval of forcing messages to disk; paranoid: always.")]
StreamsOnly = Annotated[bool, typer.Option("--streams-only", help="Write no file: streams and consumers.")]
Token = Annotated[str, typer.Option(envvar="SPADE_BUS_TOKEN", help="Token of a broker without keys.")]


def provision(
    run: Run,
    url: Url = "",
    directory: Output = None,
    host: Host = "",
    replicas: Replicas = None,
    role: Roles = None,
    tls_cert: Certificate = "",
    tls_key: Key = "",
    ca: Ca = "",
    store: Store = "",
    store_gb: StoreGb = 16.0,
    max_payload_mb: PayloadMb = 8,
    sync: Sync = "100ms",
    streams_only: StreamsOnly = False,
    token: Token = "",
) -> None:
    """Prepare an external broker for a run.

    With --directory: write a key per role and a configuration for the server; existing keys stay. With
    --url: create or update the run's streams and consumers on that broker.
    """
    extra = tuple(role or ())
    _check(url, directory, streams_only=streams_only, certificate=tls_cert, key=tls_key)
    if directory is not None and not streams_only:
        from bus.broker_files import BrokerPlan, Tls

        name, port = _host(host or _host_of(url))
        made = BrokerPlan(
            run=run,
            store=store or str((directory / "store").resolve()),
            host=name,
            port=port,
            store_gb=max(1.0, store_gb * 1.25),
            max_payload_mb=max_payload_mb,
            sync=sync,
            tls=Tls(tls_cert, tls_key) if tls_cert else None,
            roles=extra,
        )
        _write(made, directory)
    if url:
        several = len(url.split(",")) > 2
        _create(
            url,
            run=run,
            roles=extra,
            store_gb=store_gb,
            max_payload_mb=max_payload_mb,
            replicas=replicas or (3 if several else None),
            login=_login(directory, token, ca),
        )


def _check(url: str, directory: Path | None, *, streams_only: bool, certificate: str, key: str) -> None:
    from engine.checks.settings import is_bus_url

    if url and not is_bus_url(url):
        raise ConfigError(f"--url {url!r} is not the URL of a broker.", remedy="Example: nats://HOST:4222.")
    if not url and (streams_only or directory is None):
        raise ConfigError(
            "There is nothing to do.",
            remedy="Name a --directory for keys and configurations, the --url of a running broker, or both.",
        )
    if bool(certificate) != bool(key):
        raise ConfigError("A certificate and its key go together.", remedy="Pass --tls-cert and --tls-key.")


def _host_of(url: str) -> str:
    """Return the server that a URL names first, loopback without one."""
    first = urlsplit(url.partition(",")[0])
    return f"{first.hostname}:{first.port or 4222}" if url else "127.0.0.1"


def _host(text: str) -> tuple[str, int]:
    from bus import BusError
    from bus.broker_files import parse_host

    try:
        return parse_host(text)
    except BusError as error:
        raise ConfigError(f"--host: {error.what}.", remedy=error.remedy) from error


def _write(plan: BrokerPlan, directory: Path) -> None:
    """Write the files and print their paths."""
    from bus import BusError
    from bus.broker_files import ACCOUNT, SEEDS, SERVER, write

    try:
        notes = write(plan, directory)
    except BusError as error:
        raise ConfigError(f"{error.what}.", remedy=error.remedy) from error
    print(f"Keys, one per role: {directory / SEEDS} (give each host only the keys it needs)")
    print(f"Server {plan.host}: nats-server -c {directory / SERVER}")
    print(f"The configuration includes {ACCOUNT}, in the same directory.")
    for note in notes:
        print(f"Note: {note}")


def _login(directory: Path | None, token: str, ca: str) -> dict[str, Any]:
    from bus.access import ADMIN
    from bus.broker_files import SEEDS
    from engine.running import role_host

    place = directory / SEEDS if directory is not None and not token else None
    return role_host.login(ADMIN, token=token, credentials=str(place or ""), ca=ca)


def _create(
    url: str,
    *,
    run: str,
    roles: tuple[str, ...],
    store_gb: float,
    max_payload_mb: int,
    replicas: int | None,
    login: dict[str, Any],
) -> None:
    import anyio

    from bus import provision as create
    from bus.connection import public_url
    from engine.telemetry import quiet_bus

    async def work() -> None:
        await create(
            url,
            run=run,
            store_gb=store_gb,
            max_payload_mb=max_payload_mb,
            replicas=replicas,
            roles=roles,
            **login,
        )

    with quiet_bus():
        anyio.run(work)
    times = f", each on {replicas} servers" if replicas and replicas > 1 else ""
    print(f"The streams of run {run} are ready at {public_url(url)}{times}.")
