"""A learner that dies between two checkpoints: no number of a version is used for two sets of weights."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from learner_fakes import random_samples, round_of
from learner_scene import Killed
from learner_stub import StubLearner, StubTrainer, StubWorld, without_model

from bus.messages import BatchTrained, PolicyPublished
from engine.config import RoleTraining
from engine.errors import SpadeError
from engine.lineage import Lineage, Version
from engine.training.checkpoint import places
from roles.learner.version_claim import CLAIM, ClaimNote, VersionClaim

__all__ = ["without_model"]
pytestmark = [pytest.mark.usefixtures("without_model"), pytest.mark.timeout(120)]


@pytest.fixture
def world(tmp_path: Path) -> StubWorld:
    return StubWorld(tmp_path, checkpoint_every=2)


async def rounds(world: StubWorld, *numbers: int, final: bool = False) -> None:
    for number in numbers:
        samples = random_samples(2, seed=number, round_=number)
        await world.send(*round_of(number, samples, final=final and number == numbers[-1]))


def die_at(
    world: StubWorld, role: StubLearner, moment: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End the process when ``role`` comes to ``moment`` with the version of ``step``, with a checkpoint."""

    def there() -> bool:
        return role._version.step == step

    if moment in ("before the note", "after the note"):
        real, dead = role.bus.state_update, anyio.Event()

        async def update(key: str, value: bytes, revision: int) -> int:
            note = msgspec.json.decode(value, type=ClaimNote) if key == CLAIM else None
            here = note is not None and Version.unpack(note.version).step == step
            if dead.is_set():
                await anyio.sleep_forever()
            if here and step == 3:
                await world.kept(2)
            if here:
                dead.set()
            if here and moment == "before the note":
                raise Killed
            found = await real(key, value, revision)
            if here:
                raise Killed
            return found

        monkeypatch.setattr(role.bus, "state_update", update)
    elif moment == "after the export":
        export = role._export

        def exported() -> Any:
            found = export()
            if there():
                raise Killed
            return found

        monkeypatch.setattr(role, "_export", exported)
    elif moment in ("in the upload", "after the upload"):

        async def upload(*_: Any) -> None:
            if there():
                raise Killed

        monkeypatch.setattr("engine.weights.publisher.FilePublisher.upload", upload)
    else:
        publish = role.bus.publish
        kind = PolicyPublished if "policy" in moment else BatchTrained

        async def published(message: Any) -> int:
            here = isinstance(message, kind) and message.step == step
            if here:
                await world.kept(2)
            if here and moment.startswith("before"):
                raise Killed
            found = await publish(message)
            if here:
                raise Killed
            return found

        monkeypatch.setattr(role.bus, "publish", published)


MOMENTS = (
    "before the note",
    "after the note",
    "after the export",
    "in the upload",
    "before the policy",
    "after the policy",
    "before the batch",
    "after the batch",
)


@pytest.mark.parametrize("step", [2, 3])
@pytest.mark.parametrize("moment", MOMENTS)
async def test_weights_that_differ_after_a_restart_get_numbers_of_their_own(
    world: StubWorld, moment: str, step: int, monkeypatch: pytest.MonkeyPatch
):
    """Step 2 has a checkpoint, step 3 has none."""
    role = world.role()
    die_at(world, role, moment, step, monkeypatch)
    await rounds(world, 0, 1, 2)
    with pytest.raises(Killed):
        async with world.running(role):
            await anyio.sleep_forever()
    monkeypatch.undo()
    monkeypatch.setattr("engine.models.resolve", lambda *_: world.directory)
    monkeypatch.setattr("engine.inference.tokens.tokenizer_digest", lambda _: "digest")
    await rounds(world, 3, final=True)
    async with world.running(world.role(noise=0.25)):
        last = await world.until(lambda batch: batch.final)
    assert last.step == 4
    digests: dict[int, set[str]] = {}
    for policy in await world.events(PolicyPublished):
        digests.setdefault(policy.version, set()).add(policy.sha256)
    assert all(len(found) == 1 for found in digests.values())
    on = MOMENTS.index(moment) > MOMENTS.index("before the policy") if step == 2 else moment == MOMENTS[0]
    assert Version.unpack(last.version).fence == (0 if on else 1)


