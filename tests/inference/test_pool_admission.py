"""Servers that may get requests: versions, restarts, breakers, labels that nobody has proved yet."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest
from scenes.fake_vllm import FakeVllm, fake_vllm, policy, until
from scenes.memory_bus import MemoryBus
from scenes.pools import GENERATE, announced, ask, lost, new_pool, serving

from bus.messages import Message
from engine.inference import health_prober
from engine.inference.completion import Completion, InferenceUnavailable
from engine.inference.pool import InferencePool


async def spread(pool: InferencePool, count: int = 6) -> None:
    async with anyio.create_task_group() as tasks:
        for index in range(count):
            tasks.start_soon(ask, pool, f"{uuid.uuid4()}-{index}")


def apply(pool: InferencePool, *facts: Message) -> None:
    for fact in facts:
        pool.apply(fact)


@pytest.fixture
async def a() -> AsyncIterator[FakeVllm]:
    async with fake_vllm() as fake:
        yield fake


@pytest.fixture
async def b() -> AsyncIterator[FakeVllm]:
    async with fake_vllm() as fake:
        yield fake


@pytest.fixture
async def pool() -> AsyncIterator[InferencePool]:
    async with new_pool() as made:
        yield made


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(run="t", role="agent", instance="agent-0")


@asynccontextmanager
async def watched(pool: InferencePool, bus: MemoryBus, *facts: Message) -> AsyncIterator[None]:
    """The pool follows the bus, then ``facts`` come."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.watch, bus)
        await bus.publish_all(facts)
        yield
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def held_back(pool: InferencePool) -> AsyncIterator[list[Completion]]:
    """A completion whose version is not proved yet; at the end of the context it is in the list."""
    found: list[Completion] = []

    async def one() -> None:
        found.append(await ask(pool))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await until(lambda: pool.statistics()["unproved"] == 1)
        yield found


async def test_a_restarted_server_gets_nothing_before_the_current_version(
    a: FakeVllm, b: FakeVllm, pool: InferencePool
) -> None:
    apply(pool, policy(1), serving(a, "a", 1), serving(b, "b", 1))
    apply(pool, lost())
    apply(pool, policy(2), serving(b, "b", 2), serving(a, "a", 1, epoch="2"))
    await spread(pool)
    assert a.calls[GENERATE] == 0
    assert pool.statistics()["serving"] == 1
    apply(pool, policy(3), serving(a, "a", 2, epoch="2"))
    await spread(pool)
    assert a.calls[GENERATE] == 0, "what it serves was current when it began to load"
    apply(pool, serving(a, "a", 3, epoch="2"))
    await spread(pool)
    assert a.calls[GENERATE] > 0


async def test_a_server_whose_update_is_on_its_way_goes_on(a: FakeVllm, pool: InferencePool) -> None:
    apply(pool, policy(1), serving(a, "a", 1), policy(2))
    completion = await ask(pool)
    assert completion.spans[0].version == 1
    assert pool.statistics()["a.lag"] == 1


async def test_a_server_that_falls_too_far_behind_gets_nothing(a: FakeVllm) -> None:
    async with new_pool(max_lag=2) as pool:
        apply(pool, policy(1), serving(a, "a", 1), policy(2), policy(3))
        await ask(pool)
        apply(pool, policy(4))
        assert pool.statistics()["a.lag"] == 3
        with pytest.raises(InferenceUnavailable, match="0 of 1"):
            await ask(pool, deadline=0.05)
        apply(pool, serving(a, "a", 2))
        await ask(pool)


async def test_a_learner_that_went_back_is_followed(a: FakeVllm, b: FakeVllm, pool: InferencePool) -> None:
    """Version 5 of the first learner is abandoned; 3 of the second one is newer."""
    second = 1 << 32
    apply(pool, policy(5), serving(a, "a", 5), policy(second | 3, step=3))
    assert pool.statistics()["a.lag"] == 2, "down to the fork at step 3"
    apply(pool, serving(b, "b", 5))
    assert pool.statistics()["b.usable"] == 0
    apply(pool, serving(b, "b", second | 3))
    assert pool.statistics()["b.usable"] == 1


async def test_who_waits_is_served_when_the_learner_goes_back_near_enough(a: FakeVllm) -> None:
    second = 1 << 32
    async with new_pool(max_lag=2) as pool:
        apply(pool, policy(2), serving(a, "a", 2), policy(5))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool)
            await until(lambda: pool.statistics()["waiting"] == 1)
            apply(pool, policy(second | 3, step=3))
        assert pool.statistics()["a.answers"] == 1


async def test_a_pool_that_starts_late_knows_the_current_version(
    a: FakeVllm, b: FakeVllm, pool: InferencePool, bus: MemoryBus
) -> None:
    facts = (policy(1), serving(a, "a", 1), serving(b, "b", 1), policy(2), serving(b, "b", 2))
    await bus.publish_all(facts)
    async with watched(pool, bus):
        await pool.ready(5.0)
        await until(lambda: len(pool.versions()) == 2)
        await spread(pool)
        assert a.calls[GENERATE] == 0
        await bus.publish(serving(a, "a", 2))
        await until(lambda: pool.statistics()["serving"] == 2)


