"""Orders reach every role: also one whose broker is away, and one that starts afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import anyio
import pytest
import structlog
from scenes.memory_bus import MemoryBus
from scenes.small_run import FakeRole, RememberingView, config, with_roles
from test_supervisor import supervise

from bus import Bus, ServerHandle, connect, provision, serve
from bus.messages import Heartbeat
from engine import telemetry
from engine.context import RoleContext
from engine.run import RunDirectory
from engine.running import drain_commands, role_host
from engine.running.role_host import Origin
from engine.running.supervisor import read_address

LOG = structlog.stdlib.get_logger()


class CountedRole(FakeRole):
    name = "fake"
    begun: ClassVar[int] = 0

    def __init__(self, context: RoleContext) -> None:
        super().__init__(context)
        CountedRole.begun += 1


@dataclass
class Far:
    """A run on a real broker, its supervisor's bus, and a role on another host."""

    server: ServerHandle
    bus: Bus
    directory: Path

    async def serve(self, wait: float = 0.0) -> None:
        await role_host.serve_role(
            "fake", url=self.server.url, run="toy", secret=self.server.token, instance="far",
            directory=self.directory, wait=wait,
        )  # fmt: skip


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(role_host, "load", lambda _name: CountedRole)
    monkeypatch.setattr(CountedRole, "begun", 0)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    telemetry.close()
    structlog.reset_defaults()


@asynccontextmanager
async def far_run(directory: Path) -> AsyncIterator[Far]:
    async with serve(directory / "bus", run="toy") as server:
        await provision(server.url, run="toy", token=server.token)
        async with connect(server.url, run="toy", role="supervisor", instance="s", token=server.token) as bus:
            await role_host.put_origin(bus, Origin(config(directory), "another-host", "/nowhere"))
            yield Far(server, bus, directory)


async def test_a_drain_ordered_while_the_broker_is_away_is_heeded(tmp_path: Path) -> None:
    async with far_run(tmp_path) as far, far.bus.listen("hb.>") as beats, anyio.create_task_group() as tasks:
        tasks.start_soon(far.serve)
        with anyio.fail_after(30):
            assert isinstance(await anext(beats), Heartbeat)
            os.kill(far.server.pid, signal.SIGKILL)
            await drain_commands.give(far.bus, "drain", ("fake",))
            while far.bus.statistics()["connection_reconnects"] < 1:  # noqa: ASYNC110 - a count has no event
                await anyio.sleep(0.01)
    assert CountedRole.begun == 1


async def test_who_starts_while_the_run_drains_takes_no_work_and_resuming_clears_it(tmp_path: Path) -> None:
    async with far_run(tmp_path) as far:
        await drain_commands.give(far.bus, "drain", ("learner",), closing=True)
        await far.serve()
        await drain_commands.give(far.bus, "drain")
        await far.serve()
        assert CountedRole.begun == 0
        await drain_commands.give(far.bus, "resume")
        await drain_commands.give(far.bus, "drain", ("fake",))  # alone, to go on elsewhere
        async with far.bus.listen("hb.>") as beats, anyio.create_task_group() as tasks:
            tasks.start_soon(far.serve)
            await anext(beats)
            await drain_commands.give(far.bus, "drain")
    assert CountedRole.begun == 1


@pytest.mark.parametrize("begun", [False, True], ids=["not begun", "not resumed"])
async def test_a_role_may_wait_for_its_run(begun: bool, tmp_path: Path) -> None:
    async with serve(tmp_path / "bus", run="toy") as server, anyio.create_task_group() as tasks:
        known = {"run": "toy", "token": server.token}
        if begun:
            await provision(server.url, **known)
        async with connect(server.url, role="supervisor", instance="s", **known) as bus:
            if begun:
                await role_host.put_origin(bus, Origin(config(tmp_path), "another-host", "/nowhere"))
                await drain_commands.give(bus, "drain")
            far = Far(server, bus, tmp_path)
            await far.serve(wait=0.5) if begun else None
            assert CountedRole.begun == 0, "it has waited in vain"
            tasks.start_soon(far.serve, 60.0)
            await provision(server.url, **known)
            async with bus.listen("hb.>") as beats:
                await role_host.put_origin(bus, Origin(config(tmp_path), "another-host", "/nowhere"))
                await drain_commands.give(bus, "resume")
                with anyio.fail_after(30):
                    await anext(beats)
            await drain_commands.give(bus, "drain")
    assert CountedRole.begun == 1


async def test_a_role_that_runs_drains_in_its_own_turn() -> None:
    bus = MemoryBus(run="toy", role="supervisor", instance="s")
    draining, turns = anyio.Event(), []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_heed, bus, draining)
        for names in (("agent", "designer"), ("learner",)):
            await drain_commands.give(bus, "drain", names, closing=True)
            await anyio.wait_all_tasks_blocked()
            turns.append(draining.is_set())
        tasks.cancel_scope.cancel()
    assert turns == [False, True]


async def _heed(bus: MemoryBus, draining: anyio.Event) -> None:
    await drain_commands.heed(bus.peer("learner", "0"), "learner", draining, start=1, log=LOG)


async def test_roles_drained_alone_do_not_bring_a_drained_run_back() -> None:
    bus = MemoryBus(run="toy", role="supervisor", instance="s")
    await drain_commands.give(bus, "drain")
    last = await drain_commands.give(bus, "drain", ("agent",))
    assert await drain_commands.standing(bus) == drain_commands.Standing(drains=True, start=last + 1)
    await drain_commands.give(bus, "resume", ("scorer",))
    assert (await drain_commands.standing(bus)).drains, "a scorer that goes on brings no drained run back"
    await drain_commands.give(bus, "resume")
    last = await drain_commands.give(bus, "drain", ("agent",))
    assert await drain_commands.standing(bus) == drain_commands.Standing(drains=False, start=last + 1)


async def test_a_drain_that_somebody_orders_stops_the_run(tmp_path: Path) -> None:
    view, recipe = RememberingView(), with_roles(config(tmp_path), "fake")

    async def order() -> None:
        await view.when(lambda status: bool(status.gauges))
        address = read_address(RunDirectory.of(recipe).root)
        assert address is not None
        async with connect(
            address.url, run="toy", role="supervisor", instance="operator", token=address.token
        ) as bus:
            await drain_commands.give(bus, "drain", ("agent",))
            await drain_commands.give(bus, "drain")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(order)
        with anyio.fail_after(30):
            assert await supervise(recipe, view) == "stopped"
