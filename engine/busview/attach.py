"""Opens the bus of a run for an operator: of a run in progress, of one at rest, or at a URL."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec

from bus import Bus, BusUnavailable, NotFound, connect, serve
from bus.access import ADMIN
from bus.connection import public_url
from engine.checks.settings import is_bus_url
from engine.config import BusConfig
from engine.errors import ConfigError, SpadeError
from engine.run import RunDirectory, find
from engine.running import drain_commands, role_host
from engine.running.drain_commands import Command
from engine.running.supervisor import Address, read_address

_CONNECT_SECONDS = 5.0
_PATIENCE_SECONDS = 60.0


async def order(run: RunDirectory, command: Command) -> None:
    """Let the scorer of a run in progress ``pause`` (it begins no more rounds) or ``resume``.

    Raises SpadeError when nothing runs it, and as :func:`attached` does.
    """
    run.running()
    async with attached(str(run.root), run.root.parent) as bus:
        await drain_commands.give(bus, command, ("scorer",))


@asynccontextmanager
async def attached(run: str | None, directory: Path, given: Address | None = None) -> AsyncIterator[Bus]:
    """Connect to the bus of a run. A broker that was started for this is stopped at the end.

    It is the bus that is ``given`` (without a run: the only one on it), else that of a run of this host by
    name or path (None: the newest in ``directory``).

    Must be entered in the main thread. Raises ConfigError (no such run, no bus, a wrong URL), SpadeError
    (the broker does not answer) or BusError (access denied).
    """
    async with AsyncExitStack() as stack:
        if given is not None:
            address = await _at_url(given)
        else:
            found = find(run, directory)
            config = found.config() if found.config_file.exists() else None
            external = Address.of(config) if config is not None and config.bus.url else None
            if external is not None or found.holder() is not None:
                known = read_address(found.root) or external
                if known is None:
                    raise ConfigError(
                        f"The run {found.root.name} has no bus yet.",
                        where=str(found.root / "bus.json"),
                        remedy="The file appears when the broker is up; see logs/ if it does not.",
                    )
                address = known
            else:
                address = await stack.enter_async_context(_at_rest(found))
        yield await stack.enter_async_context(_connected(address))


async def _at_url(given: Address) -> Address:
    """Return ``given`` with the only run of its bus where it names none."""
    if not is_bus_url(given.url):
        raise ConfigError(
            f"--connect {public_url(given.url)!r} is not the URL of a bus.",
            remedy="Example: nats://127.0.0.1:4222. runs/NAME/bus.json has that of a private broker.",
        )
    try:
        run = given.run or await role_host.only_run(
            given.url, given.token, role=ADMIN, credentials=given.credentials, ca=given.ca
        )
    except BusUnavailable as error:
        raise _unreachable(given.url, error) from error
    return msgspec.structs.replace(given, run=run)


@asynccontextmanager
async def _at_rest(found: RunDirectory) -> AsyncIterator[Address]:
    """Serve the store of a run that is not running. Its lock refuses a resume meanwhile."""
    if not (found.bus / "store").is_dir():
        raise ConfigError(
            f"The run {found.root.name} has no bus: it never started, or its streams were removed.",
            where=str(found.bus),
            remedy="Name another run with --run, or a broker with --connect URL.",
        )
    config = found.config() if found.config_file.exists() else None
    known, settings = read_address(found.root), config.bus if config is not None else BusConfig()
    run = known.run if known is not None else config.run.name if config is not None else found.root.name
    async with serve(
        found.bus,
        run=run,
        sync=settings.sync,
        max_payload_mb=settings.max_payload_mb,
        store_gb=settings.store_gb,
    ) as server:
        yield Address(server.url, server.token, run)


@asynccontextmanager
async def _connected(address: Address) -> AsyncIterator[Bus]:
    login = address.login(ADMIN)
    async with AsyncExitStack() as stack:
        try:
            bus = await stack.enter_async_context(
                connect(
                    address.url,
                    run=address.run,
                    role=ADMIN if login.get("seed_file") else "operator",
                    instance=f"operator-{os.getpid()}",
                    patience=_PATIENCE_SECONDS,
                    connect_seconds=_CONNECT_SECONDS,
                    **login,
                )
            )
        except BusUnavailable as error:
            raise _unreachable(address.url, error) from error
        try:
            await bus.stream_info("EVENT")
        except NotFound as error:
            raise ConfigError(
                f"The bus at {public_url(address.url)} has no run {address.run}.",
                remedy="Name another with --run, or prepare it with `spade bus provision`.",
            ) from error
        yield bus


def _unreachable(url: str, error: BusUnavailable) -> SpadeError:
    return SpadeError(
        f"The bus at {public_url(url)} does not answer: {error.what}.",
        remedy="Check that its broker runs and that the address is right.",
    )
