"""The real vLLM takes versions whole and as deltas, from files and from the bus, and refuses damaged ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from scenes.memory_bus import MemoryBus

from bus.messages import PolicyPublished
from engine.config import Config, ModelConfig, RunConfig, SamplingConfig, ServerConfig
from engine.inference.process import serve
from engine.inference.server_checks import canary_error
from engine.inference.vllm import VllmClient, open_session
from engine.lineage import Version
from engine.weights import store
from engine.weights.buspath import BusPath
from engine.weights.paths import FilePath, WeightPath, worker_states
from engine.weights.publisher import DELTA_NAME, Publisher
from engine.weights.update import Updated, UpdateRefused, update

torch = pytest.importorskip("torch")

from weight_files import tied_model  # noqa: E402

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
    outlets: dict[str, Publisher] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("file", "bus"):
            self.outlets[name] = Publisher(
                self.directory / name, bus=name == "bus", deltas=True, keyframe_every=100, keep=50
            )

    def change(self) -> None:
        """Move some elements of every tensor, the head's among them, far enough to be seen."""
        generator = torch.Generator().manual_seed(self.step)
        with torch.no_grad():
            for parameter in self.model.parameters():
                chosen = torch.rand(parameter.shape, generator=generator) < 0.05
                chosen.view(-1)[0] = True
                parameter[chosen] += 0.3 if self.step % 2 else -0.3

    def publish(self, way: str = "file") -> PolicyPublished:
        self.step += 1
        version = Version(0, self.step)
        release = self.outlets[way].release(version, dict(self.model.named_parameters()))
        with torch.no_grad():
            logits = self.model(torch.tensor([CANARY])).logits[0, :-1]
        chosen = torch.tensor(CANARY[1:])[:, None]
        found = torch.log_softmax(logits, -1).gather(1, chosen)[:, 0].numpy().astype("<f4")
        self.release = release
        return PolicyPublished(
            version=version.pack(),
            step=self.step,
            uri=release.uri,
            sha256=release.sha256,
            size=release.size,
            canary_tokens=np.asarray(CANARY, "<i4").tobytes(),
            canary_logprobs=found.tobytes(),
            start=release.start,
            deltas=release.deltas,
        )

    async def push(self, policy: PolicyPublished, path: WeightPath | None = None) -> Updated:
        return await update(
            self.client,
            policy,
            cache="recompute",
            tolerance=1e-3,
            load_seconds=60.0,
            path=path or FilePath(hold=True),
        )

    async def holds(self) -> str:
        (state,) = await worker_states(self.client)
        return state.held

    async def serves(self, policy: PolicyPublished) -> None:
        """Check that the server samples with ``policy`` and nothing else."""
        assert await self.client.version() == policy.version
        assert not await self.client.paused()
        assert await canary_error(self.client, policy, deadline=60.0) < 2e-4
        completion = await self.client.generate([5, 6, 7], SamplingConfig(max_tokens=4), deadline=60.0)
        assert [span.version for span in completion.spans] == [policy.version]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    directory = tmp_path_factory.mktemp("streaming")
    model = tied_model(directory / "model")
    config = Config(
        run=RunConfig(name="e2e"),
        model=ModelConfig(path=str(directory / "model"), max_model_len=512),
        server=ServerConfig(deltas=True),
    )
    log_path = directory / "vllm.log"
    async with (
        open_session() as session,
        serve(config, directory / "model", index=0, log_path=log_path, session=session) as process,
    ):
        bus = MemoryBus(run="t", role="learner", instance="learner-0")
        yield World(VllmClient(process.url, session), model, directory, bus)


async def test_deltas_reach_every_tensor_and_the_tied_head(world: World) -> None:
    await world.push(world.publish())
    for _ in range(3):
        world.change()
        policy = world.publish()
        assert policy.deltas, "it changed too much to be a test of deltas"
        store.local_path(policy.uri).rename(world.directory / "hidden")  # only the delta can lead there
        updated = await world.push(policy)
        (world.directory / "hidden").rename(store.local_path(policy.uri))
        assert updated.canary_error < 2e-4
        assert updated.attempts == 1
        assert await world.holds() == policy.sha256
        await world.serves(policy)


