"""The roles on the real sandbox, the nano tokenizer and the seed families; only the policy is scripted."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import anyio
import pytest
from role_fakes import FakeChat, FakePool, make_config, make_context
from scenes.memory_bus import MemoryBus
from scenes.small_run import ticket as make_ticket
from test_episode import make_request

from bus import codec
from bus.messages import DesignRejected, DesignSample, EnvironmentReady, EpisodeFinished
from engine.config import AgentConfig as AgentConfig
from engine.config import DesignerConfig as DesignerConfig
from engine.config import ModelConfig, SamplingConfig
from engine.inference.tokens import ChatTokens
from engine.nano import seeds
from engine.nano.seeds.corpus import examples
from engine.nano.tokenizer import train
from engine.training.samples import arrays
from roles.agent.episode import Player, Rules
from roles.agent.role import AgentRole
from roles.designer.role import DesignerRole
from sandbox import SandboxPool, SandboxSettings

pytestmark = pytest.mark.slow

CRASHER = """
import os
class CrashEnv:
    def reset(self, seed):
        return "go"
    def step(self, action):
        os._exit(3)
"""
RAISER = """
class RaiseEnv:
    def reset(self, seed):
        return f"say {seed % 7}"
    def step(self, action):
        return "over", float({"1": 1.0}[action]), True, False, {}
"""
STEP = """
class StepEnv:
    def reset(self, seed):
        return "go"
    def step(self, action):
        return {}
"""
LOOPER = """
class LoopEnv:
    def reset(self, seed):
        return "go"
    def step(self, action):
        while True:
            pass
