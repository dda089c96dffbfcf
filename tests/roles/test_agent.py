"""The agent role on the bus."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from role_fakes import FakePool, FakeSandbox, make_config, make_context
from test_episode import counting, make_request

from bus import MemoryBus
from bus.messages import EpisodeFailed, EpisodeFinished, Message
from engine.config import Agent as AgentConfig
from engine.config import Run, Sampling
from engine.inference.completion import InferenceUnavailable
from roles import work
from roles.agent.role import Agent
from sandbox import EnvQuarantined, SandboxUnavailable


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_FIRST_DELAY", 0.01)


class Stage:
    """An agent at work, its bus and its fakes."""

    def __init__(self, tmp_path: Path, script: Any = counting, **agent: Any) -> None:
        self.bus = MemoryBus(run="test", role="scorer", instance="s0")
        self.pool, self.sandbox = FakePool(script), FakeSandbox()
        settings: dict[str, Any] = {
            "concurrency": 8,
            "sampling": Sampling(max_tokens=64),
            "context_tokens": 8192,
        }
        config = make_config(
            agent=AgentConfig(**{**settings, **agent}), run=Run(name="test", drain_seconds=0.4)
        )
        self.context = make_context(
            self.bus.peer("agent", "a0"), config, tmp_path, pool=self.pool, sandbox=self.sandbox
        )
        self.agent = Agent(self.context)

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.agent.run)
            yield
            self.context.draining.set()

    async def facts(self, count: int) -> list[Message]:
        found: list[Message] = []
        with anyio.fail_after(10):
            async with self.bus.follow("EVENT", tails=("event.agent.>",)) as records:
                async for record in records:
                    found.append(record.message)
                    if len(found) == count:
                        return found
        raise AssertionError("the stream ended")

    async def waiting(self) -> int:
        return (await self.bus.stream_info("TASK")).messages


async def test_requests_become_outcomes_and_leave_the_queue(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.bus.publish_all(
        [make_request(episode=f"ep{number}", index=number, seed=7) for number in range(30)]
    )
    async with stage.at_work():
        facts = await stage.facts(30)
    assert {fact.episode for fact in facts if isinstance(fact, EpisodeFinished)} == {
        f"ep{n}" for n in range(30)
    }
    assert await stage.waiting() == 0
    assert stage.pool.most_busy <= 8
    assert stage.agent.statistics()["in_hand"] == 0


async def test_an_infrastructure_fault_is_tried_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.sandbox.faults += [SandboxUnavailable("gone"), SandboxUnavailable("gone")]
    stage.pool.script = lambda text, call: (
        InferenceUnavailable("gone") if call == 0 else counting(text, call - 1)
    )
    await stage.bus.publish(make_request())
    async with stage.at_work():
        (fact,) = await stage.facts(1)
    assert isinstance(fact, EpisodeFinished)
    assert fact.returned == 1.0
    assert stage.agent.statistics()["handed_back"] == 3
    assert await stage.waiting() == 0


async def test_a_lasting_infrastructure_fault_fails_the_episode_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path, lambda *_: InferenceUnavailable("no server"))
    await stage.bus.publish(make_request())
    async with stage.at_work():
        (fact,) = await stage.facts(1)
    assert isinstance(fact, EpisodeFailed)
    assert (fact.failure, fact.episode, fact.design) == ("infra", "ep1", "d1")
    assert "no server" in fact.reason
    assert len(stage.pool.calls) == work.ATTEMPTS
    assert await stage.waiting() == 0


async def test_a_refused_program_is_quarantined_at_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.sandbox.faults.append(EnvQuarantined("killed twice"))
    await stage.bus.publish(make_request())
    async with stage.at_work():
        (fact,) = await stage.facts(1)
    assert isinstance(fact, EpisodeFailed)
    assert fact.failure == "quarantined"


async def test_an_episode_has_a_deadline(tmp_path: Path) -> None:
    stage = Stage(tmp_path, episode_seconds=0.05)
    stage.pool.gate = anyio.Event()
    await stage.bus.publish(make_request())
    async with stage.at_work():
        (fact,) = await stage.facts(1)
    assert isinstance(fact, EpisodeFailed)
    assert fact.failure == "infra"
    assert stage.sandbox.instances[0].closed


async def test_a_drain_finishes_what_is_in_hand(tmp_path: Path) -> None:
    stage = Stage(tmp_path, concurrency=2)
    stage.pool.gate = anyio.Event()
    await stage.bus.publish_all([make_request(episode=f"ep{number}") for number in range(5)])
    async with stage.at_work():
        with anyio.fail_after(5):
            while stage.pool.busy < 2:
                await anyio.lowlevel.checkpoint()
        stage.context.draining.set()
        await anyio.lowlevel.checkpoint()
        stage.pool.gate.set()
    assert await stage.waiting() == 3
    assert len(await stage.facts(2)) == 2


async def test_a_drain_hands_back_what_takes_too_long(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.pool.gate = anyio.Event()
    await stage.bus.publish(make_request())
    async with stage.at_work():
        with anyio.fail_after(5):
            while stage.pool.busy < 1:
                await anyio.lowlevel.checkpoint()
    assert stage.sandbox.instances[0].closed
    async with stage.bus.consume("agent", limit=1) as deliveries:
        with anyio.fail_after(5):
            delivery = await anext(aiter(deliveries))
        assert delivery.attempt == 2
        await delivery.ack()


async def test_masked_truncation(tmp_path: Path) -> None:
    stage = Stage(tmp_path, truncated="mask", max_turns=2)
    await stage.bus.publish(make_request())
    async with stage.at_work():
        (fact,) = await stage.facts(1)
    assert isinstance(fact, EpisodeFinished)
    assert (fact.outcome, fact.segments, fact.turns) == ("truncated", (), 2)


async def test_a_defect_ends_the_role(tmp_path: Path) -> None:
    stage = Stage(tmp_path, lambda *_: ZeroDivisionError("a defect"))
    await stage.bus.publish(make_request())
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True), anyio.fail_after(5):
        await stage.agent.run()
