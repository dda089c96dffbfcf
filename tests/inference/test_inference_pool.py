"""The pool against fake servers over real HTTP: routing, limits, faults, moves."""

from __future__ import annotations

import anyio
import pytest
from scenes.fake_vllm import STOP, fake_vllm, policy, until
from scenes.memory_bus import MemoryBus
from scenes.pools import announced, ask, lost, new_pool, serving

from engine.inference import health_prober
from engine.inference.completion import InferenceUnavailable, ServerRefused


async def test_completion_carries_tokens_logprobs_and_the_servers_version() -> None:
    async with fake_vllm() as fake, new_pool() as pool:
        pool.apply(serving(fake, version=9))
        completion = await ask(pool)
    assert completion.tokens == [10, 11, 12, STOP]
    assert completion.finish == "stop"
    assert completion.logprobs == pytest.approx([-4.6, -4.61, -4.62, -4.52])
    assert [(span.version, span.start, span.stop) for span in completion.spans] == [(9, 0, 4)]
    body = fake.bodies[0]
    assert body["cache_salt"] == "9"
    assert "seed" not in body["sampling_params"]
    assert body["sampling_params"]["ignore_eos"] is True
    assert body["sampling_params"]["stop_token_ids"] == [STOP]


async def test_routed_experts_are_asked_for_where_they_are_replayed() -> None:
    async with fake_vllm(experts=(2, 4)) as fake:
        for replay in (False, True):
            async with new_pool(router_replay=replay) as pool:
                pool.apply(serving(fake))
                found = await ask(pool, experts_from=1)
                plain = await ask(pool)
            assert (found.experts is not None) == replay
            assert plain.experts is None
        asked = [body["sampling_params"].get("routed_experts_prompt_start") for body in fake.bodies]
    assert asked == [None, None, 1, None]
    assert found.experts[:, 0, 0].tolist() == [(1 + place) % 4 for place in range(len(found.experts))]


async def test_no_traffic_before_a_server_serves() -> None:
    async with fake_vllm() as fake, new_pool() as pool:
        with pytest.raises(InferenceUnavailable, match="0 of 0"):
            await ask(pool, deadline=0.05)
        with pytest.raises(InferenceUnavailable):
            await pool.ready(0.05)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool)
            tasks.start_soon(pool.ready, 5.0)
            await until(lambda: pool.statistics()["waiting"] == 1)
            assert not fake.calls
            pool.apply(serving(fake))
        assert fake.calls["/inference/v1/generate"] == 1


async def test_one_episode_stays_on_one_server_and_load_is_spread() -> None:
    async with fake_vllm() as first, fake_vllm() as second, new_pool() as pool:
        pool.apply(serving(first, "a"))
        pool.apply(serving(second, "b"))
        first.hold.clear()
        second.hold.clear()
        async with anyio.create_task_group() as tasks:
            for index in range(10):
                tasks.start_soon(ask, pool, f"episode-{index}")
            await until(lambda: first.running + second.running == 10)
            assert first.running == second.running == 5
            first.hold.set()
            second.hold.set()
        before = first.calls["/inference/v1/generate"]
        for _ in range(6):
            await ask(pool, "episode-0")
        grown = first.calls["/inference/v1/generate"] - before
        assert grown in (0, 6)


async def test_a_server_tells_in_which_share_of_its_last_round_it_had_no_request() -> None:
    """A round lasts from one version to the next."""
    async with fake_vllm() as fake, new_pool() as pool:
        for version in (1, 2):
            assert "a.idle" not in pool.statistics()
            pool.apply(serving(fake, version=version))
            await ask(pool)
        assert 0 < pool.statistics()["a.idle"] < 1
        fake.hold.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool)
            await until(lambda: fake.running == 1)
            pool.apply(announced(fake, version=3))
            await anyio.wait_all_tasks_blocked()
            pool.apply(announced(fake, version=4))
            fake.hold.set()
        assert pool.statistics()["a.idle"] == 0


