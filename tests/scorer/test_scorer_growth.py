"""Weeks of rounds: what scorer and learner keep does not grow with the age of a run."""

from __future__ import annotations

import random

import msgspec
import pytest
from scenes.loop_cast import Luck
from scenes.loop_world import Loop
from scenes.scorer_world import config

ROUNDS = 500
LUCK = Luck(scorer_dies=0.002, learner_dies=0.002, server_lost=0.002, crashes=40)


class Sizes(Loop):
    """A loop that notes at each checkpoint how large the scorer's state and the buffer's part of it are."""

    def _save(self) -> None:
        super()._save()
        buffer = len(msgspec.msgpack.encode(self.checkpoint.buffer))
        self.noted.append((len(self.machine.snapshot()), buffer))
        self.checkpoint = msgspec.structs.replace(self.checkpoint, history=())
        self.history.clear()

    noted: list[tuple[int, int]]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["rolling", "epoch"])
def test_state_after_many_rounds_is_as_large_as_after_some(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The versions of the last 512 rounds are kept: with 32 the state is full-grown within this test.
    monkeypatch.setattr("roles.scorer.pacing._ROUNDS_KEPT", 32)
    recipe = config(
        steps=ROUNDS,
        curriculum={"schedule": schedule, "environments": 2, "delay": 3, "hinted_plays": 1, "lead": 1},
        learner={"agent": {"max_staleness": 2, "quota": 3}, "kl": 0.0},
    )
    Sizes.noted = []
    loop = Sizes(recipe, random.Random(4), LUCK, servers=2)
    loop.run(limit=200_000)
    noted = loop.noted
    assert len(noted) >= ROUNDS * 0.8
    assert loop.machine.state.closed == ROUNDS
    assert loop.counts["scorer died"] > 3
    assert loop.counts["learner died"] > 3
    third = len(noted) // 5
    for kind in (0, 1):
        early = max(sizes[kind] for sizes in noted[third : 2 * third])
        late = max(sizes[kind] for sizes in noted[-third:])
        assert late <= 1.2 * early, "flat but for the digits of counts and the forks of the lineage"
    assert len(loop.machine.state.progress.trained) == 32
    assert loop.buffer.state().kept == ()
