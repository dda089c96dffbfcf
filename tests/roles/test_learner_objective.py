"""The learner role with several steps a batch and with its own accepted designs mixed in."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from learner_fakes import make_policy, random_samples, round_of
from test_learner import World

from bus.messages import PolicyPublished
from engine.lineage import Version

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


async def test_versions_count_batches_and_the_archive_outlives_a_restart(tmp_path: Path):
    world = World(make_policy(tmp_path / "policy"), tmp_path / "run")
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