async def test_a_checkpoint_that_is_being_written_stops_nothing_and_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The learner trains on and publishes meanwhile; killed, it goes back to the one before."""
    world = StubWorld(tmp_path, checkpoint_every=2, agent=RoleTraining(max_staleness=9))
    unfinished: Future[None] = Future()
    write = StubTrainer.write_checkpoint

    def slow(trainer: StubTrainer, directory: Path) -> Future[None]:
        return unfinished if float(trainer.weight[0]) == 4 else write(trainer, directory)

    await rounds(world, 0, 1, 2, 3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(StubTrainer, "write_checkpoint", slow)
        await world.interrupted(world.role(), lambda: world.until(lambda batch: batch.round == 4))
    await world.kept(2)
    assert len(places(world.directory / "learner" / "checkpoints")) == 1
    await rounds(world, 5, final=True)
    async with world.running(world.role(noise=0.25)):
        last = await world.until(lambda batch: batch.final)
    unfinished.set_exception(OSError("killed"))
    assert Version.unpack(last.version) == (1, 6)
    again = [
        batch.round for batch in await world.events(BatchTrained) if batch.version > Version(1, 0).pack()
    ]
    assert again == [1, 2, 3, 4, 5], "the checkpoint's own batch is announced again"


async def test_a_publication_that_fails_ends_the_learner_in_the_middle_of_a_batch(
    world: StubWorld, monkeypatch: pytest.MonkeyPatch
):
    """A batch in hand is finished at a drain only."""
    writing: Future[None] = Future()
    write = StubTrainer.write_weights

    def failing(trainer: StubTrainer, path: Path, dtype: Any = None) -> Future[None]:
        return writing if float(trainer.weight[0]) == 1 else write(trainer, path, dtype)

    role = world.role()
    train = role._train

    async def endless(selection: Any, message: Any) -> dict[str, float]:
        if message.round == 0:
            return await train(selection, message)
        writing.set_exception(OSError("the disk is gone"))
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(StubTrainer, "write_weights", failing)
    monkeypatch.setattr(role, "_train", endless)
    await rounds(world, 0, 1)
    with pytest.raises(OSError, match="the disk is gone"):
        async with world.running(role):
            await anyio.sleep_forever()


async def test_a_clean_drain_goes_on_under_the_same_fence(world: StubWorld):
    await rounds(world, 0, 1, 2)
    async with world.running(world.role()):
        await world.until(lambda batch: batch.round == 2)
    await rounds(world, 3, final=True)
    async with world.running(world.role(noise=0.25)):
        last = await world.until(lambda batch: batch.final)
    assert Version.unpack(last.version) == (0, 4)


async def test_a_number_that_a_predecessor_notes_at_the_last_moment_is_not_used_again(
    world: StubWorld, monkeypatch: pytest.MonkeyPatch
):
    """It read before, and writes after: its compare-and-set has to fail, or ours."""
    old, new = VersionClaim(world.bus, lease=1), VersionClaim(world.bus, lease=2)
    await old.take(Version(0, 2), Version(0, 2), Lineage())
    real = world.bus.state_put

    async def late(key: str, value: bytes) -> int:
        monkeypatch.undo()
        await old.renew(Version(0, 3))
        return await real(key, value)

    monkeypatch.setattr(world.bus, "state_put", late)
    version, lineage = await new.take(Version(0, 2), Version(0, 2), Lineage())
    assert (version, lineage) == (Version(1, 2), Lineage().fork(1, 2))
    with pytest.raises(SpadeError, match="taken over"):
        await old.renew(Version(0, 4))
