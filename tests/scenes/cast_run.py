"""A whole run without a model, in a process of its own: ``python -P cast_run.py run|role DIRECTORY``.

``run``: the real supervisor, broker and scorer, and scripted other roles. ``role``: one more role that only
sends heartbeats, in a process that a test can kill.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import structlog
from msgspec.structs import replace

from bus import connect
from engine import telemetry
from engine.config import Config, UiConfig
from engine.context import RoleContext
from engine.run import RunDirectory
from engine.running.role_host import Host, RoleLike
from engine.running.supervisor import Supervisor, read_address
from engine.views import live
from roles.scorer.role import ScorerRole
from scenes.scorer_cast import Cast
from scenes.scorer_world import config
from scenes.small_run import FakeRole, RememberingView


def recipe(directory: Path) -> Config:
    """Return a run that is too long to end by itself."""
    small = config(steps=100_000)
    run = replace(small.run, directory=str(directory), roles=("scorer", "agent"), drain_seconds=5.0)
    return replace(small, run=run, ui=UiConfig(live="off", report=False))


class CastRole(FakeRole):
    """Designs, plays, trains and serves, by a script."""

    name = "agent"

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(Cast(self.context.config, self.context.bus).run)
            await self.context.draining.wait()
            tasks.cancel_scope.cancel()


ROLES: dict[str, type[RoleLike]] = {"scorer": ScorerRole, "agent": CastRole}


async def _model() -> Path:
    return Path("model")


async def _role(directory: RunDirectory, config: Config) -> None:
    address = read_address(directory.root)
    assert address is not None
    login: dict[str, Any] = address.login("evaluator")
    async with connect(address.url, run=address.run, role="evaluator", instance="victim", **login) as bus:
        context = RoleContext(
            config=config,
            bus=bus,
            directory=directory.root,
            instance="victim",
            log=structlog.get_logger(),
            draining=anyio.Event(),
        )
        await Host(type("Victim", (FakeRole,), {"name": "evaluator"})(context), context).run()


def main() -> None:
    toy = recipe(Path(sys.argv[2]))
    directory = RunDirectory.of(toy)
    if sys.argv[1] == "role":
        anyio.run(_role, directory, toy)
        return
    with directory.locked():
        directory.adopt(toy)
        view = RememberingView()
        log = telemetry.configure(directory.logs, "supervisor", sink=live.sink(view))
        supervisor = Supervisor(toy, directory, view, log, prepare=_model, load=ROLES.__getitem__)
        anyio.run(supervisor.run)
    print(*dict.fromkeys(phase for phase, _ in view.seen), flush=True)


if __name__ == "__main__":
    main()
