"""Shares of the learner's time: of simulated rounds they are the known ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine.training.time_shares import TimeShares
from engine.views.overview import learner_shares


@pytest.mark.parametrize(
    ("train", "publish", "generate", "checkpoint"),
    [(82.0, 97.0, 64.0, 0.0), (131.0, 13.0, 40.0, 40.0), (33.0, 13.0, 300.0, 0.0)],
)
def test_a_simulated_round_has_the_known_shares(
    train: float, publish: float, generate: float, checkpoint: float
) -> None:
    """A round's plays take ``generate`` seconds and begin when the version before is published."""
    now, shares = 1000.0, TimeShares(1000.0)
    played = now + generate
    for _ in range(3):
        now = max(now, played)
        waited = now - (played - generate)
        shares.begin("training", now)
        now += train
        if checkpoint:
            shares.begin("checkpoints", now)
            now += checkpoint
        shares.begin("publishing", now)
        now += publish
        found = shares.end_round(now)
        played = now + generate
        whole = waited + train + publish + checkpoint
        assert found["share_waiting"] == pytest.approx(waited / whole)
        assert found["share_training"] == pytest.approx(train / whole)
        assert found["share_publishing"] == pytest.approx(publish / whole)
        assert found.get("share_checkpoints", 0.0) == pytest.approx(checkpoint / whole)


def test_they_stand_in_the_status() -> None:
    shares = TimeShares(0.0)
    shares.begin("training", 1.0)
    gauges = {"scorer": {"round": 3.0}, "learner/learner-0": {"round": 3.0} | shares.end_round(4.0)}
    assert learner_shares(SimpleNamespace(gauges=gauges)) == "training 75%, waiting 25%"  # type: ignore[arg-type]
    assert learner_shares(SimpleNamespace(gauges={})) == "-"  # type: ignore[arg-type]
