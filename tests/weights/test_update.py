"""The update of one server, against a fake one: order, repetition, every fault."""

from __future__ import annotations

import hashlib
from pathlib import Path

import anyio
import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file
from scenes.fake_vllm import FakeVllm, fake_vllm, logprob, policy, until

from engine.config import SamplingConfig
from engine.inference.completion import Completion, ServerGone, ServerStuck
from engine.inference.server_checks import HandshakeRefused, canary_error
from engine.inference.vllm import VllmClient, open_session
from engine.weights import store
from engine.weights.loaders import FileLoader, NcclLoader
from engine.weights.proof import Proof, unchanged_workers, unequal_engines
from engine.weights.update import (
    FetchFailed,
    ServerBroken,
    Updated,
    UpdateRefused,
    update,
)

WORK = ("start_weight_update", "pause", "update_weights", "finish_weight_update", "resume")


async def push(
    fake: FakeVllm, announced, *, cache="recompute", seconds=5.0, loader=None, tolerance=1e-3, proof=None
) -> Updated:
    async with open_session() as session:
        client = VllmClient(fake.url, session)
        if proof is not None:
            await proof.note(client)
        return await update(
            client, announced, cache=cache, tolerance=tolerance, load_seconds=seconds,
            loader=loader or FileLoader(), proof=proof,
        )  # fmt: skip


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


