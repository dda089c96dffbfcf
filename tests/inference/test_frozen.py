"""A frozen server: nothing reaches it, a version label gives it away, and it comes back when it ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import structlog
from scenes.fake_vllm import FakeVllm, fake_vllm, policy, until
from scenes.memory_bus import MemoryBus

from engine.config import (
    Config,
    DesignerConfig,
    FrozenConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    ServerConfig,
)
from engine.errors import ConfigError
from engine.inference import frozen as module
from engine.inference import launch
from engine.inference.completion import Completion, InferenceUnavailable
from engine.inference.frozen import FrozenServer, config_of, open_frozen
from engine.inference.pool import Thawed
from engine.inference.process import ServerFailed
from engine.inference.vllm import VllmClient, open_session
from roles.base import RoleContext
from roles.server.role import ServerRole as ServerRole


def make_config(url: str = "", **frozen: Any) -> Config:
    return Config(
        run=RunConfig(name="t"),
        model=ModelConfig(path="start"),
        server=ServerConfig(
            start_seconds=5.0, request_seconds=5.0, canary_tolerance=1e-3, args={"a": 1, "b": 2}, port=9000
        ),
        designer=DesignerConfig(kind="frozen", frozen=FrozenConfig(url=url, **frozen), concurrency=8),
    )


async def ask(server: FrozenServer, deadline: float | None = None) -> Completion:
    sampling = SamplingConfig(max_tokens=3)
    return await server.generate([1, 2], sampling=sampling, key="d", stop_token_ids=(9,), deadline=deadline)


async def test_a_running_server_is_adopted_and_asked(tmp_path: Path) -> None:
    async with (
        fake_vllm() as fake,
        open_frozen(make_config(fake.url), tmp_path, name="x") as server,
    ):
        completion = await ask(server)
        assert [span.version for span in completion.spans] == [-1]
        assert "seed" not in fake.bodies[-1]["sampling_params"]
        statistics = server.statistics()
    assert (statistics["serving"], statistics["requests"], statistics["tokens"]) == (1, 1, 3)


async def test_no_update_reaches_it(tmp_path: Path) -> None:
    """The run's server takes every version; the frozen one is asked meanwhile and sees no control call."""
    async with fake_vllm() as updated, fake_vllm() as fake:
        config = make_config(fake.url)
        bus = MemoryBus(run="t", role="server", instance="server-0")
        config = msgspec.structs.replace(
            config, server=msgspec.structs.replace(config.server, urls=(updated.url,), port=0)
        )
        context = RoleContext(
            config=config, bus=bus, directory=tmp_path, instance="server-0", log=structlog.get_logger()
        )
        async with (
            anyio.create_task_group() as tasks,
            open_frozen(config, tmp_path, name="x") as server,
        ):
            tasks.start_soon(ServerRole(context).run)
            for version in (1, 2):
                await bus.publish(policy(version))
                await until(lambda wanted=str(version): updated.version == wanted)
                assert [span.version for span in (await ask(server)).spans] == [-1]
            context.draining.set()
    assert fake.version == "default"
    assert set(fake.calls) == {"/health", "/inference/v1/generate"}


async def test_pushed_weights_are_refused(tmp_path: Path) -> None:
    async with (
        fake_vllm(version="3") as fake,
        open_frozen(make_config(fake.url), tmp_path, name="x") as server,
    ):
        with pytest.raises(Thawed, match="pushed into it"):
            await ask(server)


async def test_faults_are_retried_until_the_deadline(tmp_path: Path) -> None:
    async with (
        fake_vllm(faults={"/inference/v1/generate": [500]}) as fake,
        open_frozen(make_config(fake.url), tmp_path, name="x") as server,
    ):
        assert (await ask(server)).tokens
        assert server.statistics()["failures"] == 1
        fake.faults["/inference/v1/generate"] = [500] * 1000
        with pytest.raises(InferenceUnavailable, match=r"last failure: .*HTTP 500"):
            await ask(server, deadline=0.4)


def opener(*fakes: FakeVllm | None) -> tuple[module.Opens, list[anyio.Event]]:
    """Open one fake after the other; each ends when its event is set. None does not start."""
    rest, ends = list(fakes), [anyio.Event() for _ in fakes]
    begun = iter(range(len(fakes)))

    @asynccontextmanager
    async def opens() -> AsyncIterator[tuple[VllmClient, Callable[[], Awaitable[str]]]]:
        number = next(begun)
        fake = rest[number]
        if fake is None:
            raise ServerFailed("it did not start")

        async def ended() -> str:
            await ends[number].wait()
            return "it ended"

        async with open_session() as session:
            yield VllmClient(fake.url, session), ended

    return opens, ends


async def test_it_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_BACKOFF", 0.01)
    async with fake_vllm() as first, fake_vllm() as second:
        opens, ends = opener(first, second)
        server = FrozenServer(opens, request_seconds=5.0, max_concurrency=8)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(server.keep)
            await ask(server)
            ends[0].set()
            await until(lambda: server.statistics().get("starts") == 2)
            await ask(server)
            tasks.cancel_scope.cancel()
    assert first.calls["/inference/v1/generate"] == second.calls["/inference/v1/generate"] == 1
    assert server.statistics()["starts"] == 2


async def test_a_server_that_never_starts_ends_the_run() -> None:
    opens, _ = opener(None)
    with pytest.raises(ServerFailed, match="did not start"):
        await FrozenServer(opens, request_seconds=5.0, max_concurrency=8).keep()


async def test_a_server_that_does_not_come_back_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONGEST_BACKOFF", 0.01)
    async with fake_vllm() as fake:
        opens, ends = opener(fake, None, None, None)
        ends[0].set()
        with pytest.raises(ServerFailed, match="did not start"):
            await FrozenServer(opens, request_seconds=5.0, max_concurrency=8).keep()


async def test_a_server_that_is_not_there_is_said_by_key(tmp_path: Path) -> None:
    async with fake_vllm() as fake:
        url = fake.url
    config = make_config(url)
    config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, start_seconds=0.1))
    with pytest.raises(ServerFailed, match=r"designer\.frozen\.url"):
        async with open_frozen(config, tmp_path, name="x") as server:
            await ask(server)


def test_its_command_line_takes_no_weights() -> None:
    config = config_of(make_config(path="other", args={"b": 3}, environment={"E": "1"}, port=7000))
    words = launch.command(config, Path("other"), 7000, updates=False)
    assert "--weight-transfer-config" not in words
    assert words[words.index("--a") + 1 : words.index("--a") + 2] == ["1"]
    assert words[words.index("--b") + 1] == "3"
    assert (config.model.path, config.server.port, config.server.count) == ("other", 7000, 1)
    environment = launch.environment(config)
    assert environment["VLLM_SERVER_DEV_MODE"] == "0", "without it there are no routes for an update"
    assert environment["E"] == "1"


def test_by_default_it_is_the_starting_model() -> None:
    assert config_of(make_config()).model.path == "start"
    with pytest.raises(ConfigError):
        launch.command(config_of(make_config(args={"weight-transfer-config": "x"})), Path("x"), 1)
