"""What a learner says of itself beside its weights: who serves them compares it (``handshake``)."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from engine.lineage import Version
from engine.weights.publisher import Release
from roles.learner.role import LearnerRole


def test_a_policy_names_the_learners_vocabulary_and_tokenizer() -> None:
    release = Release("file:///w", "0" * 64, 8)
    learner = SimpleNamespace(
        config=SimpleNamespace(adapters=False),
        _version=Version(1, 2),
        _publisher=SimpleNamespace(release=lambda *_, **__: release),
        _trainer=SimpleNamespace(weights=dict, canary=lambda tokens: np.zeros(len(tokens) - 1, "<f4")),
        _dtype=lambda: None,
        _canary=(3, 4, 5),
        _vocabulary_size=1113,
        _tokenizer="ab" * 32,
    )
    policy, _ = LearnerRole._export(learner)
    assert (policy.vocabulary, policy.tokenizer) == (1113, "ab" * 32)
    assert policy.version == Version(1, 2).pack()
