"""An evaluation of a model folder by a (fake) vLLM server: tokens, estimate, journal, baselines."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scenes import template_models
from scenes.endpoint_fake import Say, talking_vllm

from engine.config import SamplingConfig
from engine.evals import bfcl
from engine.evals import suite as suites
from engine.evals import target as targets
from engine.evals.records import Journal
from engine.evals.suite import Item, Outcome, Program, Suite
from engine.inference.tokens import ChatTokens
from roles.evaluator.session import Part, evaluate

GUESS = """
class GuessEnv:
    def reset(self, seed):
        return f"say {seed}"
    def step(self, action):
        return "over", float(action == "3"), True, False, {}
"""


class Mixed(Suite):
    """A question and an environment."""

    def items(self, count: int, seed: int) -> list[Item]:
        return [Item(name="question", group="words", text="say 3"), Item(name="play", group="games")]

    async def play(self, item: Item, seat: Any) -> Outcome:
        if item.name == "play":
            return await seat.play(Program(GUESS, 3, 1))
        reply = await seat.ask([item.text], system="Be brief.")
        return Outcome(score=float(reply.boxed == "3"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder as far as its tokenizer and its configuration go; the weights are never read."""
    folder = template_models.build(tmp_path / "model", template_models.FAMILIES["qwen2_5"])
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 4096}))
    (folder / "model.safetensors").touch()
    return folder


async def test_a_folder_is_judged_through_tokens(tmp_path: Path, folder: Path) -> None:
    target = targets.of_model(str(folder), thinking="off", context=2048, concurrency=4)
    assert target.record == {"model": str(folder), "thinking": "off", "context": 2048}
    chat = ChatTokens(folder)

    def answer(prompt: str) -> Say:
        number = re.findall(r"say (\d+)", prompt)
        return Say(f"It is \\boxed{{{number[-1]}}}" if number else "one two three")

    said: list[str] = []
    async with talking_vllm(answer, chat) as fake:
        frozen = msgspec.structs.replace(target.config.designer.frozen, url=fake.url)
        designer = msgspec.structs.replace(target.config.designer, frozen=frozen)
        config = msgspec.structs.replace(target.config, designer=designer)
        target = replace(target, config=config)
        suite = Mixed()
        part = Part(name="mixed", suite=suite, items=suite.items(0, 0), sampling=SamplingConfig(), samples=2)
        summary = await evaluate(
            target,
            [part],
            Journal(tmp_path / "out", target.record),
            missing={"aime-25": "no data"},
            baselines=True,
            sources={},
            say=said.append,
        )
    found = summary.suites["mixed"]
    assert found.model is not None
    assert (found.model.mean.value, found.model.samples) == (1.0, 4)
    assert set(found.groups) == {"words", "games"}
    assert found.baselines["null"].value == 0.0
    assert summary.partial
    assert any(re.search(r"4 plays; \d+ tokens per second here: at most", line) for line in said)
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    assert all(one["tokens"] > 0 for one in samples if one["policy"] == "model")


def test_tools_are_shown_by_the_template(folder: Path) -> None:
    """A function's document of BFCL becomes a tool that the chat template renders."""
    document = {
        "name": "math.area",
        "description": "The area.",
        "parameters": {"type": "dict", "properties": {"side": {"type": "float"}}, "required": ["side"]},
    }
    chat = ChatTokens(folder)
    prompt = chat.decode(chat.render(["How large?"], None, [bfcl.tool(document)]), special=True)
    assert "math_area" in prompt
    assert '"number"' in prompt


def test_a_suite_is_loaded_by_its_source() -> None:
    config = targets.of_endpoint(targets.EndpointConfig(base_url="u", model="m"), concurrency=1).config
    assert suites.load("reasoning-gym-hard:validation", config, where="x").split == "validation"
