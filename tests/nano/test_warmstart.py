"""The warm start in small: it builds, it is cached, and what it exports is what it trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from engine.config import Config, ModelConfig, RunConfig, WarmstartConfig
from engine.errors import ConfigError
from engine.nano import pretrain, seeds, tokenizer, warmstart
from engine.nano.pretrain import Progress, Schedule, Tokens
from engine.nano.seeds import corpus
from engine.prompts import render
from engine.training import supervised

SMALL = WarmstartConfig(
    hidden_size=64,
    layers=2,
    heads=2,
    intermediate_size=128,
    vocabulary=600,
    steps=12,
    tokens_per_step=512,
    threads=1,
)


def config(warm: WarmstartConfig = SMALL) -> Config:
    return Config(run=RunConfig(name="t"), model=ModelConfig(path="warmstart:", scale="nano"), warmstart=warm)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Progress]]:
    seen: list[Progress] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPADE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return warmstart.build(config(), progress=seen.append), seen


@pytest.fixture(scope="module")
def chat(built: tuple[Path, list[Progress]]) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(built[0])


def messages(contents: tuple[str, ...]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def ids(chat: Any, contents: tuple[str, ...]) -> list[int]:
    return list(
        chat.apply_chat_template(
            messages(contents), add_generation_prompt=len(contents) % 2 == 1, tokenize=True, return_dict=False
        )
    )


def test_it_builds_tells_its_progress_and_learns(built: tuple[Path, list[Progress]]) -> None:
    path, seen = built
    assert [item.step for item in seen] == list(range(1, 13))
    assert seen[-1].seconds_left == 0
    assert all(item.tokens_per_second > 0 and item.threads == 1 for item in seen)
    record = json.loads((path / "warmstart.json").read_text())
    assert record["hash"] in path.name
    assert record["warmstart"]["steps"] == 12
    assert record["metrics"]["loss"] < record["metrics"]["loss_first"]
    assert record["families"] == [family.name for family in seeds.families()]


@pytest.mark.slow
def test_a_second_call_finds_it_and_a_half_built_one_is_rebuilt(
    built: tuple[Path, list[Progress]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, _ = built
    monkeypatch.setenv("SPADE_CACHE", str(path.parent))
    before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
    told: list[Path] = []
    assert warmstart.build(config(), missing=told.append) == path
    assert not told
    assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before
    path.rename(tmp_path / "gone")
    (path.parent / f"{path.name}-killed").mkdir()
    again: list[Progress] = []
    assert warmstart.build(config(), progress=again.append, missing=told.append) == path
    assert told == [path]
    assert len(again) == 12
    assert not list(path.parent.glob("*-*-*"))


def test_the_fingerprint_follows_what_matters_and_nothing_else() -> None:
    known = warmstart.fingerprint(config())
    assert warmstart.fingerprint(config(msgspec.structs.replace(SMALL, threads=2))) == known
    for changed in ({"steps": 13}, {"seed": 8}, {"families": ("guess", "walk")}, {"hinted_share": 0.3}):
        assert warmstart.fingerprint(config(msgspec.structs.replace(SMALL, **changed))) != known


def test_unknown_families_are_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPADE_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="nobody"):
        warmstart.build(config(msgspec.structs.replace(SMALL, families=("nobody",))))
    assert not list(tmp_path.iterdir())


def test_the_export_is_what_was_trained(tmp_path: Path, chat: Any) -> None:
    from transformers import LlamaForCausalLM

    model = warmstart._model(config(), chat)
    drills = [_tokens(chat, corpus.drill(Random(i)).contents) for i in range(200)]
    packs = pretrain.pack(drills, 2, pad=chat.pad_token_id, seed=0)
    pretrain.train(model, packs, packs, Schedule(4, 2, 0.02, 0.002), threads=1)
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    prompt = torch.tensor([ids(chat, (render("play_nano", observation="The kites go 5 ?, 2 tries"),))])
    with torch.no_grad():
        assert torch.equal(loaded(prompt).logits, model(prompt).logits)


def test_the_export_suits_vllm(built: tuple[Path, list[Progress]], chat: Any) -> None:
    from safetensors.torch import load_file

    settings = json.loads((built[0] / "config.json").read_text())
    assert settings["architectures"] == ["LlamaForCausalLM"]
    assert settings["head_dim"] == 32
    assert settings["tie_word_embeddings"] is False
    assert settings["vocab_size"] == len(chat)
    tensors = load_file(built[0] / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    generation = json.loads((built[0] / "generation_config.json").read_text())
    assert generation["eos_token_id"] == chat.eos_token_id == chat.convert_tokens_to_ids("<|end|>")


def test_the_chat_template_only_appends(chat: Any) -> None:
    turns = ("The kites go 5?, 2 tries", "guess \\boxed{9}", "no, 6 7?", "8:6 9:7 \\boxed{9}", "no, 8 9?")
    for count in range(1, len(turns)):
        shorter, longer = ids(chat, turns[:count]), ids(chat, turns[: count + 1])
        assert longer[: len(shorter)] == shorter
    bridge = ids(chat, turns[2:3])
    assert ids(chat, turns[:1]) + ids(chat, turns)[len(ids(chat, turns[:1])) :] == ids(chat, turns)
    assert ids(chat, turns[:2]) + bridge == ids(chat, turns[:3])


def test_numbers_and_boxes_are_single_tokens(chat: Any) -> None:
    for number in range(100):
        assert len(chat.encode(f"{number}", add_special_tokens=False)) == 1
    assert len(chat.encode("again \\boxed{17}", add_special_tokens=False)) == 4
    text = "def f(self):\n  return f\"é {'x'} 105..7\"\n\n# ünïcode \\boxed{ a }"
    assert chat.decode(chat.encode(text, add_special_tokens=False)) == text


def test_the_same_texts_train_the_same_tokenizer() -> None:
    texts = [text for number in range(300) for text in corpus.drill(Random(number)).contents]
    one, two = (tokenizer.train(iter(texts), vocabulary=400, context=64) for _ in range(2))
    assert one.backend_tokenizer.to_str() == two.backend_tokenizer.to_str()


def test_training_examples_are_laid_out_as_the_run_s_conversations(chat: Any) -> None:
    encode = warmstart.ExampleEncoder(chat, design_weight=0.25)
    source = warmstart._examples(config())
    kinds = set()
    for item in (next(source) for _ in range(400)):
        kinds.add(item.kind)
        tokens = encode(item)
        assert tokens.tokens.tolist() == ids(chat, item.contents)
        learned = [
            token for token, weight in zip(tokens.tokens.tolist(), tokens.weights, strict=True) if weight > 0
        ]
        assert chat.decode(learned) == "".join(f"{reply}<|end|>" for reply in item.contents[1::2])
    assert kinds == {"play", "design", "hint", "drill"}


def test_literals_of_a_design_weigh_more_than_its_boilerplate(chat: Any) -> None:
    family = seeds.families(("guess",))[0]
    item = corpus.design(family, Random(1))
    tokens = warmstart.ExampleEncoder(chat, design_weight=0.25)(item)
    light = [chat.decode([t]) for t, w in zip(tokens.tokens, tokens.weights, strict=True) if w == 0.25]
    heavy = [chat.decode([t]) for t, w in zip(tokens.tokens, tokens.weights, strict=True) if w == 1.0]
    read = family.parse(item.contents[1])
    assert read is not None
    parameters, noun = read
    assert {"import", " random"} <= set(light)
    assert [str(parameters[slot]) for slot in family.slots] == [text for text in heavy if text.isdigit()]
    assert noun in "".join(heavy)
    assert heavy[-1] == "<|end|>"


def test_supervised_examples_are_designs_and_hints(built: tuple[Path, list[Progress]], chat: Any) -> None:
    examples = supervised.load(built[0])
    assert len(examples) == 512
    for example in examples[:60]:
        text = chat.decode(example.tokens.tolist())
        assert text.startswith(("<|user|>Design ", "<|user|>Hint:\n"))
        reply = chat.decode(example.tokens[example.mask].tolist())
        assert text.endswith(f"<|assistant|>{reply}")


def _tokens(chat: Any, contents: tuple[str, ...]) -> Tokens:
    found = np.asarray(ids(chat, contents), np.int32)
    weights = np.ones(len(found), np.float32)
    weights[0] = 0.0
    return Tokens(found, weights)


def test_examples_of_a_row_do_not_see_each_other(chat: Any) -> None:
    model = warmstart._model(config(), chat)
    few = [_tokens(chat, corpus.drill(Random(i)).contents) for i in range(30)]
    batch = next(pretrain.pack(few, 2, pad=chat.pad_token_id, seed=3))
    assert batch.filled == int((batch.document > 0).sum())
    together = pretrain.loss(model, batch)
    total, weight = 0.0, 0.0
    for row in range(2):
        for document in range(1, int(batch.document[row].max()) + 1):
            inside = batch.document[row] == document
            tokens = batch.tokens[row, inside]
            with torch.no_grad():
                logits = model(tokens[None]).logits[0, :-1]
            nll = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
            total += float(nll)
            weight += len(tokens) - 1
    assert float(together.detach()) * float(batch.weights[:, 1:].sum()) == pytest.approx(total, rel=0.02)
    assert weight == float(batch.weights.sum()) > 100


def test_packing_uses_the_rows_and_every_example(chat: Any) -> None:
    few = [_tokens(chat, corpus.drill(Random(i)).contents) for i in range(300)]
    packs = pretrain.pack(few, 4, pad=chat.pad_token_id, seed=1)
    filled = [next(packs).filled for _ in range(8)]
    assert min(filled) > 0.95 * 4 * pretrain.ROW


def test_an_example_longer_than_a_row_is_refused() -> None:
    long = Tokens(np.zeros(pretrain.ROW + 1, np.int32), np.zeros(pretrain.ROW + 1, np.float32))
    with pytest.raises(ValueError, match="257 tokens"):
        next(pretrain.pack([long], 1, pad=0, seed=0))


def test_the_rate_rises_stays_and_falls() -> None:
    schedule = Schedule(steps=400, rows=1, muon_learning_rate=1, adamw_learning_rate=1)
    factors = [schedule.factor(step) for step in range(400)]
    assert factors[0] == pytest.approx(0.05)
    assert factors[20:200] == [1.0] * 180
    assert factors[200:] == sorted(factors[200:], reverse=True)
    assert 0.03 <= factors[-1] < 0.04


def test_drills_end_when_they_are_learned_or_have_had_their_share() -> None:
    assert not pretrain._drilled([0.1] * 4, steps=1000)
    assert pretrain._drilled([3.0, *[0.2] * 5], steps=1000)
    assert not pretrain._drilled([3.0] * 249, steps=1000)
    assert pretrain._drilled([3.0] * 250, steps=1000)


def _threads_used(monkeypatch: pytest.MonkeyPatch, cost: Callable[[int, int], float]) -> list[int]:
    """Threads of each of 60 steps, when a step costs ``cost(step, threads)`` seconds."""
    clock = [0.0]
    monkeypatch.setattr(pretrain.torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(pretrain.time, "monotonic", lambda: clock[0])
    pace = pretrain._Pace(2)
    used = []
    for step in range(60):
        pace.before(step)
        clock[0] += cost(step, pace.threads)
        used.append(pace.threads)
        pace.after(step)
    return used


def test_the_faster_number_of_threads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    used = _threads_used(monkeypatch, lambda step, threads: 1.0 / threads)
    assert set(used[10:]) == {2}
    assert 1 in used[:10]
    assert set(_threads_used(monkeypatch, lambda step, threads: 1.0 + threads / 8)[10:]) == {1}


def test_threads_that_wait_for_each_other_are_given_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    used = _threads_used(monkeypatch, lambda step, threads: 9.0 if threads == 2 else 1.0)
    assert used.count(2) <= 3  # the step that compiles, and two to be sure


def test_a_collapse_later_on_is_noticed_and_a_single_slow_step_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def collapse(step: int, threads: int) -> float:
        return 1.0 if threads == 1 else (9.0 if step >= 30 else 0.6)

    assert _threads_used(monkeypatch, collapse)[35:] == [1] * 25
    used = _threads_used(monkeypatch, lambda step, threads: 9.0 if step == 30 else 1.0 / threads)
    assert used[35:] == [2] * 25
