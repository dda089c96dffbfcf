"""``spade bus provision``: keys and allow-lists for an external broker, and a run's streams on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from engine.errors import ConfigError

Run = Annotated[str, typer.Option(help="Run, as in run.name.", show_default=False)]
Url = Annotated[str, typer.Option(help="URL of the broker; several servers separated by commas.")]
Output = Annotated[Path | None, typer.Option("--directory", "-D", help="Directory of keys and allow-lists.")]
Replicas = Annotated[
    int | None,
    typer.Option(
        min=1, max=5, help="Copies of each stream; default: 3 for three servers in --url, else unchanged."
    ),
]
Roles = Annotated[list[str] | None, typer.Option("--role", help="A role of your own that needs a key.")]
Ca = Annotated[str, typer.Option(envvar="SPADE_BUS_CA", help="CA that signed the broker's certificate.")]
StoreGb = Annotated[float, typer.Option(min=0.1, help="Total size of the run's streams.")]
PayloadMb = Annotated[int, typer.Option(min=1, max=64, help="Largest message.")]
StreamsOnly = Annotated[bool, typer.Option("--streams-only", help="Write no file: streams and consumers.")]
Token = Annotated[str, typer.Option(envvar="SPADE_BUS_TOKEN", help="Token of a broker without keys.")]


def provision(
    run: Run,
    url: Url = "",
    directory: Output = None,
    replicas: Replicas = None,
    role: Roles = None,
    ca: Ca = "",
    store_gb: StoreGb = 16.0,
    max_payload_mb: PayloadMb = 8,
    streams_only: StreamsOnly = False,
    token: Token = "",
) -> None:
    """Prepare an external broker for a run.

    With --directory: write a key per role and their allow-lists; existing keys stay. With --url: create or
    update the run's streams and consumers on that broker.
    """
    from engine.checks.settings import is_bus_url

    if url and not is_bus_url(url):
        raise ConfigError(f"--url {url!r} is not the URL of a broker.", remedy="Example: nats://HOST:4222.")
    if not url and (streams_only or directory is None):
        raise ConfigError(
            "There is nothing to do.",
            remedy="Name a --directory for keys and allow-lists, the --url of a running broker, or both.",
        )
    roles = tuple(role or ())
    if directory is not None and not streams_only:
        _write(run, directory, roles)
    if url:
        several = len(url.split(",")) > 2
        settings = {
            "roles": roles,
            "store_gb": store_gb,
            "max_payload_mb": max_payload_mb,
            "replicas": replicas or (3 if several else None),
        }
        _create(url, run, {**settings, **_login(directory, token, ca)})


def _write(run: str, directory: Path, roles: tuple[str, ...]) -> None:
    """Write the files and print their paths."""
    from bus import BusError
    from bus.credentials import ACCOUNT, SEEDS, write_account

    try:
        write_account(run, directory, roles)
    except BusError as error:
        raise ConfigError(f"{error.what}.", remedy=error.remedy) from error
    print(f"Keys, one per role: {directory / SEEDS} (give each host only the keys it needs)")
    print(f"Allow-lists: {directory / ACCOUNT}, for the accounts of the server (docs/bus-security.md)")


def _login(directory: Path | None, token: str, ca: str) -> dict[str, Any]:
    from bus.access import ADMIN
    from bus.credentials import SEEDS
    from engine.running import role_host

    place = directory / SEEDS if directory is not None and not token else None
    return role_host.login(ADMIN, token=token, credentials=str(place or ""), ca=ca)


def _create(url: str, run: str, settings: dict[str, Any]) -> None:
    import anyio

    from bus import provision as create
    from bus.connection import public_url
    from engine.telemetry import quiet_bus

    with quiet_bus():
        anyio.run(lambda: create(url, run=run, **settings))
    replicas = settings["replicas"] or 1
    times = f", each on {replicas} servers" if replicas > 1 else ""
    print(f"The streams of run {run} are ready at {public_url(url)}{times}.")
