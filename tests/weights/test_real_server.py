"""The real vLLM takes versions from files and from the bus, also a tied head, and refuses damaged ones."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from scenes.memory_bus import MemoryBus

from bus.messages import PolicyPublished
from engine.config import Config, ModelConfig, RunConfig, SamplingConfig
from engine.inference.process import serve
from engine.inference.vllm import VllmClient, open_session
from engine.lineage import Version
from engine.weights import store
from engine.weights.loaders import BusLoader, FileLoader, WeightLoader
from engine.weights.proof import Proof
from engine.weights.publisher import FilePublisher
from engine.weights.update import ServerBroken, Updated, UpdateRefused, canary_error, update

torch = pytest.importorskip("torch")

from tiny_llama import tiny  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

CANARY = tuple(range(3, 67))


@dataclass
class World:
    """A learner's model and a server that holds what it loads."""

    client: VllmClient
    model: torch.nn.Module
    directory: Path
    bus: MemoryBus
    step: int = 0
    publishers: dict[str, FilePublisher] = field(default_factory=dict)
    tensors: Callable[[], dict[str, torch.Tensor]] | None = None

    def __post_init__(self) -> None:
        for name in ("file", "bus"):
            self.publishers[name] = FilePublisher(self.directory / name, bus=name == "bus", keep=50)

    def change(self) -> None:
        """Move some elements of every tensor, the head's among them, far enough to be seen."""
        generator = torch.Generator().manual_seed(self.step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                chosen = torch.rand(parameter.shape, generator=generator) < 0.05
                chosen.view(-1)[0] = True
                parameter[chosen] += 0.3 if self.step % 2 else -0.3

    async def publish(self, way: str = "file", dtype: torch.dtype | None = None) -> PolicyPublished:
        self.step += 1
        version = Version(0, self.step)
        release = self.publishers[way].release(
            version, self.tensors() if self.tensors else dict(self.model.named_parameters()), dtype=dtype
        )
        await self.publishers[way].upload(self.bus.blobs, release)
        with torch.no_grad():
            logits = self.model(torch.tensor([CANARY])).logits[0, :-1]
        chosen = torch.tensor(CANARY[1:])[:, None]
        found = torch.log_softmax(logits, -1).gather(1, chosen)[:, 0].numpy().astype("<f4")
        return PolicyPublished(
            version=version.pack(),
            step=self.step,
            uri=release.uri,
            sha256=release.sha256,
            size=release.size,
            canary_tokens=np.asarray(CANARY, "<i4").tobytes(),
            canary_logprobs=found.tobytes(),
        )

    async def push(self, policy: PolicyPublished, loader: WeightLoader | None = None) -> Updated:
        return await update(
            self.client,
            policy,
            cache="recompute",
            tolerance=1e-3,
            load_seconds=60.0,
            loader=loader or FileLoader(),
        )

    async def serves(self, policy: PolicyPublished) -> None:
        """Check that the server samples with ``policy`` and nothing else."""
        assert await self.client.version() == policy.version
        assert not await self.client.paused()
        assert await canary_error(self.client, policy, deadline=60.0) < 2e-4
        completion = await self.client.generate([5, 6, 7], SamplingConfig(max_tokens=4), deadline=60.0)
        assert [span.version for span in completion.spans] == [policy.version]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    directory = tmp_path_factory.mktemp("served")
    model = tiny(directory / "model", tied=True)
    config = Config(
        run=RunConfig(name="e2e"), model=ModelConfig(path=str(directory / "model"), max_model_len=512)
    )
    log_path = directory / "vllm.log"
    async with (
        open_session() as session,
        serve(config, directory / "model", index=0, log_path=log_path, session=session) as process,
    ):
        bus = MemoryBus(run="t", role="learner", instance="learner-0")
        yield World(VllmClient(process.url, session), model, directory, bus)


async def test_versions_reach_every_tensor_and_the_tied_head(world: World) -> None:
    for _ in range(3):
        world.change()
        policy = await world.publish()
        updated = await world.push(policy)
        assert (updated.attempts, updated.canary_error < 2e-4) == (1, True)
        await world.serves(policy)


async def test_versions_arrive_by_the_bus(world: World) -> None:
    loader = BusLoader(world.bus.peer("server", "s").blobs, world.directory / "cache")
    for _ in range(2):
        world.change()
        policy = await world.publish("bus")
        await world.push(policy, loader)
        await world.serves(policy)


@pytest.mark.parametrize("fault", ["flipped", "cut", "names"])
async def test_damaged_weights_leave_the_old_ones_serving(world: World, fault: str) -> None:
    good = await world.publish()
    await world.push(good)
    world.change()
    if fault == "names":
        strange = FilePublisher(world.directory / "strange").release(Version(0, 999), {"a": torch.ones(3)})
        bad = PolicyPublished(
            version=999, step=999, uri=strange.uri, sha256=strange.sha256, size=strange.size,
            canary_tokens=b"", canary_logprobs=b"",
        )  # fmt: skip
    else:
        bad = await world.publish()
        path = store.local_path(bad.uri)
        content = path.read_bytes()
        path.write_bytes(content[:-1] + (b"" if fault == "cut" else bytes([content[-1] ^ 0x40])))
    with pytest.raises(UpdateRefused):
        await world.push(bad)
    await world.serves(good)
    after = await world.publish("bus")
    await world.push(after, BusLoader(world.bus.peer("server", fault).blobs, world.directory / fault))
    await world.serves(after)


async def test_a_push_that_does_nothing_at_a_small_learning_rate_is_refused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, where the canary has to allow for more than a step of 1e-6 moves it."""
    proof, loader = Proof(seconds=60.0), FileLoader()
    await proof.note(world.client)

    async def push(policy: PolicyPublished) -> Updated:
        return await update(
            world.client,
            policy,
            cache="recompute",
            tolerance=0.1,
            load_seconds=60.0,
            loader=loader,
            proof=proof,
        )

    await push(await world.publish(dtype=torch.bfloat16))
    with torch.no_grad():
        for parameter in world.model.parameters():
            parameter -= 1e-6 * torch.sign(torch.randn(parameter.shape))
    policy = await world.publish(dtype=torch.bfloat16)
    with monkeypatch.context() as lost:

        async def load_nothing(*_: object, **__: object) -> None: ...

        lost.setattr(VllmClient, "update_weights", load_nothing)
        with pytest.raises(ServerBroken, match="no tensor changed in dp0:pp0:pcp0:tp0"):
            await push(policy)
    await push(policy)
    assert await canary_error(world.client, policy, deadline=60.0) < 0.1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "olmoe"])
async def test_a_mixture_of_experts_takes_two_updates(architecture: str, tmp_path: Path) -> None:
    """Published under the checkpoint's names; vLLM on CPUs packs experts after the first load only."""
    from scenes.tiny_models import write_model
    from transformers import AutoModelForCausalLM

    from engine.training.parameters import published

    folder = write_model(tmp_path / "model", architecture, vocabulary=128)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config = Config(run=RunConfig(name="e2e"), model=ModelConfig(path=str(folder), max_model_len=256))
    async with (
        open_session() as session,
        serve(config, folder, index=0, log_path=tmp_path / "vllm.log", session=session) as process,
    ):
        bus = MemoryBus(run="t", role="learner", instance="learner-0")
        client = VllmClient(process.url, session)
        world = World(client, model, tmp_path, bus, tensors=lambda: dict(published(model)))
        for _ in range(2):
            world.change()
            policy = await world.publish()
            assert (await world.push(policy)).attempts == 1
            await world.serves(policy)
