"""The server role on the memory bus, against fake servers: every version proved, every loss announced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from scenes.fake_vllm import FakeVllm, fake_vllm, policy, until
from server_stage import Nursery, Stage, on_stage, owned

import roles.server.role as server_role
from bus.messages import PolicyPublished, ServerLost, ServerServing
from engine.inference.process import ServerFailed
from engine.inference.server_checks import HandshakeRefused
from engine.weights.update import ServerBroken, UpdateRefused
from roles.server.lifecycle import NewestPolicy

__all__ = ["owned"]


async def test_a_policy_is_loaded_proved_and_announced(tmp_path: Path) -> None:
    async with fake_vllm() as fake, on_stage(Stage(tmp_path, (fake.url,))) as stage:
        await stage.bus.publish(policy(5, step=2))
        fact = await stage.served(5)
        assert (fact.server, fact.url) == ("server-0-0", fake.url)
        assert fact.canary_error < 1e-6
        assert fact.seconds > 0
        statistics = stage.role.statistics()
        assert (statistics["serving"], statistics["step"], statistics["updates"]) == (1, 2, 1)
        assert fake.version == "5"


async def test_nothing_is_announced_before_a_policy(tmp_path: Path) -> None:
    async with fake_vllm() as fake, on_stage(Stage(tmp_path, (fake.url,))) as stage:
        await until(lambda: fake.calls["/health"] > 0)
        await anyio.wait_all_tasks_blocked()
        assert stage.facts == []
        assert stage.role.statistics()["serving"] == 0


async def test_versions_that_pass_by_during_an_update_are_skipped(tmp_path: Path) -> None:
    async with fake_vllm() as fake, on_stage(Stage(tmp_path, (fake.url,))) as stage:
        fake.hold.clear()
        await stage.bus.publish(policy(1))
        await until(lambda: fake.running > 0)
        for version in (2, 3, 4):
            await stage.bus.publish(policy(version))
        fake.hold.set()
        await stage.served(4)
        assert [fact.version for fact in stage.facts] == [1, 4]


async def test_the_last_published_is_the_newest_whatever_its_number(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ())
    async with fake_vllm() as fake:
        stage = Stage(tmp_path, (fake.url,))
        for version in (9, 12, 3):
            await stage.bus.publish(policy(version))
        async with on_stage(stage):
            await stage.served(3)
            assert [fact.version for fact in stage.facts] == [3]


def test_a_learner_that_was_replaced_has_no_say_any_more() -> None:
    newest, second = NewestPolicy(), policy(2 << 32 | 4, step=4)
    for said in (policy(1 << 32 | 5, step=5), second, policy(1 << 32 | 6, step=6)):
        newest.offer(said)
    assert newest.policy == second


async def test_weights_that_the_learner_replaces_during_the_handshake_are_no_mismatch(tmp_path: Path) -> None:
    fakes = fake_vllm(version="1", loaded="1", score_seconds=0.3)
    async with fakes as fake, on_stage(Stage(tmp_path, (fake.url,), weights="nccl")) as stage:
        await stage.bus.publish(policy(1))
        await until(lambda: handshakes(fake) == 1)
        await until(lambda: fake.bodies[-1]["sampling_params"].get("prompt_logprobs") == 0)
        fake.score_seconds = 0.0
        fake.version = fake.loaded = "2"  # between the sampling and the scoring of the same tokens
        await stage.bus.publish(policy(2))
        await stage.served(2)
        assert [fact.version for fact in stage.facts] == [2]


async def test_every_server_is_brought_along(tmp_path: Path) -> None:
    async with fake_vllm() as first, fake_vllm() as second:
        async with on_stage(Stage(tmp_path, (first.url, second.url))) as stage:
            await stage.bus.publish(policy(1))
            await stage.until(lambda facts: len(facts) == 2)
            await stage.bus.publish(policy(2))
            await stage.until(lambda facts: len(facts) == 4)
        assert {fact.server for fact in stage.facts[:2]} == {"server-0-0", "server-0-1"}
        assert first.version == second.version == "2"
        await _settled(stage, losses=2)


async def _settled(stage: Stage, losses: int) -> None:
    messages = [record.message async for record in stage.bus.replay("EVENT", tails=("event.server.lost",))]
    assert len(messages) == losses


async def test_a_drain_says_farewell(tmp_path: Path) -> None:
    async with fake_vllm() as fake:
        async with on_stage(Stage(tmp_path, (fake.url,))) as stage:
            await stage.bus.publish(policy(1))
            await stage.served(1)
        await _settled(stage, losses=1)
        assert not fake.paused


async def test_a_refused_push_keeps_the_old_version_until_a_good_one_comes(tmp_path: Path) -> None:
    async with fake_vllm() as fake, on_stage(Stage(tmp_path, (fake.url,))) as stage:
        await stage.bus.publish(policy(1))
        await stage.served(1)
        fake.refuse_reason = "SHA-256"
        await stage.bus.publish(policy(2))
        await until(lambda: fake.calls["/start_weight_update"] >= 3)
        assert fake.version == "1"
        fake.refuse_reason = ""
        await stage.bus.publish(policy(3))
        await stage.served(3)
        assert [fact.version for fact in stage.facts] == [1, 3]


@pytest.mark.parametrize(
    ("server", "asked", "error", "words", "loads"),
    [
        ({"refuse_reason": "SHA-256"}, policy(1), UpdateRefused, "SHA-256", True),
        ({}, policy(1, canary_version=2), ServerBroken, r"by 0\.5, 0\.001 is allowed", True),
        (
            {"sampled_shift": 0.125},
            policy(1),
            HandshakeRefused,
            r"softmax\(logits / T\) over all tokens by 0\.125, 0\.001 is allowed",
            True,
        ),
        ({"raw": True}, policy(1), HandshakeRefused, "before the temperature", True),
        ({"context": 64}, policy(1), HandshakeRefused, "takes 64 tokens", False),
    ],
    ids=["refused", "wrong model", "wrong log-probs", "raw log-probs", "short context"],
)
async def test_what_no_restart_cures_ends_the_role_with_figures(
    tmp_path: Path, server: dict[str, Any], asked: PolicyPublished, error: type, words: str, loads: bool
) -> None:
    async with fake_vllm(**server) as fake:
        stage = Stage(tmp_path, (fake.url,), start_seconds=0.2 if error is UpdateRefused else 5.0)
        await stage.bus.publish(asked)
        with pytest.raises(error, match=words):
            await stage.role.run()
        assert bool(fake.calls["/start_weight_update"]) is loads


async def test_an_adopted_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    stage = Stage(tmp_path, ("http://127.0.0.1:9",), start_seconds=0.2)
    with pytest.raises(ServerFailed, match="did not answer"):
        await stage.role.run()


async def test_servers_of_a_former_life_are_buried(tmp_path: Path) -> None:
    async with fake_vllm() as fake, fake_vllm() as foreign:
        stage = Stage(tmp_path, (fake.url,))
        for server, url in (
            ("server-0-0", fake.url),
            ("other-dead", "http://127.0.0.1:9"),
            ("other-alive", foreign.url),
        ):
            await stage.bus.publish(
                ServerServing(server=server, epoch="old", url=url, version=1, canary_error=0.0, seconds=0.0)
            )
        async with on_stage(stage):
            await stage.until(lambda _: len(stage.lost()) == 2)
            assert {(fact.server, fact.epoch) for fact in stage.lost()} == {
                ("server-0-0", "old"),
                ("other-dead", "old"),
            }


async def test_a_server_taken_for_lost_is_announced_again(tmp_path: Path) -> None:
    async with fake_vllm() as fake, on_stage(Stage(tmp_path, (fake.url,))) as stage:
        await stage.bus.publish(policy(4))
        first = await stage.served(4)
        for server, epoch in ((first.server, "older"), ("other-0", first.epoch), (first.server, first.epoch)):
            await stage.bus.publish(ServerLost(server=server, epoch=epoch, reason="nothing was heard"))
        await stage.until(lambda facts: sum(isinstance(fact, ServerServing) for fact in facts) == 2)
        again = stage.facts[-1]
        assert isinstance(again, ServerServing)
        assert (again.server, again.url, again.version) == (first.server, first.url, 4)
        assert again.epoch != first.epoch
    await stage.until(lambda _: len(stage.lost()) == 4)
    assert stage.lost()[-1].epoch == again.epoch, "the farewell names the epoch that is known"


async def test_a_dead_server_is_announced_and_started_again(
    tmp_path: Path, owned: Callable[..., Nursery]
) -> None:
    nursery = owned(fail=(2,))
    async with on_stage(Stage(tmp_path, ())) as stage:
        await stage.bus.publish(policy(1))
        first = await stage.served(1)
        nursery.end()
        await stage.until(lambda facts: len(facts) == 3)
        serving, lost, again = stage.facts
        assert isinstance(lost, ServerLost)
        assert "status 137" in lost.reason
        assert (serving.server, serving.epoch) == (lost.server, lost.epoch) == (first.server, first.epoch)
        assert isinstance(again, ServerServing)
        assert again.epoch != first.epoch
        assert again.version == 1
        assert nursery.starts == 3
        assert stage.role.statistics()["restarts"] == 2


async def test_a_server_that_never_served_ends_the_role(
    tmp_path: Path, owned: Callable[..., Nursery]
) -> None:
    nursery = owned(fail=(1,))
    stage = Stage(tmp_path, ())
    with pytest.raises(ServerFailed, match="before it was ready"):
        await stage.role.run()
    assert nursery.starts == 1


async def test_starts_that_keep_failing_end_the_role(tmp_path: Path, owned: Callable[..., Nursery]) -> None:
    nursery = owned(fail=(2, 3, 4, 5, 6))
    stage = Stage(tmp_path, ())
    await stage.bus.publish(policy(1))

    async def kill_once_served() -> None:
        await stage.served(1)
        nursery.end()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage.record)
        tasks.start_soon(kill_once_served)
        with pytest.raises(ServerFailed, match="before it was ready"):
            await stage.role.run()
        tasks.cancel_scope.cancel()
    assert nursery.starts == 6


async def test_a_server_that_fails_its_proof_is_replaced(
    tmp_path: Path, owned: Callable[..., Nursery]
) -> None:
    nursery = owned()
    async with on_stage(Stage(tmp_path, ())) as stage:
        await stage.bus.publish(policy(1))
        await stage.served(1)
        nursery.fakes[0].stale_loads = 2
        await stage.bus.publish(policy(2))
        fact = await stage.served(2)
        assert nursery.starts == 2
        assert fact.url == nursery.fakes[1].url
        assert len(stage.lost()) == 1
        assert "canary" in stage.lost()[0].reason


async def test_a_server_without_progress_is_replaced(
    tmp_path: Path, owned: Callable[..., Nursery], monkeypatch: pytest.MonkeyPatch
) -> None:
    nursery = owned()
    monkeypatch.setattr("roles.server.lifecycle.PROBE_SECONDS", 0.05)
    monkeypatch.setattr("roles.server.lifecycle.CONTROL_SECONDS", 0.6)
    async with on_stage(Stage(tmp_path, (), request_seconds=0.2)) as stage:
        await stage.bus.publish(policy(1))
        await stage.served(1)
        nursery.fakes[0].hold.clear()
        await stage.until(lambda facts: len(facts) == 3)
        assert "no progress" in stage.lost()[0].reason
        assert nursery.starts == 2


def handshakes(fake: FakeVllm) -> int:
    """Return how often the whole vocabulary was asked for, which nothing else does."""
    return sum(body.get("sampling_params", {}).get("prompt_logprobs") == -1 for body in fake.bodies)


async def test_a_server_started_anew_behind_our_back_is_proved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers all the time, and nothing is published that would reach it: only its label tells."""
    monkeypatch.setattr("roles.server.lifecycle.PROBE_SECONDS", 0.05)
    monkeypatch.setattr(server_role, "LONGEST_BACKOFF", 0.01)
    async with fake_vllm() as fake, on_stage(Stage(tmp_path, (fake.url,))) as stage:
        await stage.bus.publish(policy(1))
        first = await stage.served(1)
        assert handshakes(fake) == 1
        fake.version = fake.loaded = "default"
        await stage.until(lambda facts: len(facts) == 3)
        assert "version none, not 1" in stage.lost()[0].reason
        again = stage.facts[-1]
        assert isinstance(again, ServerServing)
        assert (again.version, fake.loaded) == (1, "1")
        assert again.epoch != first.epoch
        assert handshakes(fake) == 2
        await stage.bus.publish(policy(2))
        await stage.served(2)
        assert handshakes(fake) == 2, "a process is proved once"


async def test_a_foreign_version_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roles.server.lifecycle.PROBE_SECONDS", 0.05)
    monkeypatch.setattr(server_role, "LONGEST_BACKOFF", 0.01)
    async with fake_vllm() as fake, on_stage(Stage(tmp_path, (fake.url,))) as stage:
        await stage.bus.publish(policy(1))
        await stage.served(1)
        fake.version = fake.loaded = "7"  # another run pushed into it
        await stage.until(lambda facts: len(facts) == 3)
        assert "version 7, not 1" in stage.lost()[0].reason
        assert fake.version == "1"


async def test_a_server_left_paused_is_examined_once_it_samples_again(tmp_path: Path) -> None:
    async with fake_vllm(version="1", loaded="1", paused=True, context=64) as fake:
        fake.awake.clear()
        stage = Stage(tmp_path, (fake.url,))
        await stage.bus.publish(policy(1))
        with anyio.fail_after(10), pytest.raises(HandshakeRefused, match="takes 64 tokens"):
            await stage.role.run()
