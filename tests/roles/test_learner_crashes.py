"""A learner that dies between two checkpoints: no number of a version is used for two sets of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from learner_fakes import random_samples, round_of
from learner_scene import Killed
from learner_stub import StubLearner, StubWorld, without_model

from bus.messages import BatchTrained, PolicyPublished
from engine.errors import SpadeError
from engine.lineage import Lineage, Version
from roles.learner.version_claim import VersionClaim

__all__ = ["without_model"]
pytestmark = [pytest.mark.usefixtures("without_model"), pytest.mark.timeout(120)]


@pytest.fixture
def world(tmp_path: Path) -> StubWorld:
    return StubWorld(tmp_path, checkpoint_every=2)


async def rounds(world: StubWorld, *numbers: int, final: bool = False) -> None:
    for number in numbers:
        samples = random_samples(2, seed=number, round_=number)
        await world.send(*round_of(number, samples, final=final and number == numbers[-1]))


def die_at(role: StubLearner, moment: str, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the process when ``role`` comes to ``moment`` with the version of ``step``."""

    def there() -> bool:
        return role._version.step == step

    if moment in ("before the note", "after the note"):
        real = role.bus.state_update

        async def update(key: str, value: bytes, revision: int) -> int:
            if there() and moment == "before the note":
                raise Killed
            found = await real(key, value, revision)
            if there():
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
            if isinstance(message, kind) and there() and moment.startswith("before"):
                raise Killed
            found = await publish(message)
            if isinstance(message, kind) and there():
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
    die_at(role, moment, step, monkeypatch)
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
