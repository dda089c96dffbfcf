"""A learner that does not find the checkpoints of its run: it says so, and touches nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import anyio
import pytest
from learner_fakes import random_samples, round_of
from learner_stub import StubWorld, without_model
from structlog.testing import capture_logs

from bus.messages import PolicyPublished
from engine.config import RoleTraining
from engine.lineage import Version
from roles.learner.version_claim import CheckpointsMissing, missing

__all__ = ["without_model"]
pytestmark = [pytest.mark.usefixtures("without_model"), pytest.mark.timeout(120)]


@pytest.fixture
def world(tmp_path: Path) -> StubWorld:
    return StubWorld(tmp_path, agent=RoleTraining(max_staleness=99))


async def trained(world: StubWorld, first: int, last: int) -> None:
    for number in range(first, last + 1):
        await world.send(*round_of(number, random_samples(2, seed=number, round_=number)))
    await world.interrupted(world.role(), lambda: world.until(lambda batch: batch.round == last))


async def refused(world: StubWorld, **learner: object) -> CheckpointsMissing:
    with pytest.raises(CheckpointsMissing) as caught:
        async with world.running(world.role(**learner)):
            await anyio.sleep_forever()
    return caught.value


async def test_it_refuses_to_begin_anew(world: StubWorld):
    await trained(world, 0, 4)
    await world.kept(5)
    (world.directory / "learner").rename(world.directory / "elsewhere")
    before = await world.bus.stream_info("SAMPLE")
    for _ in range(2):
        error = await refused(world)
    assert "has published version 5, has written checkpoints" in str(error)
    assert str(world.directory / "learner" / "checkpoints") in error.where
    assert "learner.start_over=true" in error.remedy
    assert error.exit_code == 2, "a supervisor does not try again"
    assert await world.bus.stream_info("SAMPLE") == before
    assert len(await world.events(PolicyPublished)) == 1 + 5


async def test_an_early_checkpoint_counts(world: StubWorld):
    """A drain writes one long before it is due."""
    world.learner["checkpoint_every"] = 100
    await world.send(*round_of(0, random_samples(2, seed=0, round_=0)))
    async with world.running(world.role()):
        await world.until(lambda batch: batch.round == 0)
    shutil.rmtree(world.directory / "learner")
    await refused(world)


async def test_a_crash_before_the_first_checkpoint_begins_anew(world: StubWorld):
    world.learner["checkpoint_every"] = 100
    await trained(world, 0, 4)
    await trained(world, 5, 5)
    last = await world.newest()
    assert Version.unpack(last.version) == (1, 6)
    world.learner["checkpoint_every"] = 2
    await trained(world, 6, 6)
    assert Version.unpack((await world.newest()).version) == (2, 7)


async def test_starting_over_has_to_be_asked_for(world: StubWorld):
    await trained(world, 0, 4)
    await world.kept(5)
    (world.directory / "learner").rename(world.directory / "elsewhere")
    await world.send(*round_of(5, random_samples(2, seed=5, round_=5), final=True))
    with capture_logs() as logs:
        async with world.running(world.role(start_over=True)):
            await world.until(lambda batch: batch.final)
    assert [entry["published"] for entry in logs if entry["event"] == "learner.starts_over"] == ["5"]
    policies = [Version.unpack(one.version) for one in await world.events(PolicyPublished)]
    assert policies[6] == (1, 0)
    assert policies[-1].fence == 1


def test_who_should_have_found_a_checkpoint():
    assert not missing(None, None, every=1)
    assert not missing(None, Version(0, 4), every=5)
    assert missing(None, Version(0, 5), every=5)
    assert not missing(False, Version(0, 5), every=5)
    assert missing(True, Version(0, 1), every=5)
