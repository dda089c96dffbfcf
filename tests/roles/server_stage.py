"""A server role on the memory bus, and processes that stand in for its servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest
import structlog
from scenes.fake_vllm import FakeVllm, fake_vllm
from scenes.memory_bus import MemoryBus

import roles.server.role as server_role
from bus.messages import Message, ServerLost, ServerServing
from engine.config import AgentConfig, Config, LearnerConfig, ModelConfig, RunConfig, SamplingConfig
from engine.config import ServerConfig as ServerTable
from engine.inference.process import ServerFailed
from roles.base import RoleContext
from roles.server.role import ServerRole


class Stage:
    """A role under test, the bus it stands on, and what it announced."""

    def __init__(
        self, tmp_path: Path, urls: tuple[str, ...], *, learner: LearnerConfig | None = None, **settings
    ) -> None:
        table = {"start_seconds": 5.0, "canary_tolerance": 1e-3, **settings}
        self.config = Config(
            run=RunConfig(name="t"),
            model=ModelConfig(path="x"),
            server=ServerTable(urls=urls, **table),
            agent=AgentConfig(sampling=SamplingConfig(max_tokens=4)),
            learner=learner or LearnerConfig(),
        )
        self.directory = tmp_path
        self.bus = MemoryBus(run="t", role="server", instance="server-0")
        self.facts: list[Message] = []
        self._changed = anyio.Event()
        self.begin()

    def begin(self) -> None:
        """Make the role, or its next life."""
        self.context = RoleContext(
            config=self.config,
            bus=self.bus,
            directory=self.directory,
            instance="server-0",
            log=structlog.get_logger(),
        )
        self.role = ServerRole(self.context)

    async def record(self) -> None:
        tails = ("event.server.serving", "event.server.lost")
        async with self.bus.follow("EVENT", tails=tails) as records:
            async for record in records:
                self.facts.append(record.message)
                self._changed.set()
                self._changed = anyio.Event()

    async def until(self, condition: Callable[[list[Message]], bool]) -> None:
        with anyio.fail_after(15):
            while not condition(self.facts):
                await self._changed.wait()

    async def served(self, version: int) -> ServerServing:
        await self.until(lambda facts: any(getattr(fact, "version", None) == version for fact in facts))
        return next(fact for fact in self.facts if getattr(fact, "version", None) == version)

    def lost(self) -> list[ServerLost]:
        return [fact for fact in self.facts if isinstance(fact, ServerLost)]


@asynccontextmanager
async def on_stage(stage: Stage) -> AsyncIterator[Stage]:
    """Run the role; leave by draining it."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage.record)
        async with anyio.create_task_group() as roles:
            roles.start_soon(stage.role.run)
            yield stage
            stage.context.draining.set()
        await stage.until(lambda _: True)
        tasks.cancel_scope.cancel()


class Nursery:
    """Stands in for ``serve``: each start is a new fake; ``end`` makes the running one die."""

    def __init__(self, *, fail: tuple[int, ...] = (), **settings) -> None:
        self.starts = 0
        self.fakes: list[FakeVllm] = []
        self._fail, self.settings = fail, settings
        self._ended = anyio.Event()

    def end(self) -> None:
        self._ended.set()

    @asynccontextmanager
    async def serve(self, config: Config, model_path: Path, *, index: int, log_path: Path, session):
        self.starts += 1
        if self.starts in self._fail:
            raise ServerFailed("vLLM ended with status 1 before it was ready")
        self._ended = anyio.Event()
        async with AsyncExitStack() as stack:
            fake = await stack.enter_async_context(fake_vllm(**self.settings))
            self.fakes.append(fake)

            async def wait() -> str:
                await self._ended.wait()
                return "vLLM ended with status 137"

            yield type("Process", (), {"url": fake.url, "wait": staticmethod(wait)})()


@pytest.fixture
def owned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Nursery]:
    def make(**settings) -> Nursery:
        nursery = Nursery(**settings)
        monkeypatch.setattr(server_role, "serve", nursery.serve)
        monkeypatch.setattr(server_role.models, "resolve", lambda config, directory: directory)
        monkeypatch.setattr(server_role, "LONGEST_BACKOFF", 0.01)
        return nursery

    return make
