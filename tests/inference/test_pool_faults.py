"""Faults of a pool: leaks, waiters that nobody wakes, herds, servers that answer nonsense."""

from __future__ import annotations

import random

import anyio
import pytest
from scenes.fake_vllm import fake_vllm, until
from scenes.pools import GENERATE, ask, lost, new_pool, serving

from engine.inference.completion import InferenceUnavailable


@pytest.mark.parametrize("seed", range(4))
async def test_no_place_leaks_whenever_requests_are_cancelled_and_servers_come_and_go(seed: int) -> None:
    chance = random.Random(seed)
    settings = {"max_concurrency": 3, "max_waiting": 1000}
    async with fake_vllm(pace=0.001) as a, fake_vllm(pace=0.001) as b, new_pool(**settings) as pool:
        pool.apply(serving(a, "a"))
        pool.apply(serving(b, "b"))

        async def one(index: int) -> None:
            with anyio.move_on_after(chance.random() * 0.1):
                try:
                    await ask(pool, f"{index % 7}", deadline=0.05 + chance.random())
                except InferenceUnavailable:
                    return

        async def trouble() -> None:
            for epoch in range(2, 8):
                await anyio.sleep(0.01)
                pool.apply(lost("a", str(epoch - 1)))
                b.faults[GENERATE] = ["drop", "drop", 500]
                await anyio.sleep(0.01)
                pool.apply(serving(a, "a", epoch=str(epoch)))

        pool.apply(serving(a, "a", epoch="1"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trouble)
            for index in range(100):
                tasks.start_soon(one, index)
        statistics = pool.statistics()
        assert statistics["in_flight"] == statistics["waiting"] == 0
        assert statistics["a.in_flight"] == statistics["b.in_flight"] == 0
        assert (await ask(pool)).tokens


async def test_a_request_that_was_moved_keeps_its_deadline() -> None:
    async with fake_vllm() as a, fake_vllm() as b, new_pool() as pool:
        pool.apply(serving(a, "a"))
        a.hold.clear()
        started = anyio.current_time()

        async def move() -> None:
            await until(lambda: a.running == 1)
            pool.apply(lost("a"))
            b.hold.clear()
            pool.apply(serving(b, "b"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(move)
            with pytest.raises(InferenceUnavailable):
                await ask(pool, deadline=0.4)
        assert 0.35 < anyio.current_time() - started < 2.0
        assert b.calls[GENERATE] == 1


async def test_a_place_on_a_server_that_is_lost_before_it_is_used() -> None:
    """A waiter was given its place in the same moment in which the server was lost."""
    async with fake_vllm() as a, fake_vllm() as b, new_pool(max_concurrency=1) as pool:
        pool.apply(serving(a, "a"))
        a.hold.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, "first")
            await until(lambda: a.running == 1)
            tasks.start_soon(ask, pool, "second")
            await until(lambda: pool.statistics()["waiting"] == 1)
            pool.apply(serving(b, "b"))  # the place is given here, the task has not run yet
            pool.apply(lost("b"))
            assert pool.statistics()["waiting"] == 0
            b.version = "default"
            a.hold.set()
        assert b.calls[GENERATE] == 0
        assert pool.statistics()["in_flight"] == 0


async def test_who_failed_here_goes_elsewhere() -> None:
    """One request that this server cannot answer must not use up its attempts on it."""
    async with fake_vllm() as a, fake_vllm() as b, new_pool() as pool:
        pool.apply(serving(a, "a"))
        await ask(pool, "mine")
        pool.apply(serving(b, "b"))
        a.faults[GENERATE] = [500]
        await ask(pool, "mine")
        assert b.calls[GENERATE] == 1
        await ask(pool, "mine")
        assert b.calls[GENERATE] == 2, "and stays there, where its prefix is now"


async def test_who_avoids_the_only_free_server_does_not_hold_up_the_others() -> None:
    async with fake_vllm() as a, fake_vllm() as b, new_pool(max_concurrency=1) as pool:
        pool.apply(serving(b, "b"))
        b.hold.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, "fills b")
            await until(lambda: b.running == 1)
            a.faults[GENERATE] = [500]
            pool.apply(serving(a, "a"))
            tasks.start_soon(ask, pool, "avoids a")
            await until(lambda: pool.statistics()["waiting"] == 1)
            await ask(pool, "anybody", deadline=5.0)
            assert a.calls[GENERATE] == 2
            assert pool.statistics()["waiting"] == 1
            b.hold.set()


@pytest.mark.parametrize("fault", ["garbage", 500])
async def test_a_server_that_fails_again_and_again_is_left(fault: object) -> None:
    async with fake_vllm() as a, fake_vllm() as b, new_pool() as pool:
        a.faults[GENERATE] = [fault] * 100
        pool.apply(serving(a, "a"))
        pool.apply(serving(b, "b"))
        async with anyio.create_task_group() as tasks:
            for index in range(10):
                tasks.start_soon(ask, pool, f"{index}")
        statistics = pool.statistics()
        assert statistics["b.answers"] == 10
        assert (statistics["a.usable"], statistics["a.opened"]) == (0, 1)
        assert a.calls[GENERATE] <= 6


async def test_a_stalled_connection_ends_at_the_deadline_and_cuts_the_limit() -> None:
    async with fake_vllm(faults={GENERATE: ["stall"]}) as a, new_pool() as pool:
        pool.apply(serving(a))
        with anyio.fail_after(5), pytest.raises(InferenceUnavailable):
            await ask(pool, deadline=0.2)
        assert pool.statistics()["a.cuts"] == 1
        assert pool.statistics()["serving"] == 1
        await ask(pool)


async def test_a_server_that_comes_back_is_not_fallen_upon() -> None:
    async with fake_vllm() as a, new_pool(max_concurrency=64) as pool:
        pool.apply(serving(a))
        await ask(pool)
        pool.apply(lost())
        a.hold.clear()
        async with anyio.create_task_group() as tasks:
            for index in range(64):
                tasks.start_soon(ask, pool, f"{index}")
            await until(lambda: pool.statistics()["waiting"] == 64)
            pool.apply(serving(a, epoch="2"))
            await until(lambda: a.running == 8)
            await anyio.wait_all_tasks_blocked()
            assert pool.statistics()["waiting"] == 56
            a.hold.set()
        assert a.calls[GENERATE] == 65
        assert pool.statistics()["a.limit"] > 8


async def test_garbage_in_the_metrics_or_in_the_pause_ends_nobodys_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from engine.inference import health_prober

    monkeypatch.setattr(health_prober, "_WATCH_SECONDS", 0.02)
    async with fake_vllm(metrics="\x00\nvllm:num_requests_waiting x\n") as a, new_pool() as pool:
        a.faults = {"/is_paused": ["garbage"] * 9, "/metrics": ["garbage", "drop", 500]}
        pool.apply(serving(a))
        made = health_prober.HealthProber(*pool._roster, pool._roster, pool._announce, stuck_seconds=0.05)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made.run)
            a.hold.clear()
            tasks.start_soon(ask, pool, "slow")
            await until(lambda: a.calls["/is_paused"] >= 1 and pool.statistics()["serving"] == 0)
            a.hold.set()
            await until(lambda: pool.statistics()["serving"] == 1)
            tasks.cancel_scope.cancel()
