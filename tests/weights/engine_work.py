"""Not a test: vLLM engines for CPUs, one after the other in this process, each of which takes two versions.

``python engine_work.py DIRECTORY ARCHITECTURE...`` writes what it measured into ``DIRECTORY/found.json``.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from scenes.tiny_models import write_model
from tiny_llama import logprobs
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from engine.inference import WEIGHT_BACKEND
from engine.lineage import Version
from engine.training.parameters import published
from engine.weights import store

TOKENS = list(range(3, 67))
# vLLM's kernels of latent attention on CPUs have one size, and the one for AMX computes in bfloat16 only
SHAPES = {
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64}
}
FLAGS = {"deepseek_v3": {"attention_backend": "CPU_MLA"}}


def started(folder: Path, flags: dict[str, Any]) -> LLM:
    """An engine with the settings of `spade`'s servers on CPUs."""
    return LLM(
        str(folder), dtype="float32", max_model_len=256, max_num_seqs=4, block_size=32, enforce_eager=True,
        skip_tokenizer_init=True, generation_config="vllm", logprobs_mode="processed_logprobs",
        distributed_executor_backend="uni", weight_transfer_config={"backend": WEIGHT_BACKEND}, **flags,
    )  # fmt: skip


def updated(directory: Path, architecture: str) -> Iterator[dict[str, float]]:
    """Yield after each version the error of the engine's log-probs, and how far the model's moved."""
    folder = write_model(
        directory / architecture, architecture, vocabulary=128, **SHAPES.get(architecture, {})
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = started(folder, FLAGS.get(architecture, {}))
    engine.collective_rpc("init_weight_transfer_engine", args=({},))
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    for step in (1, 2):
        generator, before = torch.Generator().manual_seed(step), logprobs(model, TOKENS)
        with torch.no_grad():
            for parameter in model.parameters():
                chosen = torch.rand(parameter.shape, generator=generator) < 0.05
                chosen.view(-1)[0] = True
                parameter[chosen] += 0.3 if step % 2 else -0.3
        release = store.publish(
            directory / f"{architecture}-weights", Version(0, step), dict(published(model))
        )
        engine.collective_rpc("start_weight_update")
        engine.collective_rpc("update_weights", args=({"path": str(store.local_path(release.uri))},))
        engine.collective_rpc("finish_weight_update")
        engine.reset_prefix_cache()
        (answer,) = engine.generate({"prompt_token_ids": TOKENS}, asked, use_tqdm=False)
        served = [
            place[token].logprob for place, token in zip(answer.prompt_logprobs[1:], TOKENS[1:], strict=True)
        ]
        own = logprobs(model, TOKENS)
        yield {"error": float(abs(own - served).max()), "moved": float(abs(own - before).max())}


if __name__ == "__main__":
    found = {}
    for name in sys.argv[2:]:
        found[name] = list(updated(Path(sys.argv[1]), name))
        gc.collect()
        cleanup_dist_env_and_memory()
    Path(sys.argv[1], "found.json").write_text(json.dumps(found))