async def test_the_cap_holds_and_waiters_come_in_order() -> None:
    async with fake_vllm() as fake, new_pool(max_concurrency=3) as pool:
        pool.apply(serving(fake))
        fake.hold.clear()
        done: list[int] = []

        async def one(index: int) -> None:
            await ask(pool, f"{index}")
            done.append(index)

        async with anyio.create_task_group() as tasks:
            for index in range(9):
                tasks.start_soon(one, index)
                await until(
                    lambda want=index: (
                        pool.statistics()["in_flight"] + pool.statistics()["waiting"] == want + 1
                    ),
                )
            await until(lambda: fake.running == 3)
            assert pool.statistics()["waiting"] == 6
            fake.hold.set()
        assert fake.most_running == 3
        assert set(done[:3]) == {0, 1, 2}
        assert len(done) == 9
        assert pool.statistics()["in_flight"] == 0


async def test_the_queue_is_bounded() -> None:
    async with fake_vllm() as fake, new_pool(max_concurrency=1, max_waiting=1) as pool:
        pool.apply(serving(fake))
        fake.hold.clear()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, pool, "a")
            await until(lambda: pool.statistics()["in_flight"] == 1)
            tasks.start_soon(ask, pool, "b")
            await until(lambda: pool.statistics()["waiting"] == 1)
            with pytest.raises(InferenceUnavailable, match="wait already"):
                await ask(pool, "c")
            fake.hold.set()


async def test_cancelled_requests_give_their_places_back() -> None:
    async with fake_vllm() as fake, new_pool(max_concurrency=2) as pool:
        pool.apply(serving(fake))
        fake.hold.clear()
        async with anyio.create_task_group() as tasks:
            for index in range(5):
                tasks.start_soon(ask, pool, f"{index}")
            await until(lambda: fake.running == 2)
            tasks.cancel_scope.cancel()
        statistics = pool.statistics()
        assert statistics["in_flight"] == statistics["waiting"] == 0
        fake.hold.set()
        await ask(pool)


async def test_a_dropped_connection_is_tried_again_unnoticed() -> None:
    async with fake_vllm(faults={"/inference/v1/generate": ["drop"]}) as fake, new_pool() as pool:
        pool.apply(serving(fake))
        completion = await ask(pool)
        assert completion.tokens
        assert fake.calls["/inference/v1/generate"] == 2
        assert pool.statistics()["failures"] == 0


async def test_all_servers_failing_is_unavailable_not_a_hang() -> None:
    async with fake_vllm(faults={"/inference/v1/generate": [500] * 50}) as bad, new_pool() as pool:
        pool.apply(serving(bad))
        with pytest.raises(InferenceUnavailable, match="ordered by the test"):
            await ask(pool, deadline=0.3)


async def test_a_bad_request_is_not_sent_around() -> None:
    async with fake_vllm(faults={"/inference/v1/generate": [400]}) as fake, new_pool() as pool:
        pool.apply(serving(fake))
        with pytest.raises(ServerRefused, match="400"):
            await ask(pool)
        assert fake.calls["/inference/v1/generate"] == 1
        assert pool.statistics()["serving"] == 1
        await ask(pool)


async def test_lost_server_moves_its_requests() -> None:
    async with fake_vllm() as first, fake_vllm() as second, new_pool() as pool:
        pool.apply(serving(first, "a"))
        first.hold.clear()
        async with anyio.create_task_group() as tasks:
            for index in range(6):
                tasks.start_soon(ask, pool, f"{index}")
            await until(lambda: first.running == 6)
            pool.apply(serving(second, "b"))
            pool.apply(lost())
        assert second.calls["/inference/v1/generate"] == 6
        assert pool.statistics()["moved"] == 6
        assert pool.versions() == {"b": 1}


async def test_a_late_farewell_of_a_former_epoch_changes_nothing() -> None:
    async with fake_vllm() as fake, new_pool() as pool:
        pool.apply(serving(fake, epoch="2"))
        pool.apply(lost())
        await ask(pool)


async def test_versions_come_from_spans_and_salt_follows() -> None:
    async with fake_vllm() as fake, new_pool() as pool:
        pool.apply(serving(fake, version=1))
        await ask(pool)
        pool.apply(serving(fake, version=2))
        completion = await ask(pool)
        assert completion.spans[0].version == 2
        assert [body["cache_salt"] for body in fake.bodies] == ["1", "2"]


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus(run="t", role="agent", instance="agent-0")


