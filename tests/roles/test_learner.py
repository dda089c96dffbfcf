"""The learner role on a bus in this process: its order of effects, and what a restart does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import numpy as np
import pytest
import structlog
from learner_fakes import VOCABULARY, make_policy, random_samples, round_of, sample, sampled, segment
from learner_scene import Killed, Scene
from scenes.tiny_models import write_model
from structlog.testing import capture_logs

from bus.messages import BatchTrained, EvaluationFinished, PolicyPublished
from engine.config import (
    Config,
    EvaluatorConfig,
    LearnerConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RoleTraining,
    RunConfig,
    ServerConfig,
    SuiteConfig,
)
from engine.context import RoleContext
from engine.errors import SpadeError
from engine.inference import adapters
from engine.inference.tokens import tokenizer_digest
from engine.lineage import Lineage, Version
from engine.weights import store
from roles.learner.role import LearnerRole as LearnerRole
from roles.learner.version_claim import resume

# A missed deadline poisons the tests after it: the thread of a trainer that is still starting lives on.
pytestmark = [pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"), pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.training.session._JOIN_SECONDS", 60.0)


class World(Scene):
    """One bus and one run directory, and learners that come and go on them."""

    def __init__(self, policy: Path, directory: Path) -> None:
        super().__init__(directory)
        self.policy = policy

    def config(self, **learner: Any) -> Config:
        optimizer = OptimizerConfig(learning_rate=1e-3, weight_decay=0.0)
        return Config(
            run=RunConfig(name="test"),
            model=ModelConfig(path=str(self.policy), max_model_len=128),
            learner=LearnerConfig(**{"optimizer": optimizer, "step_seconds": 100.0, **learner}),
        )

    def role(self, config: Config | None = None) -> LearnerRole:
        self.scenes += 1
        return LearnerRole(
            RoleContext(
                config=config or self.config(),
                bus=self.bus.peer("learner", str(self.scenes)),
                directory=self.directory,
                instance=str(self.scenes),
                log=structlog.get_logger(),
            )
        )

    async def killed(self, role: LearnerRole, step: str) -> None:
        """Run ``role`` until it takes ``step`` for a trained version, and end it there."""
        owner = role.bus if step == "publish" else role
        real = getattr(owner, step)

        async def die(*arguments: Any) -> Any:
            if role._version.step:
                raise Killed
            return await real(*arguments)

        setattr(owner, step, die)
        with pytest.raises(Killed):
            async with self.running(role):
                await anyio.sleep_forever()

    async def round(self, number: int, *, agents: int = 4, designers: int = 0, **closed: Any) -> None:
        samples = random_samples(agents, seed=number, round_=number)
        samples += random_samples(designers, seed=100 + number, role="designer", round_=number)
        await self.send(*round_of(number, samples, **closed))

    async def surviving(self) -> list[BatchTrained]:
        """The batches on the path to the newest weights, each round once."""
        state = await self.bus.state_get("lineage")
        assert state is not None
        lineage = msgspec.json.decode(state[1], type=Lineage)
        batches = {
            batch.round: batch
            for batch in await self.events(BatchTrained)
            if lineage.survives(Version.unpack(batch.version))
        }
        return [batches[round_] for round_ in sorted(batches)]

    def weights(self, policy: PolicyPublished) -> dict[str, Any]:
        from safetensors.numpy import load_file

        return load_file(policy.uri.removeprefix("file://"))


def evaluation(suite: str, step: int, win: float) -> EvaluationFinished:
    return EvaluationFinished(
        suite=suite,
        step=step,
        version=Version(0, step).pack(),
        version_high=Version(0, step).pack(),
        episodes=8,
        win=win,
        stderr=0.1,
        by_family={},
        seconds=1.0,
    )


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def world(policy: Path, tmp_path: Path) -> World:
    return World(policy, tmp_path)


async def test_it_announces_the_starting_policy_and_trains_rounds(world: World):
    async with world.running(world.role()):
        start = await world.until(lambda _: True, PolicyPublished)
        await world.round(0, designers=2, plays=8, designs=3)
        await world.round(1, agents=0)
        await world.round(2, final=True)
        await world.until(lambda batch: batch.final)
    first, empty, last = await world.events(BatchTrained)
    assert (start.version, start.step, start.vocabulary) == (0, 0, VOCABULARY)
    assert start.tokenizer == tokenizer_digest(world.policy)
    assert [batch.step for batch in (first, empty, last)] == [1, 1, 2]
    assert (first.agent_samples, first.designer_samples) == (4, 2)
    assert (empty.trained, empty.version) == ((), first.version)
    assert last.mean_staleness == last.max_staleness == 2 - 1
    assert first.metrics["grad_norm"] > 0
    assert first.metrics["trained_tokens"] > 0
    assert 0 < first.metrics["share_training"] < 1
    policies = await world.events(PolicyPublished)
    assert [Version.unpack(one.version) for one in policies] == [(0, 0), (0, 1), (0, 2)]
    kinds = [type(record.message) async for record in world.bus.replay("EVENT")]
    trained = [PolicyPublished, BatchTrained]
    assert kinds == [PolicyPublished, *trained, BatchTrained, *trained]
    assert (await world.bus.stream_info("SAMPLE")).messages == 1 + 5, "what the older checkpoint needs"
    canaries = [np.frombuffer(one.canary_logprobs, "<f4") for one in policies]
    assert [len(one) for one in canaries] == [47, 47, 47]
    assert not np.array_equal(canaries[0], canaries[1])


async def test_probability_follows_the_advantage_across_rounds(world: World):
    import torch
    from transformers import AutoModelForCausalLM

    good, bad, mask = [1, 2, 10, 11, 12], [1, 2, 20, 21, 22], [0, 0, 1, 1, 1]
    async with world.running(world.role()):
        for number in range(3):
            samples = []
            for name, tokens, advantage in (("good", good, 1.0), ("bad", bad, -1.0)):
                part = segment(tokens, mask, version=Version(0, number).pack())
                samples.append(
                    sample(f"{name}-{number}", round_=number, advantage=advantage, segments=[part])
                )
            await world.send(*round_of(number, samples, plays=2))
            await world.until(lambda batch, number=number: batch.round == number)
    batches, policies = await world.events(BatchTrained), await world.events(PolicyPublished)
    assert [batch.max_staleness for batch in batches] == [0, 0, 0]
    model = AutoModelForCausalLM.from_pretrained(world.policy, dtype=torch.float32)

    def probability(policy_: PolicyPublished, tokens: list[int]) -> float:
        if policy_.step:  # the first file is pruned by now, and the model was loaded from its source
            state = {name: torch.from_numpy(array) for name, array in world.weights(policy_).items()}
            model.load_state_dict(state, strict=False)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, :-1]
        picked = torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens[1:])[:, None])
        return float(picked[1:].sum())

    rising, falling = zip(*((probability(one, good), probability(one, bad)) for one in policies), strict=True)
    assert list(rising) == sorted(rising)
    assert list(falling) == sorted(falling, reverse=True)
    assert rising[-1] > rising[0] + 0.05
    assert falling[-1] < falling[0] - 0.05


async def test_weights_lie_on_the_bus_before_they_are_announced(world: World):
    config = msgspec.structs.replace(
        world.config(),
        model=ModelConfig(path=str(world.policy), max_model_len=128, dtype="bfloat16"),
        server=ServerConfig(weights="bus"),
    )
    async with world.running(world.role(config)):
        for number in range(3):
            await world.round(number)
            await world.until(lambda batch, number=number: batch.round == number)
    policies = await world.events(PolicyPublished)
    assert [one.uri for one in policies] == [f"bus:weights.whole.0-{step}" for step in range(4)]
    for policy in policies[1:]:
        info = await world.bus.blobs.info(policy.uri.removeprefix("bus:"))
        assert (info.sha256, info.size) == (policy.sha256, policy.size)


@pytest.mark.slow
async def test_same_events_same_weights(world: World, policy: Path, tmp_path: Path):
    other = World(policy, tmp_path / "other")
    for one in (world, other):
        async with one.running(one.role()):
            await one.round(0, designers=2)
            await one.round(1, final=True)
            await one.until(lambda batch: batch.final)
    ours, theirs = await world.events(PolicyPublished), await other.events(PolicyPublished)
    assert [one.sha256 for one in ours] == [one.sha256 for one in theirs]
    assert len({one.sha256 for one in ours}) == 3


async def test_stale_and_lost_samples_are_dropped_with_their_cause(world: World):
    config = world.config(agent=RoleTraining(max_staleness=0))
    async with world.running(world.role(config)):
        await world.round(0)
        await world.until(lambda batch: batch.round == 0)
        fresh = sample("fresh", round_=1, versions=[Version(0, 1)])
        stale = sample("stale", round_=1, versions=[Version(0, 1), Version(0, 0)])
        lost = sample("lost", round_=1, versions=[Version(0, 1)])
        one, other, _, closed = round_of(1, [fresh, stale, lost])
        await world.send(one, other, closed)
        batch = await world.until(lambda batch: batch.round == 1)
    assert batch.trained == (sampled(fresh).sample,)
    assert dict(batch.dropped) == {sampled(stale).sample: "stale", sampled(lost).sample: "lost"}


async def test_a_repeated_round_gets_the_same_answer(world: World):
    async with world.running(world.role()) as role:
        await world.round(0)
        first = await world.until(lambda batch: batch.round == 0)
        world.bus._broker.logs["SAMPLE"].ids.clear()
        world.bus._broker.logs["EVENT"].ids.clear()
        await world.round(0)
        again = await world.until(lambda batch, seen=[]: seen.append(batch) or len(seen) == 2)
        late = role.statistics()["late"]
    assert again == first
    assert late == 4
    assert len(await world.events(PolicyPublished)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["_checkpoint", "publish", "_purge"])
async def test_killed_around_the_checkpoint_trains_exactly_once(
    world: World, policy: Path, tmp_path: Path, moment: str
):
    """Before the checkpoint the step is taken again; after it, it is only announced."""
    calm = World(policy, tmp_path / "calm")
    await calm.round(0)
    await calm.round(1, final=True)
    async with calm.running(calm.role()):
        await calm.until(lambda batch: batch.final)

    await world.round(0)
    await world.killed(world.role(), moment)
    await world.round(1, final=True)
    async with world.running(world.role()):
        await world.until(lambda batch: batch.final)
    batches = await world.surviving()
    assert [batch.trained for batch in batches] == [batch.trained for batch in await calm.surviving()]
    names = [name for batch in batches for name in batch.trained]
    assert len(names) == len(set(names)) == 8
    newest, expected = await world.newest(), await calm.newest()
    assert newest.step == 2
    assert newest.sha256 == expected.sha256
    assert Version.unpack(newest.version).fence == (1 if moment == "publish" else 0)


async def test_between_checkpoints_a_restart_forks_the_lineage(world: World):
    config = world.config(checkpoint_every=2)
    await world.round(0)
    await world.round(1)
    await world.round(2)
    role = world.role(config)

    async def trained_and_kept() -> None:
        await world.until(lambda batch: batch.round == 2)
        await world.kept(2)

    await world.interrupted(role, trained_and_kept)
    await world.round(3, final=True)
    async with world.running(world.role(config)):
        await world.until(lambda batch: batch.final)
    versions = [Version.unpack(one.version) for one in await world.events(PolicyPublished)]
    assert versions == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (1, 4)]
    batches = await world.surviving()
    assert [Version.unpack(batch.version) for batch in batches] == [(0, 1), (1, 2), (1, 3), (1, 4)]
    names = [name for batch in batches for name in batch.trained]
    assert len(names) == len(set(names)) == 16
    assert batches[2].max_staleness == 2
    policies = await world.events(PolicyPublished)
    assert policies[3].sha256 == policies[5].sha256


@pytest.mark.slow
async def test_a_damaged_checkpoint_costs_steps_and_no_samples(world: World):
    """The older checkpoint is there to go back to: the stream still holds what came after it."""
    for number in range(3):
        await world.round(number)
    await world.interrupted(world.role(), lambda: world.kept(3))
    damaged = max((world.directory / "learner" / "checkpoints").iterdir())
    (damaged / "model.safetensors").write_bytes(b"torn")
    await world.round(3, final=True)
    async with world.running(world.role()):
        await world.until(lambda batch: batch.final)
    batches = await world.surviving()
    assert [batch.round for batch in batches] == [0, 1, 2, 3]
    names = [name for batch in batches for name in batch.trained]
    assert len(names) == len(set(names)) == 16


async def test_samples_that_are_gone_are_told(world: World):
    await world.round(0)
    await world.round(1, final=True)
    await world.bus.purge("SAMPLE", below=6)
    with capture_logs() as logs:
        async with world.running(world.role()):
            await world.until(lambda batch: batch.final)
    (told,) = [entry for entry in logs if entry["event"] == "learner.samples_gone"]
    assert (told["log_level"], told["first"], told["last"]) == ("error", 1, 5)


async def test_a_drain_keeps_what_waits_for_its_round(world: World):
    early = random_samples(3, seed=9, round_=1)
    async with world.running(world.role()):
        await world.round(0)
        await world.send(*map(sampled, early))
        await world.until(lambda batch: batch.round == 0)
        info = await world.bus.stream_info("SAMPLE")
    assert info.messages >= 3
    async with world.running(world.role()):
        await world.send(round_of(1, early, final=True)[-1])
        batch = await world.until(lambda batch: batch.final)
    assert set(batch.trained) == {sampled(one).sample for one in early}
    assert Version.unpack(batch.version) == (0, 2)
    assert (await world.bus.stream_info("SAMPLE")).messages == 3 + 1, "what the older checkpoint needs"


async def test_a_displaced_learner_cannot_publish(world: World):
    with pytest.raises(SpadeError, match="taken over"):  # noqa: PT012
        async with world.running(world.role()):
            await world.until(lambda _: True, PolicyPublished)
            await world.bus.state_put("learner", b"somebody else")
            await world.round(0)
            await anyio.sleep_forever()
    assert len(await world.events(PolicyPublished)) == 1


async def test_the_best_checkpoint_stays(world: World):
    """Evaluations come a while after their version; the one of step 2 is the best."""
    config = msgspec.structs.replace(
        world.config(checkpoints_kept=1, best_by="mid", agent=RoleTraining(max_staleness=9)),
        evaluator=EvaluatorConfig(every=2, suites=(SuiteConfig(name="mid", source="seeds:mid"),)),
    )
    async with world.running(world.role(config)):
        for number in range(7):
            await world.round(number)
            await world.until(lambda batch, number=number: batch.round == number)
            if number in (2, 4, 6):
                win = {2: 0.6, 4: 0.5, 6: 0.4}[number]
                await world.send(evaluation("hard", number, 0.9), evaluation("mid", number, win))
    directory = world.directory / "learner" / "checkpoints"
    best = msgspec.json.decode((directory / "best.json").read_bytes())
    assert best["score"] == 0.6
    steps = sorted(int(path.name.split("-")[1]) for path in directory.iterdir() if path.is_dir())
    assert steps == [2, 7]
    assert int(best["checkpoint"].split("-")[1]) == 2


async def test_the_curriculum_lies_in_the_checkpoint(world: World):
    from engine.training.checkpoint import newest
    from roles.scorer.snapshot import ScorerSnapshot, Snapshots

    snapshots = Snapshots(world.bus, world.directory)
    async with world.running(world.role()):
        await world.until(lambda _: True, PolicyPublished)
        await snapshots.save(ScorerSnapshot("test", 1, b"where the curriculum is"))
        await world.round(0, final=True)
        await world.until(lambda batch: batch.final)
    found = newest(world.directory / "learner" / "checkpoints")
    assert found is not None
    assert found.state.curriculum == 1
    kept = (found.path / "curriculum.snapshot").read_bytes()
    assert kept == (world.directory / "scorer.snapshot").read_bytes()


async def test_a_step_that_outlives_the_lease_is_not_kept(world: World, monkeypatch: pytest.MonkeyPatch):
    role = world.role()
    real = role._summary

    def too_late(*arguments: Any) -> Any:
        role._lease.lost.set()
        return real(*arguments)

    monkeypatch.setattr(role, "_summary", too_late)
    with pytest.raises(SpadeError, match="lost its lease"):  # noqa: PT012
        async with world.running(role):
            await world.round(0)
            await anyio.sleep_forever()
    assert len(await world.events(PolicyPublished)) == 1
    assert not (world.directory / "learner" / "checkpoints").exists()


async def test_a_lost_lease_ends_it(world: World, monkeypatch: pytest.MonkeyPatch):
    role, held = world.role(), []
    real = role.bus.lease

    @asynccontextmanager
    async def lease(name: str) -> AsyncIterator[Any]:
        async with real(name) as right:
            held.append(right)
            yield right

    monkeypatch.setattr(role.bus, "lease", lease)
    with pytest.raises(SpadeError, match="lost its lease"):  # noqa: PT012
        async with world.running(role):
            await world.until(lambda _: True, PolicyPublished)
            held[0].lost.set()
            await anyio.sleep_forever()


def test_versions_after_a_start():
    first = Lineage()
    assert resume(Version(0, 0), None, first, None) == (Version(0, 0), first)
    assert resume(Version(0, 4), Version(0, 4), first, None) == (Version(0, 4), first)
    assert resume(Version(0, 4), Version(0, 4), first, Version(0, 4)) == (Version(0, 4), first)
    ahead = resume(Version(0, 4), Version(0, 3), first, Version(0, 3))
    behind = resume(Version(0, 4), Version(0, 6), first, Version(0, 6))
    unseen = resume(Version(0, 4), Version(0, 4), first, Version(0, 5))
    assert ahead == behind == unseen == (Version(1, 4), Lineage().fork(1, 4))
    twice = resume(Version(0, 4), Version(1, 5), Lineage().fork(1, 4), Version(1, 5))
    assert twice == (Version(2, 4), Lineage().fork(1, 4).fork(2, 4))
    assert resume(Version(0, 0), Version(0, 2), first, Version(0, 2))[0] == Version(1, 0)
    assert resume(Version(0, 4), Version(0, 4), first, Version(2, 4))[0] == Version(3, 4)


async def test_versions_count_batches_and_the_archive_outlives_a_restart(world: World):
    config = world.config(
        steps_per_batch=2,
        minibatches=True,
        supervised_mix=0.5,
        supervised_samples=3,
        supervised_source="accepted",
        checkpoint_every=1,
    )
    designs = [
        one._replace(credit=msgspec.structs.replace(one.credit, accepted=number < 2, members=4))
        for number, one in enumerate(random_samples(4, seed=9, role="designer", round_=1))
    ]
    async with world.running(world.role(config)) as role:
        await world.round(0)
        await world.send(*round_of(1, [*random_samples(3, seed=2, round_=1), *designs]))
        await world.until(lambda batch: batch.round == 1)
        assert role._trainer.state.global_step == 4
    async with world.running(world.role(config)) as role:
        await world.round(2, final=True)
        await world.until(lambda batch: batch.final)
        assert role._trainer.state.global_step == 6
    first, second, third = await world.surviving()
    assert [batch.step for batch in (first, second, third)] == [1, 2, 3]
    assert third.max_staleness == 2
    assert {batch.metrics["optimizer_steps"] for batch in (first, second, third)} == {2.0}
    learned = sum(segment.sampled for one in designs[:2] for segment in one.segments)
    assert [batch.metrics["supervised_tokens"] for batch in (first, second, third)] == [0, learned, learned]
    versions = [Version.unpack(one.version) for one in await world.events(PolicyPublished)]
    assert versions[-1] == Version(0, 3)


async def test_experts_of_samples_are_replayed_and_those_that_do_not_fit_are_dropped(tmp_path: Path):
    world = World(write_model(tmp_path / "model", "qwen3_moe"), tmp_path)  # two layers, two of four experts
    samples = random_samples(3, seed=1)
    for number, row in enumerate((b"\0\1\2\3", b"\0\1\2\4")):
        (part,) = samples[number].segments
        routed = msgspec.structs.replace(part, experts=row * (len(part) - 1))
        samples[number] = samples[number]._replace(segments=(routed,))
    async with world.running(world.role(world.config(router_replay=True))):
        await world.send(*round_of(0, samples, final=True))
        batch = await world.until(lambda batch: batch.final)
    assert batch.agent_samples == 2
    assert [cause for _, cause in batch.dropped] == ["malformed"]
    assert 0 < batch.metrics["router_mismatch"] <= 1


async def test_adapters_are_announced_and_a_restart_gives_them_other_names(
    world: World, tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    learner = world.config(
        lora=LoraConfig(rank=4, alpha=8.0, publish="adapter"),
        optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.0),
        checkpoint_every=100,
    )
    config = msgspec.structs.replace(learner, server=ServerConfig(weights="bus"))
    await world.round(0)
    await world.interrupted(world.role(config), lambda: world.until(lambda batch: batch.round == 0))
    async with world.running(world.role(config)):
        await world.until(lambda batch: batch.version == Version(1, 1).pack())
    published = await world.events(PolicyPublished)
    versions = [Version.unpack(policy.version) for policy in published]
    assert versions == [Version(0, 0), Version(0, 1), Version(1, 0), Version(1, 1)]
    names = [adapters.name("test", policy.version) for policy in published]
    assert len(set(names)) == 4, "what is trained again has a name of its own"
    for policy, version in zip(published, versions, strict=True):
        assert policy.uri == f"bus:weights.whole.{version.fence}-{version.step}"
        assert policy.size < 100_000, "the adapter alone"
    newest = tmp_path / "adapters" / f"{versions[-1].fence}-{versions[-1].step}" / "adapter_model.safetensors"
    await world.bus.blobs.save(published[-1].uri.removeprefix("bus:"), tmp_path / "fetched")
    assert store.file_digest(tmp_path / "fetched") == store.file_digest(newest) == published[-1].sha256
    assert all(".lora_" in name for name in load_file(newest))
