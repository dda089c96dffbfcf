"""Hosting roles: finding them, the services they share, their heartbeats, and one role on its own.

Roles are found through the entry-point group ``spade.roles``; the built-in ones are registered like a
stranger's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import anyio
import msgspec
from anyio import to_thread
from anyio.abc import TaskGroup

from bus import Bus, BusError, connect
from bus.connection import open_connection, public_url
from bus.credentials import seed_file
from bus.messages import Heartbeat, token
from engine import pools, registry, telemetry
from engine.checks.settings import is_bus_url
from engine.config import Config
from engine.context import RoleContext
from engine.errors import ConfigError, SpadeError
from engine.inference.guarded import GUARDED
from engine.running import drain_commands

TOKEN, RUN = "SPADE_BUS_TOKEN", "SPADE_RUN"
CREDENTIALS, CA = "SPADE_BUS_CREDENTIALS", "SPADE_BUS_CA"
CONFIG_KEY = "config"
BEAT_SECONDS = 1.0
FOREIGN_START_SECONDS = 300.0
_SET_PDEATHSIG = 1

State = Literal["starting", "running", "draining", "stopped"]


class RoleLike(Protocol):
    """The interface of a role that its host uses; ``roles.base.Role`` implements it."""

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]]
    own_process: ClassVar[bool]

    def __init__(self, context: RoleContext) -> None: ...

    async def run(self) -> None: ...

    def statistics(self) -> dict[str, float]: ...


class Origin(msgspec.Struct, frozen=True):
    """The entry of a run in the state bucket: its recipe, and where its directory and its model are."""

    config: Config
    host: str
    directory: str
    model: str = ""

    def local_config(self) -> Config:
        """Return the recipe with the prepared model in the place of its source, where that exists."""
        if not self.model or not Path(self.model).is_dir():
            return self.config
        return msgspec.structs.replace(
            self.config, model=msgspec.structs.replace(self.config.model, path=self.model)
        )


def require(name: str, url: str) -> type[RoleLike]:
    """Check what ``spade role`` was given before it waits for a bus. Raises ConfigError."""
    role = load(name)
    if not is_bus_url(url):
        raise ConfigError(
            f"--connect {public_url(url)!r} is not the URL of a bus.",
            remedy="Example: nats://127.0.0.1:4222. Those of a private broker stand in runs/NAME/bus.json.",
        )
    return role


def load(name: str) -> type[RoleLike]:
    """Import a role's class. Raises ConfigError when it is not registered or cannot be imported."""
    role: type[RoleLike] = registry.load(registry.ROLES, name, where="run.roles")
    return role


@asynccontextmanager
async def services(
    config: Config, bus: Bus, needs: frozenset[str], tasks: TaskGroup
) -> AsyncIterator[dict[str, Any]]:
    """Build the services that the roles of this process need, and no others.

    Tasks of the services run in ``tasks``. Raises ConfigError for an unknown need.
    """
    unknown = needs - {"pool", "sandbox"}
    if unknown:
        raise ConfigError(
            f"A role needs {', '.join(sorted(unknown))}, which no host offers.",
            where="Role.needs",
            remedy="Offered are: pool, sandbox.",
        )
    shared: dict[str, Any] = {}
    async with _sandbox(config, shared, wanted="sandbox" in needs):
        if "pool" in needs:
            from engine.inference.pool import InferencePool

            pool = InferencePool(
                max_concurrency=config.server.max_concurrency,
                request_seconds=config.server.request_seconds,
                max_lag=max(config.learner.agent.max_staleness, config.learner.designer.max_staleness),
                adapters=config.run.name if config.adapters else "",
                router_replay=config.learner.router_replay,
            )
            shared["pool"] = pool
            tasks.start_soon(pool.watch, bus)
        yield shared


@asynccontextmanager
async def _sandbox(config: Config, shared: dict[str, Any], *, wanted: bool) -> AsyncIterator[None]:
    if not wanted:
        yield
        return
    from sandbox import SandboxPool

    settings = config.sandbox
    if config.designer.kind == "pool" and (
        needed := await to_thread.run_sync(pools.preload, config.designer.pool.source)
    ):
        # their zygotes may read all data sets and make each once before they report
        settings = msgspec.structs.replace(
            settings,
            preload=tuple(dict.fromkeys([*settings.preload, *needed])),
            start_seconds=FOREIGN_START_SECONDS,
        )
    async with SandboxPool(settings) as pool:
        shared["sandbox"] = pool
        yield