"""


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokens:
    directory = tmp_path_factory.mktemp("tokenizer")
    stream = examples(seeds.families(), seed=1, design_share=0.3, hinted_share=0.4)
    texts = [text for example in itertools.islice(stream, 300) for text in example.contents]
    train(texts, vocabulary=512, context=1024).save_pretrained(directory)
    return ChatTokens(directory)


def open_sandbox() -> SandboxPool:
    return SandboxPool(SandboxSettings(allow_unsafe=True, zygotes=1, cpu_call_seconds=0.3))


class NanoPool(FakePool):
    """The scripted policy with the nano tokenizer."""

    def __init__(self, chat: ChatTokens, script: Any) -> None:
        super().__init__(script, version=5)
        self._chat = chat  # type: ignore[assignment]
        (self.stop, *_) = chat.stop_token_ids


def family_and_program(level: int = 1) -> tuple[seeds.Family, str, str]:
    """A guessing game with its family and hint."""
    (family,) = seeds.families(["guess"])
    rng = random.Random(5)
    parameters = family.draw(level, rng, withheld=False)
    return family, family.program(parameters, "kites"), family.hint(parameters)


def rules(**changes: Any) -> Rules:
    values = {
        "sampling": SamplingConfig(max_tokens=64),
        "max_turns": 6,
        "context_tokens": 1024,
        "prompt": "nano",
    }
    return Rules(**{**values, **changes})


async def test_arms_of_a_pair_differ_in_the_hint_line_only(chat: ChatTokens) -> None:
    async with open_sandbox() as sandbox:
        _, source, hint = family_and_program()
        prompts = []
        for arm in ("plain", "hinted"):
            pool = NanoPool(chat, lambda text, call: f"\\boxed{{{call}}}")
            player = Player(pool, sandbox, chat, rules())  # type: ignore[arg-type]
            await player.play(make_request(arm=arm, hint=hint, source=source, max_turns=6))
            prompts.append([call["prompt"] for call in pool.calls])
        line = chat.encode(f"\nHINT: {hint}")
        assert len(prompts[0]) == len(prompts[1]) > 0
        for plain, hinted in zip(*prompts, strict=True):
            at = next(index for index in range(len(hinted)) if hinted[index : index + len(line)] == line)
            assert hinted[:at] + hinted[at + len(line) :] == plain


async def test_a_context_equals_the_rendered_conversation(chat: ChatTokens) -> None:
    async with open_sandbox() as sandbox:
        _, source, _ = family_and_program(3)
        pool = NanoPool(chat, lambda text, call: f"so \\boxed{{{call + 50}}}")
        played = await Player(pool, sandbox, chat, rules()).play(make_request(source=source))  # type: ignore[arg-type]
        assert len(pool.calls) > 1
        said = [text for turn in played.transcript for text in (turn.observation, turn.reply)]
        assert pool.calls[-1]["prompt"] == chat.render(said[:-1])
        (segment,) = played.segments
        tokens, mask, _ = arrays(segment)
        assert chat.decode(tokens[mask].tolist()) == "".join(turn.reply for turn in played.transcript)
        assert {span.version for span in segment.spans} == {5}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (CRASHER, "EnvCrashed"),
        (RAISER, "KeyError"),
        (LOOPER, "EnvTimeout"),
        (STEP.format('"x", float("nan"), True, False, {}'), "EnvError"),
        (STEP.format('"x", float("inf"), True, False, {}'), "EnvError"),
        (STEP.format('"x", 1e300, True, False, {}'), "EnvError"),
    ],
)
async def test_what_programs_do_is_an_outcome(chat: ChatTokens, source: str, reason: str) -> None:
    async with open_sandbox() as sandbox:
        player = Player(NanoPool(chat, lambda *_: "\\boxed{x}"), sandbox, chat, rules())  # type: ignore[arg-type]
        played = await player.play(make_request(source=source))
        assert (played.ending.outcome, played.ending.failure, played.ending.returned) == (
            "failed",
            "env",
            0.0,
        )
        assert reason in played.ending.reason
        assert len(played.segments) == 1
        assert sandbox.statistics()["live"] == 0


async def test_an_observation_that_is_no_text_or_no_unicode_is_seen_as_text(chat: ChatTokens) -> None:
    async with open_sandbox() as sandbox:
        for observation in ('"\\ud800 and \\x00"', 'b"\\xff"', '{"a": 1}'):
            source = STEP.format(f"{observation}, 0.5, False, False, {{}}")
            player = Player(NanoPool(chat, lambda *_: "\\boxed{x}"), sandbox, chat, rules())  # type: ignore[arg-type]
            played = await player.play(make_request(source=source, max_turns=2))
            assert played.ending == ("truncated", "policy", "turn budget spent", 0.0)
            fact = played.finished(make_request(), None)
            assert codec.decode(codec.encode(fact, run="r", role="agent", instance="a"))[1] == fact


async def test_from_a_ticket_to_plays(chat: ChatTokens, tmp_path: Path) -> None:
    """A designer writes a guessing game at the second attempt, an agent wins it."""
    async with open_sandbox() as sandbox:
        family, source, hint = family_and_program(level=3)
        observed: list[str] = []

        def policy(text: str, _: int) -> str:
            observed.append(text)
            if text.startswith("Design"):
                return "class Broken:" if len(observed) == 1 else source
            return hint if text.startswith("Hint") else "\\boxed{0}"

        pool = NanoPool(chat, policy)
        config = make_config(
            model=ModelConfig(path="", max_model_len=1024, scale="nano"),
            designer=DesignerConfig(
                prompt="nano",
                corpus="seeds:",
                max_turns=6,
                concurrency=2,
                sampling=SamplingConfig(max_tokens=300),
            ),
            agent=AgentConfig(prompt="nano", max_turns=6, concurrency=4),
        )
        bus = MemoryBus(run="test", role="scorer", instance="s")
        contexts = {
            name: make_context(bus.peer(name, "0"), config, tmp_path, pool=pool, sandbox=sandbox, chat=chat)
            for name in ("designer", "agent")
        }
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(DesignerRole(contexts["designer"]).run)
            tasks.start_soon(AgentRole(contexts["agent"]).run)
            await bus.publish(make_ticket(skill=family.skill))
            with anyio.fail_after(20):
                async with bus.follow("EVENT") as records:
                    stream = aiter(records)
                    rejected = (await anext(stream)).message
                    ready = (await anext(stream)).message
                    assert isinstance(ready, EnvironmentReady)
                    await bus.publish_all(
                        make_request(
                            episode=f"{arm}{seed}", arm=arm, seed=seed, source=ready.source, hint=ready.hint
                        )
                        for arm in ("plain", "hinted")
                        for seed in range(6)
                    )
                    facts = [(await anext(stream)).message for _ in range(12)]
            for context in contexts.values():
                context.draining.set()
        assert isinstance(rejected, DesignRejected)
        assert rejected.attempt == 0
        assert (ready.family, ready.attempt, ready.hint) == (family.name, 1, hint)
        assert ready.difficulty is not None
        assert "kites" in ready.finding.title
        assert ready.document.startswith("guess-")
        assert seeds.classify(ready.source) is not None
        held = [record.message async for record in bus.replay("SAMPLE")]
        assert [item.valid for item in held if isinstance(item, DesignSample)] == [False, True]
        played = {fact.episode: fact for fact in facts if isinstance(fact, EpisodeFinished)}
        assert len(played) == 12
        assert all(fact.outcome == "terminated" for fact in played.values())
        # The policy does not look at hints: arms of one seed meet the same instance and fare alike.
        assert all(played[f"plain{seed}"].returned == played[f"hinted{seed}"].returned for seed in range(6))


TILL = '''
class TillEnv(ToolEnv):
    max_turns = 9

    def setup(self, rng):
        return {"want": rng.choice(["figs", "limes"]), "basket": [], "note": ""}

    def tool_add(self, item: str, count: int = 1) -> str:
        """Put an item into the basket."""
        self.state["basket"] += [item] * count
        return "added"

    def tool_note(self, text: str) -> str:
        """Write a note."""
        self.state["note"] = text
        return "noted"

    def instructions(self):
        want = self.state["want"]
        return [
            (f"Two {want}, please.", lambda s: s["basket"].count(want) == 2),
            ("Note an opening brace.", lambda s: s["note"] == "{"),
        ]

    def answer(self):
        return 2

    def plan(self):
        return [("add", {"item": self.state["want"], "count": 2}), ("note", {"text": "{"})]
'''


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        ("\\boxed{ADD}", "\\boxed{NOTE}", '\\boxed{{"answer": 2}}'),
        (
            "Let me see.\n<tool_call>\nADD\n</tool_call>",
            "<tool_call>NOTE</tool_call>",
            "so <answer>2</answer>",
        ),
        ("<think>\\boxed{no}</think>ADD", "[NOTE]", '{"answer": "2"}'),
        ("I add them.\n```json\nADD\n```", "Now:\nNOTE", 'Done.\n{"answer": 2}'),
        ("\\boxed{<tool_call>ADD</tool_call>}", "```\nNOTE\n```", "\\boxed{<answer>2</answer>}"),
    ],
)
async def test_a_tool_environment_is_played_to_its_end(first: str, second: str, third: str) -> None:
    replies = [first, second, third]

    def policy(text: str, call: int) -> str:
        want = "figs" if "Two figs" in text else "limes"
        made = replies[call].replace("ADD", '{"name": "add", "arguments": {"item": "W", "count": 2}}')
        return made.replace("NOTE", '{"name": "note", "arguments": {"text": "{"}}').replace(
            '"W"', f'"{want}"'
        )

    async with open_sandbox() as sandbox:
        pool = FakePool(policy)
        played = await Player(
            pool, sandbox, FakeChat(), rules(context_tokens=8192, sampling=SamplingConfig(max_tokens=400))
        ).play(  # type: ignore[arg-type]
            make_request(source=TILL, max_turns=7)
        )
        assert played.ending == ("terminated", None, "", 1.0), played.transcript
        opening = played.transcript[0].observation
        assert "- add(item: string, count: integer (optional)): Put an item into the basket." in opening
        # the rules of the player allow six turns, the request seven, the program nine
        assert "There are 6 turns." in opening
        assert "Instruction 2 of 2: Note an opening brace." in played.transcript[1].observation


async def test_a_program_is_built_as_it_was_validated(chat: ChatTokens) -> None:
    source = """
class TurnsEnv:
    def __init__(self, max_turns):
        self.max_turns = max_turns
    def reset(self, seed):
        return f"{self.max_turns} turns"
    def step(self, action):
        return "over", 1.0, True, False, {}
"""
    async with open_sandbox() as sandbox:
        player = Player(NanoPool(chat, lambda *_: "\\boxed{x}"), sandbox, chat, rules())  # type: ignore[arg-type]
        for asked, told in ((4, 4), (9, 6)):
            played = await player.play(make_request(source=source, max_turns=asked))
            assert played.transcript[0].observation == f"{told} turns"
        smaller = source.replace("max_turns)", "max_turns=3)", 1)
        assert (await player.play(make_request(source=smaller))).transcript[0].observation == "3 turns"
