"""The real vLLM on a random model of 120,000 parameters: numbers, version spans, updates, faults."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import msgspec
import numpy as np
import psutil
import pytest
import pytest_asyncio
from scenes.memory_bus import MemoryBus
from tiny_llama import VOCABULARY, announcement, logprobs, tiny, torch, transformers

from bus.messages import PolicyPublished
from engine.config import Config, ModelConfig, RunConfig, SamplingConfig
from engine.inference.process import VllmProcess, serve
from engine.inference.server_checks import HandshakeRefused, canary_error, examine, handshake
from engine.inference.vllm import VllmClient, open_session
from engine.lineage import Version
from engine.weights import store
from engine.weights.loaders import BusLoader, FileLoader, WeightLoader
from engine.weights.proof import Proof
from engine.weights.publisher import FilePublisher
from engine.weights.update import ServerBroken, Updated, UpdateRefused, update

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

CANARY = tuple(range(3, 67))
TOLERANCE = 1e-3
PROMPT = [5, 6, 7, 8, 9]


@dataclass
class World:
    """A server and the model it is meant to serve; ``step`` counts pushes."""

    client: VllmClient
    process: VllmProcess
    model: transformers.LlamaForCausalLM
    directory: Path
    config: Config
    step: int = 0
    history: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def change(self, seed: int) -> PolicyPublished:
        """Change every tensor, publish, return the announcement."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
        return self.publish()

    def publish(self, dtype: torch.dtype | None = None) -> PolicyPublished:
        self.step += 1
        version = Version(0, self.step)
        published = store.publish(self.directory / "weights", version, self.model.state_dict(), dtype=dtype)
        self.history[version.pack()] = {k: v.clone() for k, v in self.model.state_dict().items()}
        return announcement(self.model, version, published, CANARY)

    async def push(
        self,
        policy: PolicyPublished,
        cache: str = "recompute",
        loader: WeightLoader | None = None,
        proof: Proof | None = None,
        tolerance: float = TOLERANCE,
    ) -> Updated:
        return await update(
            self.client, policy, cache=cache, tolerance=tolerance, load_seconds=60.0,
            loader=loader or FileLoader(), proof=proof,
        )  # fmt: skip


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.long)]
)
async def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[World]:
    directory = tmp_path_factory.mktemp(request.param)
    model = tiny(directory / "model", tied=request.param == "tied")
    config = Config(
        run=RunConfig(name="e2e"), model=ModelConfig(path=str(directory / "model"), max_model_len=512)
    )
    async with (
        open_session() as session,
        serve(
            config, directory / "model", index=0, log_path=directory / "vllm.log", session=session
        ) as process,
    ):
        yield World(VllmClient(process.url, session), process, model, directory, config)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_sampled_logprobs_are_those_of_transformers(world: World, temperature: float) -> None:
    """At each temperature they are log softmax(logits / T), as the trainer computes them."""
    await world.push(world.publish())
    completion = await world.client.generate(
        PROMPT, SamplingConfig(max_tokens=64, temperature=temperature), deadline=60.0, stop_token_ids=[2]
    )
    expected = logprobs(world.model, PROMPT + completion.tokens, temperature)[len(PROMPT) - 1 :]
    assert np.max(np.abs(expected - np.asarray(completion.logprobs))) < 1e-4
    assert [span.version for span in completion.spans] == [Version(0, world.step).pack()]
    assert completion.spans[-1].stop == len(completion.tokens)


async def test_prompt_logprobs_are_those_of_transformers(world: World) -> None:
    await world.push(world.publish())
    found = await world.client.prompt_logprobs(list(CANARY), deadline=60.0)
    assert np.max(np.abs(logprobs(world.model, list(CANARY)) - np.asarray(found))) < 1e-4


async def test_only_our_stop_tokens_end_a_completion(world: World) -> None:
    sampling = SamplingConfig(max_tokens=200)
    for _ in range(8):
        completion = await world.client.generate(PROMPT, sampling, deadline=60.0, stop_token_ids=[40, 41])
        stops = {40, 41} & set(completion.tokens[:-1])
        assert not stops
        assert (completion.finish == "stop") == (completion.tokens[-1] in (40, 41))
        assert completion.finish == "stop" or len(completion.tokens) == 200


