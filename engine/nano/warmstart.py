"""The nano policy from nothing: tokenizer, model and warm start, cached by the hash of their inputs.

Differs from the paper, which starts from Qwen3: a policy of two million parameters has no knowledge of its
own, so it is first shown seed environments, their hints and partly competent plays (nano.md section 5).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from engine import model_cache
from engine.config import Config
from engine.nano import seeds
from engine.nano import tokenizer as tokenizers
from engine.nano.seeds import corpus
from engine.nano.seeds.corpus import SeedExample

# torch is imported where a model is built: every start of a run asks for one that is built already.
if TYPE_CHECKING:
    from engine.nano.pretrain import Progress, Tokens

# Grows with every change of the recipe that neither the table nor the corpus shows.
RECIPE = 1

SUPERVISED = "supervised.jsonl"
_SUPERVISED_EXAMPLES = 512
_PROBED_EXAMPLES = 512
_TOKENIZER_EXAMPLES = 2500
_DRILL_TOKENS = 18


def fingerprint(config: Config) -> str:
    """Return the hash of what the built model depends on: table, context length, corpus, prompts.

    The corpus and the prompts enter through the texts of the first examples, so a changed comment causes no
    rebuild.
    """
    table = msgspec.to_builtins(config.warmstart)
    del table["threads"]
    texts = [(item.kind, item.contents) for item in itertools.islice(_examples(config), _PROBED_EXAMPLES)]
    inputs = [RECIPE, table, config.model.max_model_len, texts]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:20]


def build(
    config: Config,
    *,
    progress: Callable[[Progress], None] | None = None,
    missing: Callable[[Path], None] | None = None,
) -> Path:
    """Return the directory of the warm-started model, building it when the cache lacks it.

    ``missing`` is called with the directory before that. It holds weights (float32, untied), tokenizer,
    generation config, ``supervised.jsonl`` and ``warmstart.json``.

    Raises ConfigError for unknown families, SpadeError when another builder takes too long.
    """
    key = fingerprint(config)
    target = model_cache.directory() / f"nano-{key}"
    if missing is not None and not target.is_dir():
        missing(target)
    return model_cache.built_once(target, lambda work: _build(config, key, work, progress))


def _build(config: Config, key: str, work: Path, progress: Callable[[Progress], None] | None) -> None:
    import torch

    from engine.nano import pretrain

    warm = config.warmstart
    threads_before = torch.get_num_threads()
    started = time.monotonic()
    schedule = pretrain.Schedule(
        steps=warm.steps,
        rows=max(1, round(warm.tokens_per_step / pretrain.ROW)),
        muon_learning_rate=warm.muon_learning_rate,
        adamw_learning_rate=warm.adamw_learning_rate,
    )
    source = _examples(config)
    first = list(itertools.islice(source, _TOKENIZER_EXAMPLES))
    tokenizer = tokenizers.train(
        (text for item in first for text in item.contents),
        vocabulary=warm.vocabulary,
        context=config.model.max_model_len,
    )
    encode = ExampleEncoder(tokenizer, design_weight=warm.design_weight)
    wanted = schedule.steps * schedule.rows * pretrain.ROW
    sequences: list[Tokens] = []
    for item in itertools.chain(first, source):
        if wanted <= 0 and len(sequences) >= _PROBED_EXAMPLES:
            break
        sequences.append(encode(item))
        wanted -= len(sequences[-1].tokens)
    rng = Random(f"drills {warm.seed}")
    room = schedule.steps * pretrain.DRILL_SHARE * schedule.drill_rows * pretrain.ROW
    drills = [encode(corpus.drill(rng)) for _ in range(200 + round(room / _DRILL_TOKENS))]
    model = _model(config, tokenizer)
    try:
        metrics = pretrain.train(
            model,
            pretrain.pack(drills, schedule.drill_rows, pad=tokenizer.pad_token_id, seed=warm.seed),
            pretrain.pack(sequences, schedule.rows, pad=tokenizer.pad_token_id, seed=warm.seed),
            schedule,
            threads=warm.threads or len(os.sched_getaffinity(0)),
            progress=progress,
        )
    finally:
        torch.set_num_threads(threads_before)
    model.save_pretrained(work)
    tokenizer.save_pretrained(work)
    _write_supervised(work / SUPERVISED, _examples(config), encode)
    metrics["parameters"] = float(sum(parameter.numel() for parameter in model.parameters()))
    metrics["vocabulary"] = float(len(tokenizer))
    metrics["examples"] = float(len(sequences))
    metrics["seconds_in_all"] = round(time.monotonic() - started, 1)
    record = {
        "hash": key,
        "recipe": RECIPE,
        "warmstart": msgspec.to_builtins(warm),
        "max_model_len": config.model.max_model_len,
        "families": [family.name for family in seeds.families(warm.families)],
        "metrics": metrics,
    }
    (work / "warmstart.json").write_text(json.dumps(record, indent=1) + "\n")


def _examples(config: Config) -> Iterator[SeedExample]:
    warm = config.warmstart
    return corpus.examples(
        seeds.families(warm.families),
        seed=warm.seed,
        design_share=warm.design_share,
        hinted_share=warm.hinted_share,
    )


class ExampleEncoder:
    """Example -> token ids and loss weights, in the layout of the tokenizer's chat template.

    Replies and the end mark after them are learned with weight 1, except the boilerplate of a design, which
    has ``design_weight``: there are many such tokens and they are soon known.
    """

    def __init__(self, tokenizer: Any, *, design_weight: float) -> None:
        from engine.nano.pretrain import Tokens

        self._tokens = Tokens
        self._tokenizer = tokenizer
        self._design_weight = design_weight
        self._ids: dict[str, list[int]] = {}
        names = {"user": tokenizers.USER, "assistant": tokenizers.ASSISTANT, "system": tokenizers.SYSTEM}
        self._marks = {role: tokenizer.convert_tokens_to_ids(name) for role, name in names.items()}
        self._end = tokenizer.convert_tokens_to_ids(tokenizers.END)

    def __call__(self, item: SeedExample) -> Tokens:
        tokens: list[int] = []
        weights: list[float] = []
        for index, content in enumerate(item.contents):
            role = item.roles[index] if item.roles else ("user", "assistant")[index % 2]
            reply = role == "assistant"
            ids = self._encode(content)
            tokens += [self._marks[role], *ids]
            weights.append(0.0)
            if not reply:
                weights += [0.0] * len(ids)
                continue
            weights += self._design(content, item.decisive) if item.kind == "design" else [1.0] * len(ids)
            if index == 1:
                weights[-len(ids)] *= item.weight
            tokens.append(self._end)
            weights.append(1.0)
        return self._tokens(np.asarray(tokens, np.int32), np.asarray(weights, np.float32))

    def _encode(self, text: str) -> list[int]:
        known = self._ids.get(text)
        if known is None:
            known = self._ids[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return known

    def _design(self, text: str, decisive: Sequence[tuple[int, int]]) -> list[float]:
        read = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [
            1.0 if any(start < last and first < stop for first, last in decisive) else self._design_weight
            for start, stop in read["offset_mapping"]
        ]


def _model(config: Config, tokenizer: Any) -> Any:
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    warm = config.warmstart
    torch.manual_seed(warm.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=warm.hidden_size,
            intermediate_size=warm.intermediate_size,
            num_hidden_layers=warm.layers,
            num_attention_heads=warm.heads,
            num_key_value_heads=warm.heads,
            head_dim=warm.hidden_size // warm.heads,
            max_position_embeddings=config.model.max_model_len,
            # A tied head goes stale on vLLM's CPU build when weights are updated, so it is never tied.
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            initializer_range=1.0 / math.sqrt(warm.hidden_size),
            attn_implementation="eager",
            dtype="float32",
        )
    )
    # Large embeddings keep a token recognisable through the layers: copying is found in half the steps.
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.02)
    model.generation_config = GenerationConfig(
        do_sample=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def _write_supervised(path: Path, items: Iterator[SeedExample], encode: ExampleEncoder) -> None:
    """Write designs and hints for the learner's supervised mix, one JSON object a line."""
    chosen = (item for item in items if item.kind in ("design", "hint"))
    with path.open("w") as handle:
        for item in itertools.islice(chosen, _SUPERVISED_EXAMPLES):
            sequence = encode(item)
            mask = (sequence.weights > 0).astype(int).tolist()
            handle.write(json.dumps({"tokens": sequence.tokens.tolist(), "mask": mask}) + "\n")
