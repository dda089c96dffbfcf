"""The agent role on the bus."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from role_fakes import FakePool, FakeSandbox, RoleStage, make_config, make_context
from scenes.fake_vllm import fake_vllm, until
from scenes.memory_bus import MemoryBus
from scenes.small_run import ready
from test_episode import counting, make_request

from bus.messages import EpisodeFailed, EpisodeFinished, EpisodeSample, Message, ServerServing
from engine.config import AgentConfig as AgentConfig
from engine.config import RunConfig, SamplingConfig
from engine.inference.completion import InferenceUnavailable
from engine.inference.pool import InferencePool
from roles import work_loop
from roles.agent.role import AgentRole
from sandbox import EnvQuarantined, SandboxUnavailable


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_loop, "_FIRST_DELAY", 0.01)


class Stage(RoleStage):
    """An agent at work, its bus and its fakes."""

    def __init__(self, tmp_path: Path, script: Any = counting, **agent: Any) -> None:
        self.bus = MemoryBus(run="test", role="scorer", instance="s0")
        self.pool, self.sandbox = FakePool(script), FakeSandbox()
        settings: dict[str, Any] = {
            "concurrency": 8,
            "sampling": SamplingConfig(max_tokens=64),
            "context_tokens": 8192,
        }
        config = make_config(
            agent=AgentConfig(**{**settings, **agent}), run=RunConfig(name="test", drain_seconds=0.4)
        )
        self.context = make_context(
            self.bus.peer("agent", "a0"), config, tmp_path, pool=self.pool, sandbox=self.sandbox
        )
        self.role = self.agent = AgentRole(self.context)

    async def facts(self, count: int) -> list[Message]:
        return await self.told(count, "event.agent.>")

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
    assert len(stage.pool.calls) == work_loop.ATTEMPTS
    assert await stage.waiting() == 0


async def test_a_refused_program_is_quarantined_at_once(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.sandbox.faults.append(EnvQuarantined("killed twice"))
    await stage.bus.publish(make_request())
    async with stage.at_work():
        (fact,) = await stage.facts(1)
    assert isinstance(fact, EpisodeFailed)
    assert fact.failure == "quarantined"


async def test_a_slow_play_that_goes_on_has_its_outcome(tmp_path: Path) -> None:
    """Three replies and steps, each in time, together longer than a play may be without any."""
    stage = Stage(tmp_path, episode_seconds=1.0)
    answer = stage.pool.generate

    async def slow(*given: Any, **more: Any) -> Any:
        await anyio.sleep(0.4)
        return await answer(*given, **more)

    stage.pool.generate = slow  # type: ignore[method-assign]
    await stage.bus.publish(make_request())
    async with stage.at_work():
        (fact,) = await stage.facts(1)
    assert isinstance(fact, EpisodeFinished), fact
    assert fact.turns * 0.4 > 1.0
    assert fact.seconds > 1.0


async def test_an_episode_without_progress_has_a_deadline(tmp_path: Path) -> None:
    stage = Stage(tmp_path, episode_seconds=0.4)  # a busy machine takes a while to open an instance
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


async def test_tokens_are_stored_before_the_fact_that_names_them(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    request = make_request()
    await stage.bus.publish(request)
    async with stage.at_work():
        (fact,) = await stage.facts(1)
    (sample,) = [record.message async for record in stage.bus.replay("SAMPLE")]
    assert isinstance(fact, EpisodeFinished)
    assert isinstance(sample, EpisodeSample)
    assert (fact.sample, sample.episode, sample.round) == (sample.sample, request.episode, request.round)
    assert fact.tokens == sum(segment.sampled for segment in sample.segments)


async def test_a_program_comes_from_its_fact_and_one_play_of_a_kind_has_a_transcript(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.bus.publish(ready("d1", environment="e1"))
    requests = [
        make_request(episode=f"{arm}{index}", arm=arm, index=index, environment="e1", source="")
        for index in range(4)
        for arm in ("plain", "hinted")
    ]
    await stage.bus.publish_all(requests)
    async with stage.at_work():
        facts = [fact for fact in await stage.facts(8) if isinstance(fact, EpisodeFinished)]
    kinds = Counter((fact.arm, fact.returned > 0) for fact in facts)
    assert kinds.total() == 8
    assert Counter((fact.arm, fact.returned > 0) for fact in facts if fact.transcript) == Counter(set(kinds))


async def test_an_episode_whose_program_is_not_there_is_asked_for_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await stage.bus.publish(make_request(environment="e1", source=""))
    async with stage.at_work():
        await until(lambda: bool(stage.agent.statistics().get("handed_back")))
        await stage.bus.publish(ready("d1", environment="e1"))
        (fact,) = await stage.facts(1)
    assert isinstance(fact, EpisodeFinished)


async def test_a_defect_ends_the_role(tmp_path: Path) -> None:
    stage = Stage(tmp_path, lambda *_: ZeroDivisionError("a defect"))
    await stage.bus.publish(make_request())
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True), anyio.fail_after(5):
        await stage.agent.run()


async def held(stage: Stage, count: int) -> None:
    """Wait until the agent has ``count`` plays in hand, and see that it does not take more."""
    with anyio.fail_after(5):
        while stage.agent.statistics()["in_hand"] < count:  # noqa: ASYNC110 - nobody tells a gauge
            await anyio.sleep(0.005)
    for _ in range(50):
        await anyio.lowlevel.checkpoint()
    assert stage.agent.statistics()["in_hand"] == count


async def test_no_more_is_leased_than_the_servers_have_room_for(tmp_path: Path) -> None:
    stage = Stage(tmp_path, concurrency=288)
    stage.pool.limit, stage.pool.gate = 16, anyio.Event()
    await stage.bus.publish_all([make_request(episode=f"ep{number}") for number in range(60)])
    async with stage.at_work():
        await held(stage, 20)
        assert stage.agent.slots == 20
        stage.pool.limit = 32
        await held(stage, 40)
        other = AgentRole(
            make_context(
                stage.bus.peer("agent", "a1"),
                stage.context.config,
                tmp_path,
                pool=FakePool(counting),
                sandbox=FakeSandbox(),
            )
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.run)
            facts = await stage.facts(20)  # what the first one left is played by another
            other.context.draining.set()
        assert len(facts) == 20
        stage.pool.gate.set()
        await stage.facts(60)
    assert await stage.waiting() == 0


async def test_no_more_is_leased_than_the_sandbox_takes(tmp_path: Path) -> None:
    stage = Stage(tmp_path, concurrency=288)
    stage.sandbox.max_live, stage.pool.gate = 5, anyio.Event()
    await stage.bus.publish_all([make_request(episode=f"ep{number}") for number in range(9)])
    async with stage.at_work():
        await held(stage, 5)
        assert stage.pool.busy == 5, "nobody waits for an instance"
        stage.pool.gate.set()
        assert len(await stage.facts(9)) == 9


async def test_missed_deadlines_halve_what_is_held(tmp_path: Path) -> None:
    stage = Stage(tmp_path, concurrency=64)
    stage.pool.limit = 64
    stage.pool.script = lambda text, call: InferenceUnavailable("late") if call < 8 else counting(text, 0)
    await stage.bus.publish_all([make_request(episode=f"ep{number}") for number in range(20)])
    async with stage.at_work():
        await stage.facts(20)
        with anyio.fail_after(5):
            while not stage.agent.statistics()["limit_cuts"]:  # noqa: ASYNC110 - nobody tells a gauge
                await anyio.sleep(0.005)
    assert stage.agent.slots < 40


async def test_who_else_waits_for_the_servers_is_no_congestion(tmp_path: Path) -> None:
    """The designers' requests queue for a while: the plays that keep the servers full are none too many."""
    stage = Stage(tmp_path, concurrency=64)
    pool = InferencePool(max_concurrency=8, request_seconds=20.0)
    stage.context.shared["pool"] = pool  # type: ignore[index]

    async def design(number: int) -> None:
        await pool.generate([1], sampling=SamplingConfig(max_tokens=4), key=f"d{number}", stop_token_ids=[2])

    async with fake_vllm() as fake, pool, anyio.create_task_group() as designers:
        pool.apply(
            ServerServing(server="s", epoch="1", url=fake.url, version=0, canary_error=0.0, seconds=0.0)
        )
        fake.hold.clear()
        for number in range(24):
            designers.start_soon(design, number)
        await until(lambda: pool.statistics()["waiting"] == 16)
        async with stage.at_work():
            await until(lambda: stage.agent.slots == 10)
            for _ in range(20):
                stage.agent._look(8)
            assert (stage.agent.slots, stage.agent.statistics()["limit_cuts"]) == (10, 0)
            await stage.bus.publish_all([make_request(episode=f"ep{number}") for number in range(9)])
            await until(lambda: pool.statistics()["waiting"] == 16 + 9)
            for _ in range(8):
                stage.agent._look(0)
            assert stage.agent.statistics()["limit_cuts"] == 1, "its own are"
        designers.cancel_scope.cancel()


