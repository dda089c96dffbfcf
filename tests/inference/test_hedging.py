"""A second server for who waits too long: rare, counted, and without a trace on the loser."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes.fake_vllm import STOP, FakeVllm, fake_vllm, until

from bus.messages import ServerServing
from engine.checks.settings import check
from engine.config import Config, ModelConfig, RunConfig, SamplingConfig, ServerConfig
from engine.inference.completion import Completion, InferenceUnavailable, ServerRefused
from engine.inference.hedging import Hedging, Latencies
from engine.inference.pool import InferencePool

GENERATE = "/inference/v1/generate"


def serving(fake: FakeVllm, name: str) -> ServerServing:
    fake.version = fake.loaded = "1"
    return ServerServing(server=name, epoch="1", url=fake.url, version=1, canary_error=0.0, seconds=0.0)


def new_pool(hedge: float = 0.9) -> InferencePool:
    return InferencePool(max_concurrency=16, request_seconds=10.0, stuck_seconds=5.0, hedge=hedge)


async def ask(pool: InferencePool, key: str = "e", deadline: float | None = None) -> Completion:
    return await pool.generate(
        [1, 2],
        sampling=SamplingConfig(max_tokens=8),
        seed=None,
        key=key,
        stop_token_ids=[STOP],
        deadline=deadline,
    )


async def warm(pool: InferencePool, count: int = 40) -> None:
    """Let the pool learn how long an answer takes; afterwards ``mine`` is bound to the server ``a``."""
    for _ in range(count):
        await ask(pool, "mine")
    assert pool.statistics()["a.answers"] == count


@settings(max_examples=30)
@given(st.lists(st.floats(0, 100), min_size=32, max_size=300), st.floats(0.5, 0.99))
def test_a_quantile_is_one_of_the_last_answers(seconds: list[float], share: float) -> None:
    latencies = Latencies(window=100)
    for one in seconds:
        latencies.add(8, one)
    last = seconds[-100:]
    found = latencies.quantile(8, share)
    assert found in last
    assert sum(one <= found for one in last) >= share * len(last)
    assert latencies.quantile(9, share) is None


def test_kinds_are_bounded_and_too_few_answers_tell_nothing() -> None:
    latencies = Latencies(least=2, kinds=2)
    for kind in (1, 1, 2, 2, 3, 3):
        latencies.add(kind, 1.0)
    assert [latencies.quantile(kind, 0.9) for kind in (1, 2, 3)] == [None, 1.0, 1.0]
    latencies.add(4, 1.0)
    assert latencies.quantile(4, 0.9) is None


def test_at_most_one_request_in_ten_is_hedged() -> None:
    hedging = Hedging(0.5)
    for _ in range(1000):
        hedging.delay(1)
        hedging.sent += hedging.allowed()
    assert hedging.sent == 100
    with pytest.raises(ValueError, match="quantile"):
        Hedging(1.0)


@pytest.mark.parametrize(
    ("hedge", "fits"), [(0.0, True), (0.95, True), (0.3, False), (1.0, False), (-1, False)]
)
def test_the_setting_is_checked(hedge: float, fits: bool) -> None:
    table = ServerConfig(hedge=hedge)
    found = check(Config(run=RunConfig(name="t"), model=ModelConfig(path="x"), server=table))
    assert ("server.hedge" in [key for key, _ in found]) != fits


async def test_nothing_is_hedged_by_default() -> None:
    assert (
        Config(run=RunConfig(name="t"), model=ModelConfig(path="x"), server=ServerConfig()).server.hedge
        == 0.0
    )
    async with fake_vllm() as a, fake_vllm() as b, new_pool(hedge=0.0) as pool:
        pool.apply(serving(a, "a"))
        await warm(pool)
        pool.apply(serving(b, "b"))
        a.hold.clear()
        with pytest.raises(InferenceUnavailable):
            await ask(pool, "mine", deadline=0.2)
        assert b.calls[GENERATE] == 0
        assert pool.statistics()["hedges"] == 0


async def test_a_stalled_servers_request_is_answered_by_another_and_aborted_there() -> None:
    async with fake_vllm() as a, fake_vllm() as b, new_pool() as pool:
        pool.apply(serving(a, "a"))
        await warm(pool)
        pool.apply(serving(b, "b"))
        a.hold.clear()
        with anyio.fail_after(5):
            assert (await ask(pool, "mine")).tokens
        assert b.calls[GENERATE] == 1
        await until(lambda: a.running == 0)
        statistics = pool.statistics()
        assert (statistics["hedges"], statistics["hedges_won"], statistics["in_flight"]) == (1, 1, 0)
        assert statistics["hedge_wasted_seconds"] > 0
        assert (statistics["failures"], statistics["a.opened"]) == (0, 0), "losing is no failure"
        a.hold.set()
        await ask(pool, "mine")
        assert a.calls[GENERATE] == 42, "the episode stays where its prefix is"


async def test_the_first_server_may_still_win() -> None:
    async with fake_vllm() as a, fake_vllm() as b, new_pool() as pool:
        pool.apply(serving(a, "a"))
        await warm(pool)
        pool.apply(serving(b, "b"))
        a.hold.clear()
        b.hold.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, "mine")
            await until(lambda: b.running == 1)
            a.hold.set()
        await until(lambda: b.running == 0)
        statistics = pool.statistics()
        assert (statistics["hedges"], statistics["hedges_won"], statistics["in_flight"]) == (1, 0, 0)
        b.hold.set()


async def test_the_hedge_goes_on_when_the_first_server_fails() -> None:
    async with fake_vllm() as a, fake_vllm() as b, new_pool() as pool:
        pool.apply(serving(a, "a"))
        await warm(pool)
        pool.apply(serving(b, "b"))
        b.hold.clear()
        a.faults[GENERATE] = ["hang"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, "mine")
            await until(lambda: b.running == 1)
            for server in pool._roster:
                if server.name == "a":
                    server.evict()
            b.hold.set()
        assert pool.statistics()["hedges_won"] == 1
        assert b.calls[GENERATE] == 1


async def test_a_refusal_stays_a_refusal() -> None:
    async with fake_vllm() as a, fake_vllm() as b, new_pool() as pool:
        pool.apply(serving(a, "a"))
        await warm(pool)
        pool.apply(serving(b, "b"))
        a.faults[GENERATE] = [400]
        with pytest.raises(ServerRefused):
            await ask(pool, "mine")
        assert pool.statistics()["in_flight"] == 0
