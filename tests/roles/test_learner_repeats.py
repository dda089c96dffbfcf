"""A learner that trains again what it trained before it died: nothing since the checkpoint is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from learner_fakes import round_of, sample, sampled
from learner_stub import StubLearner, StubWorld, without_model

from bus.messages import BatchTrained, RoundClosed
from engine.config import RoleTraining
from engine.lineage import Version
from engine.training.samples import CreditedSample

__all__ = ["without_model"]
pytestmark = [pytest.mark.usefixtures("without_model"), pytest.mark.timeout(120)]
EVERY, LAST = 8, 15


@pytest.fixture
def world(tmp_path: Path) -> StubWorld:
    return StubWorld(tmp_path, checkpoint_every=EVERY, agent=RoleTraining(max_staleness=4))


async def play(world: StubWorld, first: int, last: int, *, final: bool = False) -> None:
    """Rounds whose plays were sampled by the first life, up to two versions before the batch."""
    for round_ in range(first, last + 1):
        samples = [play_of(round_, lag) for lag in (0, 1, 2)]
        await world.send(*round_of(round_, samples, final=final and round_ == last))


def play_of(round_: int, lag: int) -> CreditedSample:
    version = Version(0, max(0, round_ - lag))
    return sample(f"{round_}-{lag}", round_=round_, versions=[version])


def drained_after(role: StubLearner, round_: int) -> StubLearner:
    close = role._close

    async def closed(sequence: int, message: RoundClosed) -> None:
        await close(sequence, message)
        if message.round == round_:
            role.context.draining.set()

    role._close = closed  # type: ignore[method-assign]
    return role


async def trained(world: StubWorld, fence: int) -> list[BatchTrained]:
    return [one for one in await world.events(BatchTrained) if Version.unpack(one.version).fence == fence]


async def test_the_batches_since_the_checkpoint_are_trained_again(world: StubWorld):
    await play(world, 0, LAST - 1)
    await world.interrupted(world.role(), lambda: world.until(lambda batch: batch.round == LAST - 1))
    await play(world, LAST, LAST + 1, final=True)
    async with world.running(world.role(noise=0.25)):
        await world.until(lambda batch: batch.final)
    batches = [one for one in await trained(world, 1) if one.trained and one.round >= EVERY]
    assert [one.round for one in batches] == list(range(EVERY, LAST + 2))
    assert [one.dropped for one in batches] == [()] * len(batches)
    assert [len(one.trained) for one in batches] == [3] * len(batches)
    assert max(one.max_staleness for one in batches) <= 4


async def test_a_drain_while_it_repeats_changes_nothing(world: StubWorld):
    """The checkpoint of the drain keeps how far the first branch is shared, and what it trained beyond."""
    await play(world, 0, LAST - 1)
    await world.interrupted(world.role(), lambda: world.until(lambda batch: batch.round == LAST - 1))
    role = drained_after(world.role(), EVERY + 2)
    async with world.running(role):
        await role.context.draining.wait()
    assert role._ages.state().shared == {0: EVERY + 3}
    await play(world, LAST, LAST, final=True)
    async with world.running(world.role()) as role:
        await world.until(lambda batch: batch.final)
    batches = [one for one in await trained(world, 1) if one.round >= EVERY]
    assert {one.round for one in batches} == set(range(EVERY, LAST + 1))
    assert [one.dropped for one in batches] == [()] * len(batches)


async def test_two_crashes_the_second_while_it_repeats(world: StubWorld):
    await play(world, 0, LAST - 1)
    await world.interrupted(world.role(), lambda: world.until(lambda batch: batch.round == LAST - 1))
    await world.interrupted(
        world.role(), lambda: world.until(lambda one: one.version == Version(1, EVERY + 3).pack())
    )
    await play(world, LAST, LAST, final=True)
    async with world.running(world.role()):
        await world.until(lambda batch: batch.final)
    batches = [one for one in await trained(world, 2) if one.round >= EVERY]
    assert [one.round for one in batches] == list(range(EVERY, LAST + 1))
    assert [one.dropped for one in batches] == [()] * len(batches)


async def test_what_cannot_be_repeated_keeps_its_distance(world: StubWorld):
    """A sample of the second batch is gone: from there on it is another branch."""
    await play(world, 0, LAST - 1)
    await world.interrupted(world.role(), lambda: world.until(lambda batch: batch.round == LAST - 1))
    broker = world.bus._broker.logs["SAMPLE"]
    gone = [sequence for sequence, one in broker.messages.items() if one.tail.endswith(f".{EVERY + 1}-0")]
    for sequence in gone:
        del broker.messages[sequence]
    await play(world, LAST, LAST, final=True)
    async with world.running(world.role()):
        await world.until(lambda batch: batch.final)
    assert len(gone) == 1
    batches = {one.round: one for one in await trained(world, 1)}
    assert [len(batches[EVERY + index].trained) for index in (0, 1, 2)] == [3, 2, 3]
    assert [batches[EVERY + index].max_staleness for index in (2, 3, 4)] == [1 + 1, 2 + 2, 3 + 1]
    assert batches[EVERY + 4].trained == (sampled(play_of(EVERY + 4, 2)).sample,)
    assert not batches[LAST].trained
    assert {cause for _, cause in batches[LAST].dropped} == {"stale"}
