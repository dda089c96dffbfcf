"""What the trainer stands on in TRL and transformers: pinned, and noticed when it changes under us.

A fingerprint covers the code of a method without comments and blank lines. When one differs, read what
changed there, see whether ``PolicyTrainer`` and ``docs/loss.md`` still hold, and put the new one down.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
PINS = {"trl": "1.16.0", "transformers": "5.19.0"}
SIGNATURES = {
    "training_step": ["self", "model", "inputs", "num_items_in_batch"],
    "compute_loss": ["self", "model", "inputs", "return_outputs", "num_items_in_batch"],
    "get_train_dataloader": ["self"],
    "_prepare_inputs": ["self", "generation_batch"],
    "_send_telemetry": ["self"],
}
TRL = {
    "get_train_dataloader": "18c71214a8126df4",
    "training_step": "86f6549682897b55",
    "compute_loss": "db600aa8b9a65740",
    "_compute_loss": "ca05e13450c2377f",
    "_get_per_token_logps_and_entropies": "255e178d31aaa129",
    "_prepare_inputs": "105996e71043d0d5",
    "log": "ebc451cda81d5946",
}
TRANSFORMERS = {
    "_run_epoch": "7a0c349daf0e64a8",
    "_inner_training_loop": "277665033ca1c5ad",
    "training_step": "e2467067c437f344",
    "get_batch_samples": "25fd8c6dfed65d8b",
    "_maybe_log_save_evaluate": "bf5a0a1d7b3af9ca",
    "_clip_grad_norm": "2b3f6f44da32861b",
    "_get_grad_norm": "e3b1eea25980674a",
    "log": "4f2485ab718fe850",
}


def fingerprint(method: Callable[..., Any]) -> str:
    lines = (line.strip() for line in inspect.getsource(inspect.unwrap(method)).splitlines())
    code = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.blake2b(code.encode(), digest_size=8).hexdigest()


def parents() -> dict[str, Any]:
    import transformers

    from engine.training import trainer  # it keeps TRL from importing vLLM

    return {"trl": trainer.GRPOTrainer, "transformers": transformers.Trainer}


def test_the_versions_are_those_that_were_read():
    parents()
    import transformers
    import trl

    found = {"trl": trl.__version__, "transformers": transformers.__version__}
    assert found == PINS, "read the seams below in the new version before moving the pin"
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    needed = tomllib.loads(text)["project"]["dependencies"]
    assert "trl==1.16.*" in needed, "the recipe of an installation must not leave the pin"
    assert any(line.startswith("transformers>=") and line.endswith(",<5.20") for line in needed)


@pytest.mark.parametrize(
    ("package", "name", "known"),
    [("trl", *item) for item in TRL.items()] + [("transformers", *item) for item in TRANSFORMERS.items()],
)
def test_the_code_at_a_seam_is_what_was_read(package: str, name: str, known: str):
    found = fingerprint(getattr(parents()[package], name))
    assert found == known, f"{package} {PINS[package]} has another {name} than the one we stand on"


def test_what_we_override_is_called_as_before():
    from engine.training.trainer import PolicyTrainer

    parent = parents()["trl"]
    for name, names in SIGNATURES.items():
        assert name in vars(PolicyTrainer)
        assert list(inspect.signature(getattr(parent, name)).parameters) == names
    used = inspect.signature(parent._get_per_token_logps_and_entropies).parameters
    assert list(used)[:7] == [
        "self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"
    ]  # fmt: skip
    assert parent.loss_is_scaled_for_ga is True, "else transformers would divide our loss by micro-batches"


def test_what_we_read_and_set_is_there():
    source = inspect.getsource(parents()["transformers"])
    for seam in ("_globalstep_last_logged", "on_pre_optimizer_step", "current_gradient_accumulation_steps"):
        assert seam in source
    from trl.trainer.utils import add_fused_lm_head

    assert list(inspect.signature(add_fused_lm_head).parameters) == [
        "model", "temperature", "cast_lm_head_to_fp32", "outputs"
    ]  # fmt: skip
    code = inspect.getsource(parents()["trl"])
    for seam in ("self._metrics[", "self._step += 1", "self.ref_model", "self.beta", "fused_lm_head=True"):
        assert seam in code


def test_trl_does_not_import_vllm():
    """Its client of vLLM stays unused, and would cost every learner seconds at its start, and 180 MB."""
    parents()
    from trl.generation import vllm_client, vllm_generation

    assert not hasattr(vllm_client, "get_ip")
    assert not hasattr(vllm_generation, "LLM")


def test_every_setting_of_trls_loss_is_known():
    """A new field of GRPOConfig may be one that our loss does not heed: it would be accepted and ignored."""
    import transformers

    from engine.training.trainer import GRPOConfig

    own = {field.name for field in dataclasses.fields(GRPOConfig)}
    own -= {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    digest = hashlib.blake2b(",".join(sorted(own)).encode(), digest_size=8).hexdigest()
    assert digest == "2dc9170145812928", f"look through the settings of TRL {PINS['trl']}: {sorted(own)}"
