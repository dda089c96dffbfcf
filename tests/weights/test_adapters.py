"""Adapters: published in PEFT's format, loaded beside each other, proved, unloaded when nobody needs them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
import torch
from adapter_files import SETTINGS, AdapterLearner
from scenes.fake_vllm import FakeVllm, fake_vllm, policy, until
from scenes.memory_bus import MemoryBus

from bus.messages import PolicyPublished
from engine.config import SamplingConfig
from engine.inference import adapters
from engine.inference.completion import ServerGone
from engine.inference.server_checks import handshake
from engine.inference.vllm import VllmClient, open_session
from engine.lineage import Version
from engine.weights import store
from engine.weights.adapters import CONFIG_NAME, FILE_NAME, AdapterLoader, AdapterPublisher
from engine.weights.loaders import FetchFailed, ServerBroken
from engine.weights.update import Updated, UpdateRefused, update

RUN = "trial"


class World:
    def __init__(self, fake: FakeVllm, client: VllmClient, directory: Path, way: str = "file") -> None:
        self.fake, self.client, self.cache, self.now = fake, client, directory / "cache", 0.0
        self.bus = MemoryBus(run=RUN, role="server", instance="0")
        self.learner = AdapterLearner(directory / "published", self.bus, way=way)
        self.path = self.another_role()

    def another_role(self) -> AdapterLoader:
        return AdapterLoader(
            RUN, self.bus.blobs, self.cache, keep=2, request_seconds=10.0, clock=lambda: self.now
        )

    async def serve(self, step: int) -> Updated:
        return await self.push(await self.learner.publish(step))

    async def push(self, published: PolicyPublished) -> Updated:
        done = await update(
            self.client,
            published,
            cache="recompute",
            tolerance=1e-3,
            load_seconds=5.0,
            loader=self.path,
        )
        await self.path.settled(self.client, published)
        return done

    async def sample(self) -> tuple[int, ...]:
        completion = await self.client.generate([3], SamplingConfig(max_tokens=8), deadline=5.0)
        return tuple(span.version for span in completion.spans)

    def copies(self) -> int:
        return len(list(self.cache.iterdir())) if self.cache.is_dir() else 0


@asynccontextmanager
async def world(directory: Path, way: str = "file", **settings) -> AsyncIterator[World]:
    async with fake_vllm(**settings) as fake, open_session() as session:
        yield World(fake, VllmClient(fake.url, session), directory, way)


def test_names_say_the_run_and_the_version_and_nothing_else_is_one() -> None:
    version = Version(3, 17).pack()
    assert adapters.name("a-run_1", version) == "a-run_1@3.17"
    assert adapters.run_of("a-run_1@3.17") == "a-run_1"
    assert adapters.version_of("a-run_1@3.17") == version
    for other in ("policy", "", "a@1", "a@1.x", "@1.2", "a@1.2 "):
        assert (adapters.run_of(other), adapters.version_of(other)) == ("", -1)


def test_a_version_is_a_directory_of_peft_and_one_file_that_carries_it_all(tmp_path: Path) -> None:
    publisher = AdapterPublisher(tmp_path, SETTINGS)
    tensors = {"base_model.model.q_proj.lora_A.weight": torch.ones(4, 8)}
    release = publisher.release(Version(0, 1), tensors)
    assert json.loads((tmp_path / "0-1" / CONFIG_NAME).read_text()) == SETTINGS
    assert store.local_path(release.uri) == tmp_path / "0-1" / FILE_NAME
    assert publisher.release(Version(0, 1), tensors) == release, "the same bytes again"
    with pytest.raises(store.WeightFault, match="other weights"):
        publisher.release(Version(0, 1), {"base_model.model.q_proj.lora_A.weight": torch.zeros(4, 8)})


@pytest.mark.parametrize("way", ["file", "bus"])
async def test_versions_are_loaded_beside_each_other_and_tokens_carry_the_one_that_was_named(
    tmp_path: Path, way: str
) -> None:
    async with world(tmp_path, way) as w:
        for step in (1, 2, 3):
            done = await w.serve(step)
            assert (done.attempts, done.paused) == (1, 0.0)
            assert done.canary_error < 1e-6
            assert await w.sample() == (step,)
        assert w.fake.named == [adapters.name(RUN, step) for step in (1, 2, 3)], "each name once"
        assert "pause" not in w.fake.order
        w.client.adapter = adapters.name(RUN, 2)
        assert await w.sample() == (2,), "requests for the one before are still served"


async def test_the_handshake_scores_by_the_adapter(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        published = msgspec.structs.replace(await w.learner.publish(1), vocabulary=w.fake.vocabulary)
        await w.push(published)
        found = await handshake(w.client, published, SamplingConfig(), tolerance=1e-3, deadline=5.0)
        assert max(found.canary_error, found.sampling_error) < 1e-6


@pytest.mark.parametrize("fault", ["digest", "gone", "whole", "refused"])
async def test_what_is_wrong_is_refused_and_the_one_before_serves_on(tmp_path: Path, fault: str) -> None:
    async with world(tmp_path) as w:
        await w.serve(1)
        bad = await w.learner.publish(2)
        path = store.local_path(bad.uri)
        if fault == "digest":
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        elif fault == "gone":
            path.unlink()
        elif fault == "whole":
            made = store.publish(tmp_path / "whole", Version(0, 2), {"weight": torch.ones(2)})
            bad = msgspec.structs.replace(bad, uri=made.uri, sha256=made.sha256, size=made.size)
        else:
            w.fake.refuse_reason = "LoRA rank 64 is greater than max_lora_rank 16."
        with pytest.raises(UpdateRefused):
            await w.push(bad)
        assert await w.sample() == (1,)
        assert list(w.fake.adapters) == [adapters.name(RUN, 1)]
        w.fake.refuse_reason = ""
        await w.serve(3)
        assert await w.sample() == (3,)
        w.now += 11
        await w.path.settled(w.client, policy(3))
        assert w.copies() == 2, "what was refused leaves nothing behind"


async def test_a_server_that_was_started_without_adapters_is_told_by_its_flags(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.fake.faults["/v1/load_lora_adapter"] = [404]
        with pytest.raises(UpdateRefused) as refused:
            await w.serve(1)
        assert "needs the flags for adapters" in str(refused.value)
        assert await w.client.version() == -1


async def test_a_blob_that_is_gone_is_refused_and_a_full_disk_is_tried_again(tmp_path: Path) -> None:
    async with world(tmp_path, "bus") as w:
        published = await w.learner.publish(1)
        w.cache.write_text("a file where a directory has to be")
        with pytest.raises(FetchFailed):
            await w.push(published)
        w.cache.unlink()
        await w.bus.blobs.remove("weights.whole.0-1")
        with pytest.raises(UpdateRefused, match="not on the bus"):
            await w.push(published)
        assert w.copies() == 0


async def test_a_load_whose_answer_was_lost_is_done(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.fake.faults["/v1/load_lora_adapter"] = ["lost"]
        await w.serve(1)
        assert w.fake.named == [adapters.name(RUN, 1)]
        assert await w.sample() == (1,)


async def test_an_update_is_repeated_by_another_role_without_a_load(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        published = await w.learner.publish(1)
        await w.push(published)
        w.path, w.client.adapter = w.another_role(), ""
        await w.push(published)
        assert w.fake.named == [adapters.name(RUN, 1)]
        assert await w.sample() == (1,)


async def test_what_another_run_of_the_same_name_left_in_a_server_is_not_taken_for_ours(
    tmp_path: Path,
) -> None:
    """Nearly the same adapter passes the canary."""
    async with world(tmp_path) as w:
        await w.serve(1)
        theirs = w.fake.adapters[adapters.name(RUN, 1)]
        tensors = {"base_model.model.q_proj.lora_A.weight": torch.full((4, 8), 1.0)}
        tensors["base_model.model.q_proj.lora_B.weight"] = torch.full((8, 4), 1e-6)
        release = AdapterPublisher(tmp_path / "ours", SETTINGS).release(Version(0, 1), tensors)
        fields = {"uri": release.uri, "sha256": release.sha256, "size": release.size}
        w.path, w.client.adapter = w.another_role(), ""
        await w.push(msgspec.structs.replace(policy(1), **fields))
        loaded = Path(w.fake.adapters[adapters.name(RUN, 1)])
        assert str(loaded) != theirs
        assert store.file_digest(loaded / FILE_NAME) == release.sha256
        assert await w.sample() == (1,)


async def test_a_failed_proof_is_loaded_again_from_another_path(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.fake.stale_loads = 1
        bodies = w.fake.bodies
        done = await w.serve(1)
        assert done.attempts == 2
        assert await w.sample() == (1,)
        salts = {body["cache_salt"] for body in bodies if "logprob_token_ids" in body["sampling_params"]}
        assert len(salts) == 2, "a proof reads nothing that another computed"
        assert len({path.name for path in w.cache.iterdir()}) == 2


async def test_an_adapter_that_cannot_be_proved_is_taken_away_and_the_server_is_to_be_restarted(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        await w.serve(1)
        w.fake.stale_loads = 2
        with pytest.raises(ServerBroken, match="canary"):
            await w.serve(2)
        assert list(w.fake.adapters) == [adapters.name(RUN, 1)]


async def test_old_ones_go_when_no_request_uses_them(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        one, two, three, four = (adapters.name(RUN, step) for step in (1, 2, 3, 4))
        w.fake.metrics = in_use(one)
        for step in (1, 2, 3):
            await w.serve(step)
        assert list(w.fake.adapters) == [one, two, three], "a request runs with the first"
        w.fake.metrics = in_use(two)
        await w.serve(4)
        assert list(w.fake.adapters) == [two, three, four]
        assert w.copies() == 4, "vLLM may still read a copy"
        w.fake.metrics = ""
        w.now = 9.0
        await w.path.settled(w.client, policy(4))
        assert w.copies() == 4
        w.now = 10.0
        await w.path.settled(w.client, policy(4))
        assert list(w.fake.adapters) == [three, four], "no request is older than its deadline"
        assert w.copies() == 3
        w.now = 20.0
        await w.path.settled(w.client, policy(4))
        assert w.copies() == 2


async def test_what_a_former_role_left_is_removed(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        for step in (1, 2):
            await w.serve(step)
        await w.client.unload_adapter(adapters.name(RUN, 1))
        w.path = w.another_role()
        await w.serve(3)
        assert w.copies() == 3
        w.now = 10.0
        await w.path.settled(w.client, policy(3))
        assert w.copies() == 2, "the server still has the second"


async def test_adapters_of_others_are_left_alone(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        w.fake.adapters |= {"theirs": "/x", "other@0.1": "/y"}
        for step in range(1, 5):
            await w.serve(step)
            w.now += 10.0
        assert {"theirs", "other@0.1"} < set(w.fake.adapters)
        assert adapters.name(RUN, 1) not in w.fake.adapters


async def test_a_request_in_flight_ends_with_its_adapter_and_one_too_late_goes_elsewhere(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as w:
        await w.serve(1)
        w.fake.hold.clear()
        found: list[tuple[int, ...]] = []

        async def one() -> None:
            found.append(await w.sample())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one)
            await until(lambda: w.fake.running == 1)
            await w.client.unload_adapter(adapters.name(RUN, 1))
            with pytest.raises(ServerGone, match=r"does not know the adapter trial@0\.1"):
                await w.sample()
            w.fake.hold.set()
        assert found == [(1,)]


async def test_tokens_of_another_adapter_are_not_taken(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.serve(1)
        w.fake.claims = adapters.name(RUN, 9)
        with pytest.raises(ServerGone, match="where trial@0"):
            await w.sample()


async def test_weights_that_were_replaced_beneath_an_adapter_are_noticed(tmp_path: Path) -> None:
    async with world(tmp_path) as w:
        await w.serve(1)
        w.fake.version = "7"
        with pytest.raises(ServerGone, match="beneath the adapter"):
            await w.sample()


def in_use(running: str, waiting: str = "", at: float = 1.0e9) -> str:
    labels = f'max_lora="4",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"# TYPE vllm:lora_requests_info gauge\nvllm:lora_requests_info{{{labels}}} {at}\n"


def test_the_newest_note_says_which_adapters_are_in_use() -> None:
    assert adapters.adapters_in_use("vllm:num_requests_waiting 3\n") is None
    assert adapters.adapters_in_use(in_use("", "")) == set()
    text = in_use("a@0.1", at=5.0) + in_use("a@0.2,a@0.3", "a@0.4", at=7.5) + in_use("a@0.9", at=6.0)
    assert adapters.adapters_in_use(text) == {"a@0.2", "a@0.3", "a@0.4"}
    assert adapters.adapters_in_use("vllm:lora_requests_info{garbage} x\n") is None


@pytest.mark.parametrize("port", ["another", "the same", "the same, unseen"])
async def test_a_server_that_is_started_anew_leaves_no_copies(tmp_path: Path, port: str) -> None:
    """Its process is another one, with nothing loaded; whether its port is as well does not matter."""
    async with world(tmp_path) as w, open_session() as session:
        copies, step = [], 0
        for _ in range(4):
            async with fake_vllm() as fake:
                if port == "another":
                    w.fake, w.client = fake, VllmClient(fake.url, session)
                for _ in range(3):
                    step += 1
                    await w.serve(step)
                    w.now += 11.0
                if port != "the same, unseen":
                    w.path.ended(w.client)
                w.fake.adapters.clear()
            copies.append(w.copies())
        assert max(copies) <= 4, copies
        assert w.path.statistics()["surpassed"] <= 3


async def test_a_server_that_goes_on_keeps_the_copy_that_it_samples_with(tmp_path: Path) -> None:
    """The role lost sight of it for a moment: what was put away then is needed again."""
    async with world(tmp_path) as w:
        published = await w.learner.publish(1)
        await w.push(published)
        w.path.ended(w.client)
        w.now = 5.0
        await w.push(published)
        assert w.fake.named == [adapters.name(RUN, 1)], "it was there, and was not loaded again"
        newest = await w.learner.publish(2)
        await w.push(newest)
        w.path = w.another_role()
        await w.push(newest)
        assert len(w.fake.named) == 2
        for w.now in (100.0, 200.0):
            await w.path.settled(w.client, newest)
        assert w.copies() == 2, "the newest and the one before, which the server has as well"