async def test_watch_moves_work_away_from_a_server_without_progress(bus: MemoryBus) -> None:
    async with fake_vllm() as stuck, fake_vllm() as good, anyio.create_task_group() as tasks:
        pool = new_pool()
        tasks.start_soon(pool.watch, bus)
        await bus.publish(serving(stuck, "stuck"))
        await pool.ready(5.0)
        stuck.hold.clear()
        async with anyio.create_task_group() as plays:
            for index in range(4):
                plays.start_soon(ask, pool, f"{index}")
            await until(lambda: stuck.running == 4)
            await bus.publish(serving(good, "good"))
        assert good.calls["/inference/v1/generate"] >= 4
        assert pool.statistics()["serving"] == 1
        stuck.hold.set()
        await until(lambda: pool.statistics()["serving"] == 2)
        tasks.cancel_scope.cancel()


async def test_an_update_is_not_mistaken_for_a_stuck_server(bus: MemoryBus) -> None:
    async with fake_vllm(paused=True) as fake, anyio.create_task_group() as tasks:
        pool = new_pool()
        tasks.start_soon(pool.watch, bus)
        await bus.publish(serving(fake))
        await pool.ready(5.0)
        fake.hold.clear()
        async with anyio.create_task_group() as plays:
            plays.start_soon(ask, pool)
            await until(lambda: fake.calls["/is_paused"] >= 2)
            assert pool.statistics()["serving"] == 1
            assert pool.statistics()["moved"] == 0
            fake.hold.set()
        tasks.cancel_scope.cancel()


async def test_queueing_in_the_server_cuts_the_limit(bus: MemoryBus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_prober, "_WATCH_SECONDS", 0.05)
    text = 'vllm:num_requests_waiting{engine="0"} 3.0\nvllm:num_preemptions_total{engine="0"} 0.0\n'
    async with fake_vllm(metrics=text) as fake, anyio.create_task_group() as tasks:
        pool = new_pool(stuck_seconds=5.0)
        tasks.start_soon(pool.watch, bus)
        await bus.publish(serving(fake))
        await pool.ready(5.0)
        fake.hold.clear()
        async with anyio.create_task_group() as plays:
            for index in range(4):
                plays.start_soon(ask, pool, f"{index}")
            await until(lambda: pool.statistics()["limit_cuts"] == 1)
            assert pool.statistics()["limit"] == 8
            fake.hold.set()
        tasks.cancel_scope.cancel()


async def test_what_an_update_preempts_is_no_congestion(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pause that drops the caches preempts all that runs, and vLLM counts it as they sample again."""
    monkeypatch.setattr(health_prober, "_WATCH_SECONDS", 0.02)
    preempted = "vllm:num_preemptions_total {}.0\n"
    async with fake_vllm(metrics=preempted.format(0)) as fake, anyio.create_task_group() as tasks:
        pool = new_pool(stuck_seconds=5.0)
        tasks.start_soon(pool.watch, bus)

        async def seen(count: int) -> None:
            fake.metrics, before = preempted.format(count), fake.calls["/metrics"]
            await until(lambda: fake.calls["/metrics"] >= before + 3)

        await bus.publish(serving(fake))
        await pool.ready(5.0)
        fake.hold.clear()
        async with anyio.create_task_group() as plays:
            for index in range(4):
                plays.start_soon(ask, pool, f"{index}")
            await seen(0)
            pool.apply(policy(2))
            await seen(2)
            await bus.publish(serving(fake, version=2))
            await until(lambda: pool.versions() == {"a": 2})
            await seen(4)
            assert pool.statistics()["limit_cuts"] == 0
            fake.hold.set()
        fake.hold.clear()
        async with anyio.create_task_group() as plays:
            for index in range(4):
                plays.start_soon(ask, pool, f"{index}")
            await until(lambda: fake.running == 4)
            await seen(5)
            assert pool.statistics()["limit_cuts"] == 1
            fake.hold.set()
        tasks.cancel_scope.cancel()
