"""What is published as an adapter is what peft loads, and computes what the learner computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_fakes import VOCABULARY, random_samples

from engine.config import LearnerConfig, LoraConfig, OptimizerConfig, RoleTraining
from engine.lineage import Version
from engine.training.batch import build, policy_rows
from engine.weights.adapters import CONFIG_NAME, AdapterPublisher

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
TOKENS = tuple(range(3, 40, 3))


def test_peft_loads_what_is_published(start: Callable[..., Any], policy: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    learner = LearnerConfig(
        lora=LoraConfig(rank=4, alpha=8.0, publish="adapter"),
        optimizer=OptimizerConfig(learning_rate=1e-2, weight_decay=0.0),
    )
    with start(learner) as running:
        publisher = AdapterPublisher(tmp_path, running.call(running.trainer.adapter_settings))
        expected = {}
        for step in range(3):
            if step:
                rows = policy_rows(random_samples(6, seed=step), {"agent": RoleTraining()}, 6)
                running.step(build(rows, micro_batch_tokens=100, padding=VOCABULARY - 2))
            publisher.release(Version(0, step), running.call(running.trainer.adapters))
            expected[step] = running.call(lambda: running.trainer.canary(TOKENS))
    assert max(abs(expected[1] - expected[0])) > 1e-3
    for step, canary in expected.items():
        home = tmp_path / f"0-{step}"
        settings = json.loads((home / CONFIG_NAME).read_text())
        assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 8.0, "LORA")
        assert settings["base_model_name_or_path"] is None, "no path of this machine travels"
        base = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, home).eval()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([TOKENS])).logits[0, :-1]
        found = torch.log_softmax(logits, -1).gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
        np.testing.assert_allclose(found.numpy(), canary, atol=1e-6)
