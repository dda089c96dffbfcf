"""The roles themselves on a broker with keys and TLS: what they really ask for, their lists must allow."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
from designer_stage import GOOD, FakeValidator, Policy
from role_fakes import FakePool, FakeSandbox, make_config, make_context
from scenes.brokers import Broker, broker
from scenes.small_run import (
    FakeEvaluator,
    FakeLearner,
    FakeRole,
    FakeServer,
    RememberingView,
    config,
    policy,
    serving,
    with_roles,
)

from bus import Bus, connect, provision
from bus.access import ADMIN
from bus.messages import EnvironmentScored, EpisodeFinished, RoundClosed
from engine.config import BusConfig as BusTable
from engine.config import Config, CurriculumConfig, RunConfig
from engine.run import RunDirectory
from engine.running.role_host import get_origin, login, only_run
from engine.running.supervisor import Supervisor, read_address
from roles.agent.role import AgentRole
from roles.designer import role as designer_role
from roles.designer.role import DesignerRole
from roles.scorer.role import ScorerRole

RUN = "toy"
BUILT_IN = (ScorerRole, DesignerRole, AgentRole)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with broker(tmp_path_factory.mktemp("keys"), RUN, tls=True, roles=("fake",)) as running:
        yield running


@asynccontextmanager
async def joined(secured: Broker, role: str) -> AsyncIterator[Bus]:
    async with connect(secured.url, run=RUN, role=role, instance=f"{role}-0", **secured.login(role)) as bus:
        yield bus


def small(directory: Path) -> Config:
    return make_config(
        run=RunConfig(name=RUN, directory=str(directory), steps=1, drain_seconds=5.0),
        curriculum=CurriculumConfig(
            environments=2, rounds_per_window=1, delay=1, plays_per_round=2, hinted_plays=2
        ),
    )


async def test_scorer_designer_and_agent_play_a_round(
    secured: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(designer_role, "Validator", FakeValidator)
    await provision(secured.url, run=RUN, store_gb=1, **secured.login())
    answers = Policy(GOOD)

    def script(text: str, call: int) -> Any:
        return "\\boxed{2}" if "count from" in text and "<program>" not in text else answers(text, call)

    async with AsyncExitStack() as stack:
        buses = {
            name: await stack.enter_async_context(joined(secured, name))
            for name in ("learner", "server", "scorer", "designer", "agent", ADMIN)
        }
        await buses["learner"].publish(policy(0))
        await buses["server"].publish(serving(0))
        shared = {"pool": FakePool(script), "sandbox": FakeSandbox()}
        contexts = {
            role.name: make_context(buses[role.name], small(tmp_path), tmp_path, **shared)  # type: ignore[arg-type]
            for role in BUILT_IN
        }
        async with anyio.create_task_group() as tasks:
            for role in BUILT_IN:
                tasks.start_soon(role(contexts[role.name]).run)
            with anyio.fail_after(30):
                async with buses["learner"].follow("SAMPLE") as samples:
                    async for record in samples:
                        if isinstance(record.message, RoundClosed):
                            break
            for context in contexts.values():
                context.draining.set()
        facts = [record.message async for record in buses[ADMIN].replay("EVENT")]
        assert sum(isinstance(fact, EpisodeFinished) for fact in facts) == 8
        assert sum(isinstance(fact, EnvironmentScored) for fact in facts) == 2
        for name, bus in buses.items():
            assert bus.statistics()["connection_denied"] == 0, name


async def test_a_supervisor_and_its_roles_log_in_with_their_keys(secured: Broker, tmp_path: Path) -> None:
    names = ("fake", "learner", "server", "evaluator")
    table = BusTable(
        url=secured.url, credentials=str(secured.seed().parent), ca=str(secured.ca), store_gb=1.0
    )
    recipe = with_roles(config(tmp_path, bus=table), *names)
    roles = {role.name: role for role in (FakeRole, FakeLearner, FakeServer, FakeEvaluator)}
    directory = RunDirectory.of(recipe)

    async def prepare() -> Path:
        return Path("model")

    with directory.locked():
        directory.adopt(recipe)
        log = structlog.stdlib.get_logger()
        supervisor = Supervisor(
            recipe, directory, RememberingView(), log, prepare=prepare, load=roles.__getitem__
        )
        assert await supervisor.run() == "complete"
    address = read_address(directory.root)
    assert address is not None
    assert address.environment()["SPADE_BUS_CREDENTIALS"] == table.credentials
    async with connect(address.url, run=RUN, role="agent", instance="a", **address.login("agent")) as bus:
        assert (await get_origin(bus)).config == recipe
    known = {"credentials": table.credentials, "ca": table.ca}
    assert await only_run(secured.url, "", role="agent", **known) == RUN
    assert login("agent", **known)["seed_file"] == secured.seed("agent")