async def test_a_step_that_is_cancelled_leaves_no_instance(tmp_path: Path) -> None:
    stage = Stage(tmp_path, episode_seconds=0.05)
    gate = anyio.Event()

    async def never(action: str) -> None:
        await gate.wait()

    spawn = stage.sandbox.spawn

    async def stuck(*given: Any, **more: Any) -> Any:
        instance = await spawn(*given, **more)
        instance.step = never  # type: ignore[method-assign, assignment]
        return instance

    stage.sandbox.spawn = stuck  # type: ignore[method-assign]
    await stage.bus.publish(make_request())
    async with stage.at_work():
        (fact,) = await stage.facts(1)
    assert isinstance(fact, EpisodeFailed)
    assert [instance.closed for instance in stage.sandbox.instances] == [True]
    assert stage.agent._player.stepping == 0


async def test_a_play_of_two_agents_has_one_fact(tmp_path: Path) -> None:
    """The first agent is lost between its fact and its acknowledgement, and the second plays it again."""
    stage = Stage(tmp_path)
    await stage.bus.publish(make_request())
    async with stage.at_work():
        (first,) = await stage.facts(1)
    before = (await stage.bus.stream_info("EVENT")).messages
    stage.pool.calls.clear()
    player, request = stage.agent._player, make_request()
    played = await player.play(request)
    second = played.finished(request, played.sample(request, player.rules))
    await stage.bus.publish(second)
    assert (await stage.bus.stream_info("EVENT")).messages == before
    assert isinstance(first, EpisodeFinished)
    assert msgspec.structs.replace(second, seconds=0.0) == msgspec.structs.replace(first, seconds=0.0)


async def test_a_draining_agent_asks_for_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that came while plays go on would be held until the last of them ends."""
    stage = Stage(tmp_path)
    wanted: list[Any] = []
    consume = MemoryBus.consume

    def seen(bus: MemoryBus, consumer: str, *, limit: int, now: Any = None) -> Any:
        wanted.append(now)
        return consume(bus, consumer, limit=limit, now=now)

    monkeypatch.setattr(MemoryBus, "consume", seen)
    await stage.bus.publish(make_request())
    async with stage.at_work():
        await stage.facts(1)
        assert wanted[0]() == stage.agent.slots >= 1
        stage.context.draining.set()
        assert wanted[0]() == 0
