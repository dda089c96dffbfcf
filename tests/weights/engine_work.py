"""Not a test: vLLM engines for CPUs, one after the other in this process, each of which takes two versions.

``python engine_work.py DIRECTORY ARCHITECTURE...`` writes what it measured into ``DIRECTORY/found.json``.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scenes.tiny_models import move_weights, write_model
from tiny_llama import logprobs
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from engine.inference import WEIGHT_BACKEND
from engine.lineage import Version
from engine.training.parameters import published
from engine.weights import store

TOKENS = list(range(3, 67))
# vLLM's kernels of latent attention on CPUs have one size, and the one for AMX computes in bfloat16 only. The
# published config.json of DeepSeek-V3 names its router's kind, which transformers has no field for.
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    }
}  # fmt: skip
# Log-probs of vLLM's latent attention on CPUs are .003 to .2 away from those of transformers, with the first
# weights too: the engine that took versions is held to one that starts with the files of save_pretrained.
OTHER_NUMBERS = ("deepseek_v3",)
FLAGS = {"deepseek_v3": {"attention_backend": "CPU_MLA"}}


def started(folder: Path, flags: dict[str, Any]) -> LLM:
    """An engine with the settings of `spade`'s servers on CPUs."""
    return LLM(
        str(folder), dtype="float32", max_model_len=256, max_num_seqs=4, block_size=32, enforce_eager=True,
        skip_tokenizer_init=True, generation_config="vllm", logprobs_mode="processed_logprobs",
        distributed_executor_backend="uni", weight_transfer_config={"backend": WEIGHT_BACKEND}, **flags,
    )  # fmt: skip


def ask(engine: LLM) -> np.ndarray:
    """The log-probs of TOKENS[1:], (T - 1,)."""
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (answer,) = engine.generate({"prompt_token_ids": TOKENS}, asked, use_tqdm=False)
    told = zip(answer.prompt_logprobs[1:], TOKENS[1:], strict=True)
    return np.array([place[token].logprob for place, token in told])


def closed() -> None:
    """Leave nothing of an engine that nobody holds."""
    gc.collect()
    cleanup_dist_env_and_memory()


def fresh(folder: Path, flags: dict[str, Any]) -> np.ndarray:
    """The log-probs of an engine that starts with the weights in ``folder``."""
    engine = started(folder, flags)
    found = ask(engine)
    del engine
    closed()
    return found


def measured(directory: Path, architecture: str) -> list[dict[str, float]]:
    """For each version the largest error of the engine's log-probs, and how far the version moved them."""
    folder, flags = directory / architecture, FLAGS.get(architecture, {})
    write_model(folder, architecture, vocabulary=128, **SHAPES.get(architecture, {}))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = started(folder, flags)
    engine.collective_rpc("init_weight_transfer_engine", args=({},))
    expected, served = [logprobs(model, TOKENS)], []
    for step in (1, 2):
        move_weights(model, step)
        release = store.publish(
            directory / f"{architecture}-weights", Version(0, step), dict(published(model))
        )
        engine.collective_rpc("start_weight_update")
        engine.collective_rpc("update_weights", args=({"path": str(store.local_path(release.uri))},))
        engine.collective_rpc("finish_weight_update")
        engine.reset_prefix_cache()
        served.append(ask(engine))
        expected.append(logprobs(model, TOKENS))
        model.save_pretrained(directory / f"{architecture}-{step}")
    del engine
    closed()
    if architecture in OTHER_NUMBERS:
        expected[1:] = [fresh(directory / f"{architecture}-{step}", flags) for step in (1, 2)]
    return [
        {"error": float(abs(after - found).max()), "moved": float(abs(after - before).max())}
        for before, after, found in zip(expected, expected[1:], served, strict=False)
    ]


if __name__ == "__main__":
    measurements = {name: measured(Path(sys.argv[1]), name) for name in sys.argv[2:]}
    Path(sys.argv[1], "found.json").write_text(json.dumps(measurements))
