"""Both arms of a pair see the same but for the hint, whether a hybrid-thinking model thinks or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scenes.small_run import request
from scenes.template_models import FAMILIES, build

from bus.messages import Span
from engine.config import SamplingConfig
from engine.inference.completion import Completion
from engine.inference.tokens import ChatTokens
from roles.agent.episode import Played, Player, Rules
from sandbox import StepResult

HINT = "it is the number after {turn} <|im_end|>"
TURNS = 4


class Pool:
    """Thinks when it may, and moves; remembers what it was asked."""

    def __init__(self, chat: ChatTokens, *, thinks: bool) -> None:
        self._chat, self._thinks = chat, thinks
        self.prompts: list[list[int]] = []
        self.samplings: list[SamplingConfig] = []

    async def generate(self, prompt: Sequence[int], *, sampling: SamplingConfig, **_: Any) -> Completion:
        self.prompts.append(list(prompt))
        self.samplings.append(sampling)
        thought = "<think>\nhm\n</think>\n\n" if self._thinks else ""
        tokens = [
            *self._chat.encode(f"{thought}\\boxed{{{len(self.prompts)}}}"),
            self._chat.stop_token_ids[0],
        ]
        return Completion(tokens, [-0.5] * len(tokens), (Span(1, 0, len(tokens)),), "stop")


class Instance:
    tools, first = False, "say the number"

    def __init__(self) -> None:
        self.actions: list[str] = []

    async def step(self, action: str) -> StepResult:
        self.actions.append(action)
        done = len(self.actions) == TURNS
        return StepResult(f"turn {len(self.actions)}", float(done), done, False)

    async def close(self) -> None:
        pass


class Sandbox:
    async def spawn(self, source: str, **_: Any) -> Instance:
        return Instance()


async def play(chat: ChatTokens, arm: str, *, thinks: bool, prompt: str) -> tuple[Played, Pool]:
    pool = Pool(chat, thinks=thinks)
    rules = Rules(
        sampling=SamplingConfig(max_tokens=400), max_turns=TURNS + 1, context_tokens=1 << 20, prompt=prompt
    )
    work = request(1, arm=arm, hint=HINT if arm == "hinted" else None, max_turns=TURNS)
    return await Player(pool, Sandbox(), chat, rules).play(work), pool  # type: ignore[arg-type]


@pytest.mark.parametrize("thinking", ["off", "on", "unset"])
@pytest.mark.parametrize(("prompt", "line"), [("full", "HINT: {}\n\n"), ("nano", "\nHINT: {}")])
async def test_the_hint_of_the_first_observation_is_all_that_differs(
    thinking: Any, prompt: str, line: str, tmp_path: Path
) -> None:
    chat = ChatTokens(build(tmp_path, FAMILIES["qwen3"]), thinking=thinking)
    thinks = thinking != "off"
    plain, seen = await play(chat, "plain", thinks=thinks, prompt=prompt)
    hinted, told = await play(chat, "hinted", thinks=thinks, prompt=prompt)
    assert plain.ending == hinted.ending
    assert plain.ending.returned == 1.0
    assert [turn.action for turn in plain.transcript] == [turn.action for turn in hinted.transcript]
    assert len(seen.prompts) == len(told.prompts) == TURNS
    assert seen.samplings == told.samplings
    hint = chat.encode(line.format(HINT))
    for without, with_hint in zip(seen.prompts, told.prompts, strict=True):
        places = [at for at in range(len(with_hint)) if with_hint[at : at + len(hint)] == hint]
        assert len(places) == 1, "once, in the first observation"
        assert with_hint[: places[0]] + with_hint[places[0] + len(hint) :] == without
    for asked in (*seen.prompts, *told.prompts):
        text = chat.decode(asked, special=True)
        assert text.endswith("<think>\n\n</think>\n\n") == (thinking == "off")
        assert "hm" not in text, "reasoning of earlier turns is not shown again"