async def test_weights_that_failed_their_canary_and_cannot_be_loaded_again_break_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old weights are gone: it must not sample on, and no later proof may vouch for this label."""
    async with fake_vllm(version="1", loaded="1", stale_loads=1) as fake:
        announced = policy(2)
        taken, original = store.local_path(announced.uri), VllmClient.resume

        async def resume(client: VllmClient, **settings: float) -> None:
            await original(client, **settings)
            taken.unlink(missing_ok=True)

        monkeypatch.setattr(VllmClient, "resume", resume)
        with pytest.raises(ServerBroken, match=r"could not be loaded again: .*gone"):
            await push(fake, announced)
        assert fake.paused


async def test_a_push_that_changes_no_tensor_is_refused_where_the_canary_cannot_tell() -> None:
    proof = Proof(seconds=5.0)
    async with fake_vllm() as fake:
        for version in (1, 2):
            assert (await push(fake, policy(version), tolerance=9.0, proof=proof)).attempts == 1
        fake.stale_loads = 1
        assert (await push(fake, policy(3), tolerance=9.0, proof=proof)).attempts == 2
        fake.stale_loads = 2
        assert (await push(fake, policy(4), tolerance=9.0)).attempts == 1, "the canary alone sees nothing"
        fake.stale_loads = 2
        with pytest.raises(ServerBroken, match="no tensor changed in dp0:pp0:pcp0:tp0"):
            await push(fake, policy(5), tolerance=9.0, proof=proof)
        assert fake.paused
        repeated = msgspec.structs.replace(policy(6), sha256=policy(3).sha256, uri=policy(3).uri)
        repeated = msgspec.structs.replace(repeated, size=policy(3).size)
        fake.stale_loads = 1
        assert (await push(fake, repeated, tolerance=9.0, proof=proof)).attempts == 1, "the same bytes again"


async def test_one_stale_engine_of_several_behind_one_url_is_seen() -> None:
    async with fake_vllm(engines=3) as fake:
        await push(fake, policy(1), proof=Proof(seconds=5.0))
        fake.stale_engines = (2,)
        with pytest.raises(ServerBroken, match="engines hold different weights: dp2, after 2 loads"):
            await push(fake, policy(2), proof=Proof(seconds=5.0))


async def test_experts_of_one_engine_are_compared_with_themselves_only() -> None:
    one = {"dp0:tp0:experts.w": "a", "dp0:tp0:norm": "n", "dp1:tp0:experts.w": "b", "dp1:tp0:norm": "n"}
    one = {key.replace("experts", "layers.0.mlp.experts"): value for key, value in one.items()}
    assert unequal_engines(one) == []
    assert unequal_engines(one | {"dp1:tp0:norm": "m"}) == ["dp1"]
    assert unchanged_workers(one, one | {"dp0:tp0:norm": "m"}) == ["dp1:tp0"]


async def test_a_server_without_checksums_is_proved_by_the_canary() -> None:
    async with fake_vllm(faults={"/weight_checker": [404]}) as fake:
        proof = Proof(seconds=5.0)
        for version in (1, 2):
            assert (await push(fake, policy(version), proof=proof)).attempts == 1
        assert fake.calls["/weight_checker"] == 1


@pytest.mark.parametrize("path", ["/update_weights", "/finish_weight_update"])
async def test_a_load_that_fails_half_way_leaves_the_server_paused(path: str) -> None:
    async with fake_vllm(version="1", loaded="1", faults={path: [500]}) as fake:
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
                scope.cancel()
                await original(info, deadline=deadline)

            client.update_weights = cancelling
            await update(
                client, policy(2), cache="recompute", tolerance=1e-3, load_seconds=5.0, loader=FileLoader()
            )
        assert scope.cancelled_caught
        assert fake.version == "2"
        assert not fake.paused


async def test_a_server_without_our_engine_is_refused() -> None:
    async with fake_vllm(version="1", loaded="1", refuse_reason="set weight_transfer_config") as fake:
        with pytest.raises(UpdateRefused, match="cannot take weights from files"):
            await push(fake, policy(2))
    assert "pause" not in fake.order
    assert fake.version == fake.loaded == "1"


@pytest.mark.parametrize("fault", ["missing", "cut", "flipped", "names"])
async def test_a_bad_file_is_refused_before_the_pause(fault: str, tmp_path: Path) -> None:
    for index, names in enumerate((["a", "b"], ["a", "c" if fault == "names" else "b"])):
        (tmp_path / str(index)).mkdir()
        save_file({name: np.zeros(3, np.float32) for name in names}, tmp_path / f"{index}/model.safetensors")
    file = tmp_path / "1" / "model.safetensors"
    content = file.read_bytes()
    announced = msgspec.structs.replace(
        policy(2), uri=file.as_uri(), sha256=hashlib.sha256(content).hexdigest(), size=len(content)
    )
    if fault == "missing":
        file.unlink()
    elif fault != "names":
        file.write_bytes(content[:-1] + (b"" if fault == "cut" else bytes([content[-1] ^ 1])))
    words = {"missing": "gone", "cut": "bytes", "flipped": "SHA-256", "names": r"missing \['b'\]"}
    async with fake_vllm(version="1", loaded="1", root=str(tmp_path / "0")) as fake:
        with pytest.raises(UpdateRefused, match=words[fault]):
            await push(fake, announced)
    assert "pause" not in fake.order
    assert (fake.version, fake.session_open) == ("1", False)


async def test_a_file_that_is_pruned_while_the_server_waits_for_its_turn_is_refused(tmp_path: Path) -> None:
    announced = policy(2)
    async with fake_vllm(version="1", loaded="1") as fake, open_session() as session:

        async def turn() -> None:
            store.local_path(announced.uri).unlink()

        with pytest.raises(UpdateRefused, match="gone"):
            await update(
                VllmClient(fake.url, session),
                announced,
                cache="keep",
                tolerance=1e-3,
                load_seconds=5.0,
                loader=FileLoader(),
                turn=turn,
            )
    assert "pause" not in fake.order


async def test_what_the_learner_brings_is_waited_for_and_proved() -> None:
    async with fake_vllm(version="1", loaded="1") as fake:
        with pytest.raises(ServerStuck, match="did not bring version 2"):
            await push(fake, policy(2), loader=NcclLoader(), seconds=0.05)
        fake.version = fake.loaded = "2"
        updated = await push(fake, policy(2), loader=NcclLoader())
        assert updated.canary_error < 1e-6
        assert "start_weight_update" not in fake.order


async def test_what_the_learner_has_replaced_meanwhile_is_not_waited_for() -> None:
    """The learner writes into the server when it likes: before the wait, or between load and proof."""
    async with fake_vllm(version="3", loaded="3") as fake:
        with pytest.raises(FetchFailed, match="newer"):
            await push(fake, policy(2), loader=NcclLoader())
        fake.version = "2"
        asked = fake.calls["/weight_info"]
        async with anyio.create_task_group() as tasks:
            fake.hold.clear()

            async def bring() -> None:
                await until(lambda: fake.running == 1)
                assert fake.calls["/weight_info"] == asked + 1
                fake.version = "3"
                fake.hold.set()

            tasks.start_soon(bring)
            with pytest.raises(FetchFailed, match="newer"):
                await push(fake, policy(2), loader=NcclLoader())
        assert not fake.paused


async def sample(fake: FakeVllm, found: list[Completion]) -> None:
    """Generate one completion after another for as long as the server answers."""
    async with open_session() as session:
        client = VllmClient(fake.url, session)
        while True:
            found.append(await client.generate([1, 2], SamplingConfig(max_tokens=4), deadline=60.0))


def truly_labelled(completion: Completion) -> bool:
    """Return whether the log-probs are those of the versions that the spans name."""
    expected = [
        logprob(token, str(span.version))
        for span in completion.spans
        for token in completion.tokens[span.start : span.stop]
    ]
    return bool(np.allclose(completion.logprobs, expected))


async def test_a_half_applied_update_mislabels_nothing_and_its_retry_is_harmless() -> None:
    """A takes the version; B fails in the middle, then hangs, then takes it."""
    a_tokens: list[Completion] = []
    b_tokens: list[Completion] = []
    faults: dict[str, list[int | str]] = {"/update_weights": [500, "hang"]}
    async with (
        fake_vllm(version="1", loaded="1") as a,
        fake_vllm(version="1", loaded="1", faults=faults) as b,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(sample, a, a_tokens)
        tasks.start_soon(sample, b, b_tokens)
        await until(lambda: bool(a_tokens) and bool(b_tokens))
        await push(a, policy(2))
        with pytest.raises(ServerBroken):
            await push(b, policy(2))
        assert b.paused
        answered = len(b_tokens)
        with pytest.raises(ServerBroken):
            await push(b, policy(2), seconds=0.2)
        assert len(b_tokens) <= answered + 1, "a broken server samples on"
        assert (b.version, b.loaded) == ("1", "1")
        before = changes(a)
        assert (await push(a, policy(2))).paused == 0.0
        assert changes(a) == before
        await push(b, policy(2))
        await push(b, policy(2))
        seen = len(a_tokens), len(b_tokens)
        await until(lambda: len(a_tokens) > seen[0] + 1 and len(b_tokens) > seen[1] + 1)
        tasks.cancel_scope.cancel()
    for tokens in (a_tokens, b_tokens):
        assert all(map(truly_labelled, tokens))
        assert {completion.spans[0].version for completion in tokens} == {1, 2}


async def test_canary_faults() -> None:
    async with fake_vllm(version="1", loaded="1") as fake, open_session() as session:
        client = VllmClient(fake.url, session)
        good = policy(1)
        assert await canary_error(client, good, deadline=5.0) < 1e-6
        lost = np.full(3, np.nan, "<f4").tobytes()
        wrong = msgspec.structs.replace(good, canary_logprobs=lost)
        assert await canary_error(client, wrong, deadline=5.0) == float("inf")
        short = msgspec.structs.replace(good, canary_logprobs=good.canary_logprobs[:-4])
        with pytest.raises(HandshakeRefused, match="4 tokens and 2 log-probs"):
            await canary_error(client, short, deadline=5.0)
        with pytest.raises(UpdateRefused, match="4 tokens and 2 log-probs"):
            await update(
                client, short, cache="recompute", tolerance=1.0, load_seconds=5.0, loader=FileLoader()
            )
        none = msgspec.structs.replace(good, canary_tokens=b"", canary_logprobs=b"")
        assert await canary_error(client, none, deadline=5.0) == 0.0
