"""Roles: found by entry point, hosted with a heartbeat, run alone in a process of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import anyio
import pytest
import structlog
from scenes import plugins
from scenes.memory_bus import MemoryBus
from scenes.small_run import FakeRole, config

from bus import connect, provision, serve
from bus.messages import Heartbeat
from engine import registry
from engine.context import RoleContext
from engine.errors import ConfigError
from engine.running import drain_commands, role_host
from engine.running.role_host import Host, Origin

STRANGER = """
import anyio

class Stranger:
    name = "stranger"
    needs = frozenset()
    own_process = True

    def __init__(self, context):
        self.context = context

    async def run(self):
        self.context.log.info("stranger.works", steps=self.context.config.run.steps)
        await self.context.draining.wait()

    def statistics(self):
        return {"steps": float(self.context.config.run.steps)}
"""


def test_the_built_in_roles_are_registered_like_any_others() -> None:
    assert {"designer", "agent", "scorer", "learner", "server", "evaluator"} <= set(
        registry.registered(registry.ROLES)
    )


async def test_a_need_that_nobody_offers_is_refused() -> None:
    bus = MemoryBus(run="toy", role="r", instance="i")
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ConfigError, match="needs telescope"):
            async with role_host.services(config(), bus, frozenset({"telescope"}), tasks):
                pass


def hosted(directory: Path) -> tuple[MemoryBus, RoleContext]:
    """Return a bus and the context of a role on it."""
    bus = MemoryBus(run="toy", role="fake", instance="fake-0")
    return bus, RoleContext(config(), bus, directory, "fake-0", structlog.stdlib.get_logger())


async def test_a_host_beats_with_the_roles_state_and_gauges(tmp_path: Path) -> None:
    bus, context = hosted(tmp_path)
    beats: list[Heartbeat] = []
    async with bus.peer("supervisor", "s").listen("hb.>") as messages, anyio.create_task_group() as tasks:
        tasks.start_soon(Host(FakeRole(context), context).run)
        async for message in messages:
            assert isinstance(message, Heartbeat)
            beats.append(message)
            context.draining.set()
            if message.state == "stopped":
                break
    assert beats[0].state in ("starting", "running")
    assert beats[0].statistics == {"queue": 3.0}


def test_the_prepared_model_takes_the_place_of_its_source_where_it_exists(tmp_path: Path) -> None:
    here = Origin(config(), "host", "/run", str(tmp_path))
    assert here.local_config().model.path == str(tmp_path)
    elsewhere = Origin(config(), "host", "/run", str(tmp_path / "missing"))
    assert elsewhere.local_config() == config()


async def test_a_strangers_role_joins_a_run_alone(tmp_path: Path) -> None:
    """Registered as another package would, started by its name and the URL of the bus alone."""
    points = {"spade.roles/stranger": "role:Stranger"}
    installed = plugins.install(tmp_path / "plugins", "stranger", {"role": STRANGER}, points)
    recipe = config(tmp_path)
    async with serve(tmp_path / "bus", run="toy") as server:
        await provision(server.url, run="toy", token=server.token)
        async with connect(server.url, run="toy", role="supervisor", instance="s", token=server.token) as bus:
            await role_host.put_origin(bus, Origin(recipe, "another-host", "/nowhere"))
            command = [sys.executable, "-m", "engine.cli", "role", "stranger", "--connect", server.url]
            environment = {
                **os.environ,
                "PYTHONPATH": str(installed),
                "SPADE_BUS_TOKEN": server.token,
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
            }
            async with (
                bus.listen("hb.>") as beats,
                await anyio.open_process(command, env=environment, stderr=None) as process,
            ):
                with anyio.fail_after(30):
                    first = await anext(beats)
                    await drain_commands.give(bus, "drain", ("somebody-else",))
                    await drain_commands.give(bus, "drain", ("stranger",))
                    assert await process.wait() == 0
    assert isinstance(first, Heartbeat)
    assert first.statistics == {"steps": float(recipe.run.steps)}
    logs = list((tmp_path / "cache" / "spade" / "remote" / "toy" / "logs").glob("*.jsonl"))
    assert any("stranger.works" in log.read_text() for log in logs)


async def test_a_role_without_a_run_says_so(tmp_path: Path) -> None:
    async with serve(tmp_path / "bus", run="toy") as server:
        command = [sys.executable, "-m", "engine.cli", "role", "scorer", "--connect", server.url]
        environment = {**os.environ, "SPADE_BUS_TOKEN": server.token}
        result = await anyio.run_process(command, env=environment, check=False)
    assert result.returncode == 2
    assert b"carries 0 runs" in result.stderr
