"""A server that refuses an update which another one serves.

Out, started again, in the end left out; the run goes on. Where no server takes a version, the run ends and
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest
from scenes.fake_vllm import fake_vllm, policy, until
from server_stage import Nursery, Stage, on_stage, owned

import roles.server.role as server_role
from bus.messages import Message, PolicyPublished, ServerServing
from engine.inference.pool import InferencePool
from engine.inference.vllm import VllmClient
from engine.weights.loaders import FileLoader
from engine.weights.update import ServerBroken, UpdateRefused
from roles.server.lifecycle import Unserved

__all__ = ["owned"]
DISK = "SHA-256"


def served(facts: list[Message], server: str) -> list[int]:
    return [fact.version for fact in facts if isinstance(fact, ServerServing) and fact.server == server]


async def test_the_other_server_goes_on_and_the_refused_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_role, "LONGEST_BACKOFF", 0.01)
    monkeypatch.setattr(server_role, "_REST_SECONDS", 0.05)
    async with fake_vllm() as good, fake_vllm() as bad:
        stage = Stage(tmp_path, (good.url, bad.url), start_seconds=60.0)
        pool = InferencePool(max_concurrency=8, request_seconds=20.0)
        async with on_stage(stage), anyio.create_task_group() as tasks:
            tasks.start_soon(pool.watch, stage.bus.peer("agent", "agent-0"))
            await stage.bus.publish(policy(1))
            await stage.until(lambda facts: len(facts) == 2)
            bad.refuse_reason = DISK
            await stage.bus.publish(policy(2))
            await stage.until(lambda facts: bool(stage.lost()))
            assert (stage.lost()[0].server, DISK in stage.lost()[0].reason) == ("server-0-1", True)
            await until(lambda: pool.statistics()["servers"] == 1)
            await until(lambda: stage.role.statistics()["given_up"] == 1)
            await stage.bus.publish(policy(3))
            await stage.served(3)
            assert (good.version, bad.version) == ("3", "1")
            bad.refuse_reason = ""
            await stage.until(lambda facts: served(facts, "server-0-1") == [1, 3])
            await until(lambda: pool.statistics()["serving"] == 2)
            assert served(stage.facts, "server-0-0") == [1, 2, 3]
            assert len(stage.lost()) == 1
            tasks.cancel_scope.cancel()


async def test_a_process_that_refuses_is_replaced(tmp_path: Path, owned: Callable[..., Nursery]) -> None:
    nursery = owned()
    async with on_stage(Stage(tmp_path, (), count=2)) as stage:
        await stage.bus.publish(policy(1))
        await stage.until(lambda facts: len(facts) == 2)
        nursery.fakes[1].refuse_reason = DISK
        await stage.bus.publish(policy(2))
        await stage.until(lambda facts: len(facts) == 5)
        assert nursery.starts == 3
        assert [served(stage.facts, f"server-0-{index}") for index in (0, 1)] == [[1, 2], [1, 2]]


async def test_a_server_that_fails_each_proof_is_left_out(
    tmp_path: Path,
    owned: Callable[..., Nursery],
) -> None:
    nursery = owned(stale_loads=0)
    async with on_stage(Stage(tmp_path, (), count=2)) as stage:
        await stage.bus.publish(policy(1))
        await stage.until(lambda facts: len(facts) == 2)
        nursery.settings["stale_loads"] = 2
        nursery.fakes[1].stale_loads = 2
        await stage.bus.publish(policy(2))
        await until(lambda: stage.role.statistics()["given_up"] == 1)
        await stage.bus.publish(policy(3))
        await stage.served(3)
        assert nursery.starts == 2 + server_role._FAILED_STARTS
        assert "canary" in stage.lost()[0].reason


async def test_the_last_one_that_serves_is_not_left_out(
    tmp_path: Path,
    owned: Callable[..., Nursery],
) -> None:
    nursery = owned()
    stage = Stage(tmp_path, ())
    await stage.bus.publish(policy(1))

    async def spoil() -> None:
        await stage.served(1)
        nursery.settings["stale_loads"] = nursery.fakes[0].stale_loads = 2
        await stage.bus.publish(policy(2))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage.record)
        tasks.start_soon(spoil)
        with pytest.raises(ServerBroken, match="after 2 loads"):
            await stage.role.run()
        tasks.cancel_scope.cancel()


async def test_a_version_that_no_server_takes_ends_the_role_with_a_remedy(tmp_path: Path) -> None:
    async with fake_vllm() as first, fake_vllm() as second:
        stage = Stage(tmp_path, (first.url, second.url), start_seconds=1.0)
        await stage.bus.publish(policy(1))

        async def spoil() -> None:
            await stage.until(lambda facts: len(facts) == 2)
            await stage.bus.publish(msgspec.structs.replace(policy(2), uri="file:///nowhere"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stage.record)
            tasks.start_soon(spoil)
            with pytest.raises(Unserved, match=r"no server took version .* within 1 s: .*gone") as caught:
                await stage.role.run()
            tasks.cancel_scope.cancel()
        assert "run the same command again" in caught.value.remedy
        assert [served(stage.facts, f"server-0-{index}") for index in (0, 1)] == [[1], [1]]


class PrunedLoader(FileLoader):
    """The server at ``url`` is so slow with ``version`` that it is gone when it gets there."""

    def __init__(self, url: str, version: int) -> None:
        super().__init__()
        self.slow = (url, version)
        self.begun, self.gone = anyio.Event(), anyio.Event()

    async def bring(self, client: VllmClient, policy: PolicyPublished, **settings) -> float:
        if (client.url, policy.version) == self.slow:
            self.begun.set()
            await self.gone.wait()
            raise UpdateRefused("the weights are not on the bus any more", where=client.url)
        return await super().bring(client, policy, **settings)


async def test_a_server_whose_version_was_pruned_takes_the_newest_and_is_not_restarted(
    tmp_path: Path,
) -> None:
    async with fake_vllm() as fast, fake_vllm() as slow:
        stage = Stage(tmp_path, (fast.url, slow.url), start_seconds=60.0, rollout="together")
        stage.role._loader = path = PrunedLoader(slow.url, 2)
        async with on_stage(stage):
            await stage.bus.publish(policy(1))
            await stage.until(lambda facts: len(facts) == 2)
            await stage.bus.publish(policy(2))
            await path.begun.wait()
            await stage.served(2)
            await stage.bus.publish(policy(3))
            await stage.served(3)
            path.gone.set()
            await stage.until(lambda facts: len(facts) > 4)
            assert [served(stage.facts, f"server-0-{index}") for index in (0, 1)] == [[1, 2, 3], [1, 3]]
            assert (stage.lost(), stage.role.statistics()["restarts"]) == ([], 0)
