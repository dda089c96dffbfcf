"""Learning rate 0 on the real stack: the trainer scores the tokens as the server that sampled them did."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from nano_runs import ended, facts, nothing_left, output, start, surviving

from bus.messages import PolicyPublished

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
STEPS = 20


async def test_without_a_learning_rate_nothing_moves(tmp_path: Path) -> None:
    """bf16 in the trainer, float32 in the server, and a KL term towards the starting policy."""
    run = start(
        tmp_path,
        f"run.steps={STEPS}",
        'run.roles=["designer", "agent", "scorer", "learner", "server"]',
        "curriculum.environments=6",
        "learner.optimizer.learning_rate=0",
        "learner.kl=0.01",
        "learner.supervised_mix=0",
        "learner.checkpoint_every=100",
        "ui.report=false",
    )
    try:
        assert await ended(run) == 0, output(tmp_path)
    finally:
        run.kill()
    await nothing_left(tmp_path)

    messages = [message for _, message in await facts(tmp_path)]
    policies = [message for message in messages if isinstance(message, PolicyPublished)]
    batches = [batch for batch in surviving(messages) if batch.trained]
    assert len(batches) >= STEPS - 2, "rounds without any difference between plays are rare"
    assert policies[-1].step == batches[-1].step == len(batches)
    assert len({policy.sha256 for policy in policies}) == 1, "no weight has moved"

    means = np.array([batch.metrics["ratio_mean"] for batch in batches])
    assert np.abs(means - 1.0).max() < 0.02, means
    steps = np.arange(len(means))
    slope, _ = np.polyfit(steps, means, 1)
    scatter = means.std() * np.sqrt(12 / len(means)) / len(means)
    assert abs(slope) < 4 * scatter + 1e-6, (slope, scatter)
    assert max(batch.metrics["kl"] for batch in batches) < 1e-3
    assert max(batch.metrics["behaviour_kl"] for batch in batches) < 1e-3
    assert max(batch.metrics["clip_fraction"] for batch in batches) == 0.0
    assert sum(batch.designer_samples for batch in batches) > 0
