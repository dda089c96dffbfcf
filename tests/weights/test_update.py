"""The update of one server, against a fake one: order, repetition, every fault."""

from __future__ import annotations

import anyio
import msgspec
import numpy as np
import pytest
from fake_vllm import FakeVllm, fake_vllm, policy

from engine.inference.completion import ServerGone
from engine.inference.vllm import VllmClient, open_session
from engine.weights.update import ServerBroken, Updated, UpdateRefused, canary_error, update

WORK = ("start_weight_update", "update_weights", "pause", "update_weights", "finish_weight_update", "resume")


async def push(fake: FakeVllm, announced, *, cache="recompute") -> Updated:
    async with open_session() as session:
        client = VllmClient(fake.url, session)
        return await update(client, announced, cache=cache, tolerance=1e-3, load_seconds=5.0)


def changes(fake: FakeVllm) -> list[str]:
    return [name for name in fake.order if name in WORK]


@pytest.mark.parametrize(("cache", "flag"), [("recompute", "true"), ("keep", "false")])
async def test_order_and_cache_policy(cache: str, flag: str) -> None:
    async with fake_vllm() as fake:
        updated = await push(fake, policy(3), cache=cache)
    assert tuple(changes(fake)) == WORK
    assert fake.order[-1] == "inference/v1/generate"
    assert fake.bodies[0] == {"clear_cache": flag}
    assert fake.version == "3"
    assert not fake.paused
    assert (updated.version, updated.attempts) == (3, 1)
    assert updated.canary_error < 1e-6
    assert 0 < updated.paused <= updated.seconds


async def test_repetition_only_proves() -> None:
    async with fake_vllm() as fake:
        await push(fake, policy(3))
        before = changes(fake)
        updated = await push(fake, policy(3))
    assert changes(fake) == before
    assert updated.paused == 0.0


async def test_a_server_left_paused_under_its_label_is_loaded_again() -> None:
    """Its role died between the load and the resume: nobody else would ever resume it."""
    async with fake_vllm(version="3", loaded="3", paused=True) as fake:
        updated = await push(fake, policy(3))
        assert not fake.paused
    assert tuple(changes(fake)) == WORK
    assert updated.attempts == 1


async def test_refused_push_changes_nothing() -> None:
    async with fake_vllm(version="1", loaded="1", refuse_reason="SHA-256") as fake:
        with pytest.raises(UpdateRefused, match="SHA-256"):
            await push(fake, policy(2))
    assert "pause" not in fake.order
    assert fake.version == fake.loaded == "1"
    assert not fake.session_open


async def test_one_failed_canary_is_answered_by_a_second_load() -> None:
    async with fake_vllm(stale_loads=1) as fake:
        updated = await push(fake, policy(4))
    assert updated.attempts == 2
    assert changes(fake).count("finish_weight_update") == 2
    assert fake.loaded == "4"


async def test_two_failed_canaries_break_the_server_with_figures() -> None:
    async with fake_vllm(stale_loads=2) as fake:
        with pytest.raises(ServerBroken, match=r"differ from the learner's by 1\.75, 0\.001 is allowed"):
            await push(fake, policy(4))
        assert fake.paused


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update"])
async def test_a_load_that_fails_half_way_leaves_the_server_paused(path: str) -> None:
    faults = {path: ["", 500] if path == "/update_weights" else [500]}  # the first one only checks
    async with fake_vllm(version="1", loaded="1", faults=faults) as fake:
        with pytest.raises(ServerBroken, match="ordered by the test"):
            await push(fake, policy(2))
        assert fake.paused


async def test_a_pause_that_fails_is_undone() -> None:
    async with fake_vllm(version="1", loaded="1", faults={"/pause": [500]}) as fake:
        with pytest.raises(ServerGone):
            await push(fake, policy(2))
    assert fake.order[-1] == "resume"
    assert fake.version == "1"


async def test_a_session_that_a_dead_predecessor_left_open_is_closed_first() -> None:
    async with fake_vllm(session_open=True) as fake:
        await push(fake, policy(2))
    assert fake.version == "2"
    assert changes(fake)[:3] == ["start_weight_update", "finish_weight_update", "start_weight_update"]


async def test_cancellation_waits_for_a_load_in_progress_and_resumes() -> None:
    async with fake_vllm() as fake, open_session() as session:
        client = VllmClient(fake.url, session)
        with anyio.CancelScope() as scope:
            original = client.update_weights

            async def cancelling(info, *, deadline):
                if not info["check_only"]:
                    scope.cancel()
                await original(info, deadline=deadline)

            client.update_weights = cancelling
            await update(client, policy(2), cache="recompute", tolerance=1e-3, load_seconds=5.0)
        assert scope.cancelled_caught
        assert fake.version == "2"
        assert not fake.paused


async def test_canary_faults() -> None:
    async with fake_vllm(version="1", loaded="1") as fake, open_session() as session:
        client = VllmClient(fake.url, session)
        good = policy(1)
        assert await canary_error(client, good, deadline=5.0) < 1e-6
        lost = np.full(3, np.nan, "<f4").tobytes()
        wrong = msgspec.structs.replace(good, canary_logprobs=lost)
        assert await canary_error(client, wrong, deadline=5.0) == float("inf")
        short = msgspec.structs.replace(good, canary_logprobs=good.canary_logprobs[:-4])
        with pytest.raises(UpdateRefused, match="4 tokens and 2 log-probs"):
            await canary_error(client, short, deadline=5.0)
        none = msgspec.structs.replace(good, canary_tokens=b"", canary_logprobs=b"")
        assert await canary_error(client, none, deadline=5.0) == 0.0
