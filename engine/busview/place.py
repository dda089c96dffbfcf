"""Finding the bus of a run and opening it: the one that runs, or the store of a run that rests."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bus import BusError, BusUnavailable, Limits, NatsBus, NotFound, connect, serve
from bus.access import ADMIN
from engine.checks.settings import is_bus_url
from engine.config import BusConfig as BusTable
from engine.config import Config
from engine.errors import ConfigError, SpadeError
from engine.run import RunDirectory, find
from engine.running import role_host
from engine.running.supervisor import Address, read_address

CONNECT_SECONDS = 5.0
PATIENCE_SECONDS = 60.0
LIMITS = Limits(full_seconds=10.0)


@dataclass(frozen=True)
class Place:
    """Where to look: a run of this host by name or path (None: the newest), or a ``url`` and a run on it.

    ``token``, or ``credentials`` (the seed file of the supervisor's key, or the directory that holds it),
    and ``ca`` (certificates to trust) are for the ``url``.
    """

    run: str | None = None
    directory: Path = Path("runs")
    url: str = ""
    token: str = field(default="", repr=False)
    credentials: str = ""
    ca: str = ""

    def login(self) -> dict[str, Any]:
        """Return what :func:`bus.connect` takes to prove who we are. Raises BusError: no such key."""
        return role_host.login(ADMIN, token=self.token, credentials=self.credentials, ca=self.ca)


@dataclass(frozen=True)
class Opened:
    """An open bus. ``live`` is whether its own server ran already; else it runs for us alone."""

    bus: NatsBus
    live: bool


@asynccontextmanager
async def opened(place: Place) -> AsyncIterator[Opened]:
    """Open the bus of a run, and close it; a server that was started for this is stopped.

    Enter it in the main thread. Raises ConfigError (no such run, no bus, a wrong URL), SpadeError (the
    server does not answer) or BusError (it refuses us).
    """
    if place.url:
        async with _there(place) as bus:
            yield Opened(bus, live=True)
        return
    found = find(place.run, place.directory)
    config = found.config() if found.config_file.exists() else None
    held = found.holder() is not None
    if held or (config is not None and config.bus.url):
        async with _connected(_address(found, config), found.root.name) as bus:
            yield Opened(bus, live=held)
        return
    async with _store(found, config) as bus:
        yield Opened(bus, live=False)


def _address(found: RunDirectory, config: Config | None) -> Address:
    address = read_address(found.root)
    if address is None and config is not None and config.bus.url:
        return Address.of(config)
    if address is None:
        raise ConfigError(
            f"The run {found.root.name} has no bus yet.",
            where=str(found.root / "bus.json"),
            remedy="It is written once the run's broker is up; look into logs/ when it stays away.",
        )
    return address


@asynccontextmanager
async def _there(place: Place) -> AsyncIterator[NatsBus]:
    if not is_bus_url(place.url):
        raise ConfigError(
            f"--connect {place.url!r} is not the URL of a bus.",
            remedy="Example: nats://127.0.0.1:4222. Those of a private broker stand in runs/NAME/bus.json.",
        )
    try:
        run = place.run or await role_host.only_run(
            place.url, place.token, role=ADMIN, credentials=place.credentials, ca=place.ca
        )
    except BusUnavailable as error:
        raise _unreachable(place.url, "", error) from error
    async with joined(place.url, run, place.login()) as bus:
        yield bus


@asynccontextmanager
async def joined(url: str, run: str, login: dict[str, Any], whose: str = "") -> AsyncIterator[NatsBus]:
    """Connect as an operator of ``run``.

    Raises SpadeError when the server does not answer, ConfigError when it does not know the run.
    """
    role = ADMIN if login.get("seed_file") else "operator"
    async with AsyncExitStack() as stack:
        try:
            bus = await stack.enter_async_context(
                connect(
                    url,
                    run=run,
                    role=role,
                    instance=f"operator-{os.getpid()}",
                    patience=PATIENCE_SECONDS,
                    connect_seconds=CONNECT_SECONDS,
                    limits=LIMITS,
                    **login,
                )
            )
        except BusUnavailable as error:
            raise _unreachable(url, whose, error) from error
        await _require_streams(bus, url)
        yield bus


@asynccontextmanager
async def _connected(address: Address, run: str) -> AsyncIterator[NatsBus]:
    async with joined(address.url, address.run, address.login(ADMIN), f"of run {run}") as bus:
        yield bus


async def _require_streams(bus: NatsBus, url: str) -> None:
    try:
        await bus.stream_info("EVENT")
    except NotFound as error:
        raise ConfigError(
            f"The bus at {url} knows no run {bus.run}.",
            remedy=f"Name another with --run, or prepare it: spade bus provision --run {bus.run} --url {url}",
        ) from error


def _unreachable(url: str, whose: str, error: BusUnavailable) -> SpadeError:
    told = " ".join(word for word in ("The bus", whose, f"at {url} does not answer") if word)
    return SpadeError(f"{told}: {error.what}.", remedy="Does its server run, and is the address right?")


@asynccontextmanager
async def _store(found: RunDirectory, config: Config | None) -> AsyncIterator[NatsBus]:
    """Serve the store of a run that rests. Its lock keeps everybody else out of it meanwhile."""
    if not (found.bus / "store").is_dir():
        raise ConfigError(
            f"The run {found.root.name} has no bus: it never came up, or its streams were removed.",
            where=str(found.bus),
            remedy="Name another run with --run, or a server with --connect URL.",
        )
    known = read_address(found.root)
    run = known.run if known is not None else config.run.name if config is not None else found.root.name
    settings = config.bus if config is not None else BusTable()
    async with AsyncExitStack() as stack:
        try:
            server = await stack.enter_async_context(
                serve(
                    found.bus,
                    run=run,
                    sync=settings.sync,
                    max_payload_mb=settings.max_payload_mb,
                    store_gb=settings.store_gb,
                )
            )
            address = Address(server.url, server.token, run)
        except BusError:
            other = _kept_open(found.bus, run)
            if other is None:
                raise
            address = other
        yield await stack.enter_async_context(_connected(address, found.root.name))


def _kept_open(directory: Path, run: str) -> Address | None:
    """Return the server of somebody else who looks into the same store, None when nobody listens there."""
    try:
        port = int((directory / "port").read_text())
        token = (directory / "token").read_text().strip()
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except (OSError, ValueError):
        return None
    return Address(f"nats://127.0.0.1:{port}", token, run)