async def test_a_recovered_server_must_serve_the_current_version(
    a: FakeVllm, pool: InferencePool, bus: MemoryBus
) -> None:
    """Its breaker opened; versions went by; a probe shows life, and the old label: that is not enough."""
    async with watched(pool, bus, policy(1), serving(a, "a", 1)):
        await pool.ready(5.0)
        a.faults[GENERATE] = [500] * 99
        while not pool.statistics()["breakers_opened"]:
            with pytest.raises(InferenceUnavailable):
                await ask(pool, deadline=0.05)
        a.faults[GENERATE].clear()
        asked = a.calls[GENERATE]
        await bus.publish(policy(2))
        await until(lambda: a.calls[GENERATE] > asked)  # the probe
        await until(lambda: a.running == 0)
        await anyio.wait_all_tasks_blocked()
        assert pool.statistics()["serving"] == 0
        await bus.publish(serving(a, "a", 2))
        await pool.ready(5.0)
        await ask(pool)


async def test_a_recovered_server_is_tried_with_a_few_requests(
    a: FakeVllm, pool: InferencePool, bus: MemoryBus
) -> None:
    async with watched(pool, bus, policy(1), serving(a, "a", 1)):
        await pool.ready(5.0)
        a.faults[GENERATE] = [500] * 3
        a.pace = 0.04
        async with anyio.create_task_group() as tasks:
            for index in range(12):
                tasks.start_soon(ask, pool, f"{index}")
            await until(lambda: pool.statistics()["breakers_opened"] == 1)
            await until(lambda: a.running == 0)
            sent = len(a.bodies)
            await until(lambda: len(a.bodies) == sent + 9)  # the probe, and eight requests
            assert (pool.statistics()["in_flight"], pool.statistics()["waiting"]) == (8, 4)
            assert pool.statistics()["a.answers"] == 0
        assert pool.statistics()["a.answers"] == 12


async def test_a_server_started_anew_behind_our_back_is_left_at_once(
    a: FakeVllm, b: FakeVllm, pool: InferencePool, bus: MemoryBus
) -> None:
    async with watched(pool, bus, policy(1), serving(a, "a", 1), serving(b, "b", 1)):
        await until(lambda: pool.statistics()["serving"] == 2)
        a.version = "default"
        await spread(pool)
        asked = a.calls[GENERATE]
        assert pool.statistics()["a.usable"] == 0
        await until(lambda: a.calls[GENERATE] > asked)  # a probe: it lives, but with which weights?
        await until(lambda: a.running == 0)
        await spread(pool)
        assert pool.statistics()["a.usable"] == 0
        assert pool.statistics()["a.answers"] == 0


async def test_tokens_are_held_until_their_version_is_acknowledged(a: FakeVllm, pool: InferencePool) -> None:
    apply(pool, policy(1), serving(a, "a", 1), policy(2))
    a.version = a.loaded = "2"  # loaded, not proved
    async with held_back(pool) as found:
        await anyio.wait_all_tasks_blocked()
        assert not found
        apply(pool, announced(a, "a", 2))
    assert found[0].spans[0].version == 2


async def test_tokens_whose_version_is_never_acknowledged_are_thrown_away(
    a: FakeVllm, b: FakeVllm, pool: InferencePool
) -> None:
    """The proof failed: the server is announced as lost, or again under another epoch."""
    apply(pool, policy(1), serving(a, "a", 1), policy(2))
    a.version, a.loaded = "2", "1"  # the label moved, the weights did not
    async with held_back(pool) as found:
        apply(pool, lost(), serving(b, "b", 2))
    assert b.calls[GENERATE] == 1
    assert pool.statistics()["moved"] == 1
    assert found[0].spans[0].version == 2


async def test_a_newer_proof_does_not_vouch_for_a_version_that_was_passed_over(
    a: FakeVllm, pool: InferencePool
) -> None:
    """Version 2 was in the server, but nobody proved it before 3 came."""
    apply(pool, policy(1), serving(a, "a", 1), policy(2), policy(3))
    a.version = "2"
    async with held_back(pool) as found:
        apply(pool, serving(a, "a", 3))
    assert [span.version for span in found[0].spans] == [3]
    assert a.calls[GENERATE] == 2
    assert (pool.statistics()["moved"], pool.statistics()["a.failures"]) == (1, 0), "no fault of its own"


async def test_a_version_that_is_not_acknowledged_in_time_ends_at_the_deadline(
    a: FakeVllm, pool: InferencePool
) -> None:
    apply(pool, serving(a, "a", 1))
    a.version = "2"
    with anyio.fail_after(5), pytest.raises(InferenceUnavailable, match="not acknowledged"):
        await ask(pool, deadline=0.2)
    assert pool.statistics()["in_flight"] == 0
    assert pool.statistics()["limit_cuts"] == 0, "the server answered in time"


async def test_a_long_load_is_forgiven_while_newer_weights_are_there(
    a: FakeVllm, bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it loads, a server may not even be able to say that it is paused."""
    monkeypatch.setattr(health_prober, "_WATCH_SECONDS", 0.02)
    pool = new_pool(stuck_seconds=0.05)
    async with watched(pool, bus, policy(1), serving(a, "a", 1), policy(2)):
        await until(lambda: pool.versions() == {"a": 1})
        await until(lambda: pool.statistics()["a.lag"] == 1)
        a.hold.clear()
        a.faults["/is_paused"] = ["hang"] * 20
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool)
            await until(lambda: a.calls["/is_paused"] >= 2)
            assert pool.statistics()["serving"] == 1
            await until(lambda: pool.statistics()["serving"] == 0)  # but not for ever
            a.faults.clear()
            await bus.publish(serving(a, "a", 2))
            a.hold.set()