@pytest.mark.parametrize("cache", ["recompute", "keep"])
async def test_update_in_flight(world: World, cache: str) -> None:
    """Every tensor changes while requests run: all finish, spans are exact, the canary passes."""
    await world.push(world.publish())
    before = Version(0, world.step).pack()
    policy = world.change(seed=world.step)
    completions = []

    async def one(index: int) -> None:
        completions.append(
            await world.client.generate(
                [*PROMPT, 10 + index], SamplingConfig(max_tokens=400), deadline=120.0, salt=str(before)
            )
        )

    async with anyio.create_task_group() as tasks:
        for index in range(24):
            tasks.start_soon(one, index)
        await anyio.wait_all_tasks_blocked()
        await world.client.generate(PROMPT, SamplingConfig(max_tokens=20), deadline=60.0)
        updated = await world.push(policy, cache)
    assert len(completions) == 24
    assert updated.canary_error < 1e-4
    assert updated.attempts == 1
    assert all(len(completion.tokens) == 400 for completion in completions)
    assert all(
        [span.version for span in completion.spans] == [before, policy.version] for completion in completions
    )
    if cache == "recompute":
        for completion in completions[:4]:
            _assert_spans_true(world, completion)
    salted = await world.client.generate(
        [*PROMPT, 10], SamplingConfig(max_tokens=8), deadline=60.0, salt=str(policy.version)
    )
    expected = logprobs(world.model, [*PROMPT, 10, *salted.tokens])[len(PROMPT) :]
    assert np.max(np.abs(expected - np.asarray(salted.logprobs))) < 1e-4


def _assert_spans_true(world: World, completion) -> None:
    """The recorded log-probs of each span are those of the weights that the span names."""
    fresh = transformers.LlamaForCausalLM(world.model.config).eval()
    prompt = next(
        [*PROMPT, 10 + seed] for seed in range(24) if _matches(world, fresh, [*PROMPT, 10 + seed], completion)
    )
    for span in completion.spans:
        fresh.load_state_dict(world.history[span.version])
        expected = logprobs(fresh, prompt + completion.tokens)[len(prompt) - 1 :]
        found = np.asarray(completion.logprobs)
        assert np.max(np.abs(expected - found)[span.start : span.stop]) < 1e-4


def _matches(world: World, fresh, prompt: list[int], completion) -> bool:
    fresh.load_state_dict(world.history[completion.spans[0].version])
    expected = logprobs(fresh, prompt + completion.tokens[:4])[len(prompt) - 1 :]
    return bool(np.max(np.abs(expected - np.asarray(completion.logprobs[:4]))) < 1e-4)


async def test_update_is_idempotent(world: World) -> None:
    policy = world.change(seed=1000 + world.step)
    first = await world.push(policy)
    second = await world.push(policy)
    assert first.paused > 0
    assert second.paused == 0
    assert second.canary_error < 1e-4


@pytest.mark.parametrize("fault", ["digest", "size", "missing", "names"])
async def test_bad_push_is_refused_and_the_old_version_serves_on(world: World, fault: str) -> None:
    good = world.publish()
    await world.push(good)
    if fault == "digest":
        path = store.local_path(world.change(seed=77).uri)
        bad = world.publish()
        content = bytearray(store.local_path(bad.uri).read_bytes())
        content[-1] ^= 0xFF
        store.local_path(bad.uri).write_bytes(content)
        assert path.exists()
    elif fault == "size":
        bad = world.publish()
        with store.local_path(bad.uri).open("ab") as stream:
            stream.write(b"\0")
    elif fault == "missing":
        bad = world.publish()
        os.unlink(store.local_path(bad.uri))
    else:
        state = {name.replace("q_proj", "query"): value for name, value in world.model.state_dict().items()}
        published = store.publish(world.directory / "renamed", Version(7, world.step), state)
        bad = msgspec.structs.replace(
            good, version=good.version + 1000, uri=published.uri, sha256=published.sha256, size=published.size
        )
    with pytest.raises(UpdateRefused):
        await world.push(bad)
    assert await world.client.version() == good.version
    assert not await world.client.paused()
    assert await canary_error(world.client, good, deadline=60.0) < 1e-4
    completion = await world.client.generate(PROMPT, SamplingConfig(max_tokens=4), deadline=60.0)
    assert [span.version for span in completion.spans] == [good.version]
    await world.push(world.change(seed=78))