class Host:
    """Runs one role with its heartbeat; ``state`` is the state of the role."""

    def __init__(self, role: RoleLike, context: RoleContext) -> None:
        self._role = role
        self._context = context
        self.state: State = "starting"

    async def run(self) -> None:
        """Run the role to its end. An exception of the role is raised as it is."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._beat)
            self.state = "running"
            try:
                await self._role.run()
            finally:
                self.state = "stopped"
                tasks.cancel_scope.cancel()
        with anyio.move_on_after(BEAT_SECONDS):
            await self._publish()

    async def _beat(self) -> None:
        while True:
            await self._publish()
            await anyio.sleep(BEAT_SECONDS)

    def _state(self) -> State:
        draining = self.state == "running" and self._context.draining.is_set()
        return "draining" if draining else self.state

    async def _publish(self) -> None:
        await self._context.bus.publish(
            Heartbeat(
                role=self._role.name,
                instance=self._context.instance,
                state=self._state(),
                statistics=self._role.statistics(),
            )
        )


def instance_name(role: str) -> str:
    """Return an instance name that no other process has, fit for a subject."""
    return token(f"{role}-{socket.gethostname()}-{os.getpid()}")


def login(role: str, *, token: str = "", credentials: str = "", ca: str = "") -> dict[str, Any]:
    """Return the login of ``role`` as arguments of ``bus.connect``.

    ``credentials`` is its key file or a directory of keys. Raises BusError when there is no such key.
    """
    return {
        "token": token,
        "seed_file": seed_file(credentials, role) if credentials else None,
        "tls": ca or None,
    }


async def only_run(url: str, secret: str, *, role: str = "", credentials: str = "", ca: str = "") -> str:
    """Return the one run that the bus at ``url`` carries for us. Raises ConfigError when it is not one."""
    known = login(role, token=secret, credentials=credentials, ca=ca)
    async with open_connection(url, name="spade.discovery", role=role, **known) as connection:
        names = (await connection.api("STREAM.NAMES", {})).get("streams") or []
    prefix = "EVENT_"
    runs = sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))
    if len(runs) == 1:
        return str(runs[0])
    raise ConfigError(
        f"The bus at {public_url(url)} carries {len(runs)} runs{': ' if runs else ''}{', '.join(runs)}.",
        remedy="Name one with --run." if runs else "Start one with `spade run RECIPE`.",
    )


async def put_origin(bus: Bus, origin: Origin) -> None:
    """Write what a role on any host needs to join the run into the state bucket."""
    await bus.state_put(CONFIG_KEY, msgspec.json.encode(origin))


async def get_origin(bus: Bus) -> Origin:
    """Read :class:`Origin` back. Raises SpadeError when the run was not started, or by another version."""
    stored = await bus.state_get(CONFIG_KEY)
    if stored is None:
        raise SpadeError(
            f"The bus knows no run {bus.run!r}.",
            remedy="Start it with `spade run RECIPE`, or name the right one with --run.",
        )
    try:
        return msgspec.json.decode(stored[1], type=Origin)
    except msgspec.DecodeError as error:
        raise SpadeError(
            f"The recipe of run {bus.run!r} cannot be read: {error}.",
            remedy="Use the same version of spade on every host of a run.",
        ) from error


async def serve_role(
    name: str,
    *,
    url: str,
    run: str,
    secret: str,
    instance: str,
    directory: Path | None,
    credentials: str = "",
    ca: str = "",
    life: tuple[str, str] = ("", ""),
    wait: float = 0.0,
) -> None:
    """Run one role alone in this process until it ends, a drain is ordered, or a signal comes.

    Returns at once while the run drains (:mod:`engine.running.drain_commands`), after waiting for at most
    ``wait`` seconds for a run that is not there yet, or not resumed.

    ``secret`` is the token of the bus, ``credentials`` the key of the role (a file, or a directory of keys).
    ``life`` is that of :mod:`engine.running.warm_restart`.

    ``directory`` None takes the run's own directory on its host, else a scratch one in the user's cache.
    Raises ConfigError, SpadeError or BusError.
    """
    role_class = load(name)
    if _followed(role_class):
        return
    known = login(name, token=secret, credentials=credentials, ca=ca)
    async with connect(url, run=run, role=name, instance=instance, life=life, **known) as bus:
        await _begun(bus, wait)
        standing = await drain_commands.standing(bus)
        origin = await get_origin(bus)
        config = origin.local_config()
        place = directory or _directory(origin, run)
        log = telemetry.configure(place / "logs", token(instance)).bind(role=name, instance=instance)
        if standing.drains:
            log.warning("role.not_started", why="the run drains or is over", remedy="Resume it first.")
            return
        draining = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_drain_on_signal, draining)
            tasks.start_soon(partial(drain_commands.heed, bus, name, draining, start=standing.start, log=log))
            async with services(config, bus, role_class.needs, tasks) as shared:
                context = RoleContext(
                    config=config,
                    bus=bus,
                    directory=place,
                    instance=instance,
                    log=log,
                    draining=draining,
                    shared=shared,
                )
                if life[1]:
                    log.warning("role.restarted", why="a signal ended the one before")
                log.info("role.started", directory=str(place))
                await Host(role_class(context), context).run()
                log.info("role.ended")
            tasks.cancel_scope.cancel()


async def _begun(bus: Bus, seconds: float) -> None:
    """Wait until the run of ``bus`` has begun or goes on, for at most ``seconds``; the caller reads which."""
    with anyio.move_on_after(seconds):
        while True:
            try:
                if not (await drain_commands.standing(bus)).drains and await bus.state_get(CONFIG_KEY):
                    return
            except BusError:  # the streams are not there yet
                pass
            await anyio.sleep(BEAT_SECONDS)


def _followed(role_class: type[RoleLike]) -> bool:
    """Follow rank 0 until it ends, if this process is a later rank of a role; return whether it was.

    A following rank is not on the bus, and it ends with its launcher.
    """
    follow = getattr(role_class, "follow", None)
    if follow is None or os.environ.get("RANK", "0") == "0":
        return False
    die_with_parent(always=True)
    follow()
    return True


def _directory(origin: Origin, run: str) -> Path:
    """Return the run directory when this is its host, else a scratch one."""
    own = Path(origin.directory)
    if origin.host == socket.gethostname() and own.is_dir():
        return own
    scratch = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "spade" / "remote" / run
    scratch.mkdir(parents=True, exist_ok=True)
    return scratch


async def _drain_on_signal(draining: anyio.Event) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
        async for _ in signals:
            draining.set()


def die_with_parent(*, always: bool = False) -> None:
    """Let the kernel kill this process when its parent ends, if a guard started it or ``always`` (Linux)."""
    if always or os.environ.get(GUARDED):
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            raise SpadeError("The supervisor ended while this role started.")