async def test_a_server_two_versions_behind_takes_the_chain(world: World) -> None:
    await world.push(world.publish())
    for _ in range(2):
        world.change()
        policy = world.publish()
    store.local_path(policy.uri).rename(world.directory / "hidden")
    await world.push(policy)
    (world.directory / "hidden").rename(store.local_path(policy.uri))
    await world.serves(policy)


async def test_a_server_that_holds_something_else_takes_the_whole(world: World) -> None:
    world.change()
    policy = world.publish()
    await world.push(policy, FilePath())
    assert await world.holds() == ""
    world.change()
    policy = world.publish()
    await world.push(policy)
    await world.serves(policy)


def damage(path: Path, fault: str) -> None:
    content = bytearray(path.read_bytes())
    if fault == "flipped":
        content[-9] ^= 0x40
    elif fault == "cut":
        del content[-5:]
    path.write_bytes(content)


@pytest.mark.parametrize("fault", ["flipped", "cut"])
async def test_a_damaged_delta_is_answered_by_the_whole(world: World, fault: str) -> None:
    await world.push(world.publish())
    world.change()
    policy = world.publish()
    damage(store.local_path(policy.uri).with_name(DELTA_NAME), fault)
    await world.push(policy)
    await world.serves(policy)


@pytest.mark.parametrize("fault", ["flipped", "cut"])
@pytest.mark.parametrize("hold", [True, False])
async def test_damaged_weights_leave_the_old_ones_serving(world: World, fault: str, hold: bool) -> None:
    good = world.publish()
    await world.push(good)
    world.change()
    bad = world.publish()
    damage(store.local_path(bad.uri), fault)
    damage(store.local_path(bad.uri).with_name(DELTA_NAME), fault)
    with pytest.raises(UpdateRefused):
        await world.push(bad, FilePath(hold=hold))
    await world.serves(good)
    world.change()
    world.outlets["file"] = Publisher(world.directory / f"again-{fault}-{hold}", deltas=True, keep=50)
    after = world.publish()
    await world.push(after)
    await world.serves(after)


async def test_a_delta_from_another_base_is_refused(world: World) -> None:
    import msgspec

    good = world.publish()
    await world.push(good)
    world.change()
    world.publish()
    world.change()
    policy = world.publish()
    lying = msgspec.structs.replace(policy.deltas[-1], base=good.sha256)
    bad = msgspec.structs.replace(policy, uri="file:///nowhere", deltas=(lying,))
    with pytest.raises(UpdateRefused):
        await world.push(bad)
    await world.serves(good)
    await world.push(policy)
    await world.serves(policy)


async def test_weights_by_the_bus(world: World) -> None:
    """A server follows by deltas; a new one, which holds nothing, joins at the newest version."""
    path = BusPath(world.bus.peer("server", "s").blobs, world.directory / "cache", hold=True)
    for _ in range(3):
        world.change()
        policy = world.publish("bus")
        await world.outlets["bus"].upload(world.bus.blobs, world.release)
        await world.push(policy, path)
        await world.serves(policy)
    assert policy.start
    assert path.fetched_bytes < 2 * policy.size
    await world.push(world.publish(), FilePath())
    assert await world.holds() == ""
    newcomer = BusPath(world.bus.peer("server", "t").blobs, world.directory / "other", hold=True)
    world.change()
    policy = world.publish("bus")
    await world.outlets["bus"].upload(world.bus.blobs, world.release)
    await world.push(policy, newcomer)
    await world.serves(policy)


async def test_a_damaged_blob_leaves_the_old_weights_serving(world: World) -> None:
    path = BusPath(world.bus.peer("server", "u").blobs, world.directory / "third", hold=True)
    good = world.publish()
    await world.push(good)
    world.change()
    policy = world.publish("bus")
    await world.outlets["bus"].upload(world.bus.blobs, world.release)
    name = policy.deltas[-1].uri.removeprefix("bus:")
    whole = await world.bus.blobs.get(name)
    await world.bus.blobs.put(name, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UpdateRefused):
        await world.push(policy, path)
    await world.serves(good)
    await world.bus.blobs.put(name, whole)
    await world.push(policy, path)
    await world.serves(policy)