async def test_versions_arrive_by_the_bus(world: World) -> None:
    bus = MemoryBus(run="t", role="learner", instance="learner-0")
    publisher = FilePublisher(world.directory / "bus", bus=True)
    loader = BusLoader(bus.peer("server", "s").blobs, world.directory / "cache")
    for _ in range(2):
        policy = world.change(seed=2000 + world.step)
        release = publisher.release(Version(0, world.step), world.model.state_dict())
        await publisher.upload(bus.blobs, release)
        fields = {"uri": release.uri, "sha256": release.sha256, "size": release.size}
        await world.push(msgspec.structs.replace(policy, **fields), loader=loader)
        assert await canary_error(world.client, policy, deadline=60.0) < 1e-4


async def test_a_push_that_does_nothing_at_a_small_learning_rate_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where the canary has to allow for far more than a step of 1e-6 moves it."""
    proof = Proof(seconds=60.0)
    await proof.note(world.client)
    await world.push(world.publish(torch.bfloat16), proof=proof, tolerance=9.0)
    with torch.no_grad():
        for parameter in world.model.parameters():
            parameter -= 1e-6 * torch.sign(torch.randn(parameter.shape))
    policy = world.publish(torch.bfloat16)
    with monkeypatch.context() as lost:

        async def load_nothing(*_: object, **__: object) -> None: ...

        lost.setattr(VllmClient, "update_weights", load_nothing)
        with pytest.raises(ServerBroken, match="no tensor changed in dp0:pp0:pcp0:tp0"):
            await world.push(policy, proof=proof, tolerance=9.0)
    await world.push(policy, proof=proof, tolerance=9.0)
    await world.push(world.publish())


async def test_handshake_names_another_context_and_vocabulary(world: World) -> None:
    policy = msgspec.structs.replace(world.publish(), vocabulary=VOCABULARY)
    await world.push(policy)
    await examine(world.client, policy, context=512)
    root, _ = await world.client.model()
    assert root == str(world.directory / "model")
    with pytest.raises(HandshakeRefused, match=r"takes 512 tokens.*max_model_len = 513"):
        await examine(world.client, policy, context=513)
    other = msgspec.structs.replace(policy, vocabulary=VOCABULARY + 1)
    with pytest.raises(HandshakeRefused, match="vocabulary has 300 tokens, the learner's 301"):
        await handshake(world.client, other, SamplingConfig(), tolerance=TOLERANCE, deadline=60.0)


async def test_handshake_agrees_at_any_temperature(world: World) -> None:
    policy = msgspec.structs.replace(world.publish(), vocabulary=VOCABULARY)
    await world.push(policy)
    for temperature in (1.0, 0.6):
        result = await handshake(
            world.client, policy, SamplingConfig(temperature=temperature), tolerance=TOLERANCE, deadline=60.0
        )
        assert result.canary_error < 1e-4
        assert result.sampling_error < 1e-4


async def test_probe_and_health(world: World) -> None:
    assert await world.client.healthy(deadline=5.0)
    assert await world.client.probe(deadline=30.0) == await world.client.version()


async def test_a_killed_engine_ends_the_server_and_all_it_started(world: World) -> None:
    """Last: the server does not survive it."""
    family = psutil.Process(world.process.pid).children(recursive=True)
    engine = next(child for child in family if "EngineCore" in " ".join(child.cmdline()))
    engine.kill()
    with anyio.fail_after(60):
        reason = await world.process.wait()
    assert "vLLM ended" in reason
    assert not psutil.wait_procs(family, timeout=10)[1]
