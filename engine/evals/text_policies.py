"""Players of texts in the place of a server: an endpoint, and the two baselines that do not think.

The turn loop works with tokens. Here each character is a token and a mark begins each message, so the same
loop can play models whose tokens are not available.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

from bus.messages import Span
from engine.config import SamplingConfig
from engine.inference.completion import Completion
from engine.inference.endpoint import Endpoint, EndpointReply
from engine.inference.tokens import Content, ToolStyle
from engine.native_calls import TAGGED, Tools, listing

CONTEXT = 1 << 30
"""Characters of a conversation: its length is the endpoint's own business."""
_SYSTEM, _USER, _MODEL = range(0x110000, 0x110003)
NULL_REPLY = "\\boxed{}"


Write = Callable[[list[str], "str | None", SamplingConfig, str], Awaitable[EndpointReply]]
"""Continues a conversation: texts of user and model in turn, the system message, sampling, the key."""


class TextChat:
    """A chat format whose tokens are characters. It has the methods of ``ChatTokens``."""

    stop_token_ids: tuple[int, ...] = ()

    tool_style = ToolStyle(calls=TAGGED, lists=False, results="user")

    def first(self, content: str, system: str | None = None, tools: Tools = ()) -> list[int]:
        return self.render([content], system, tools)

    def render(self, messages: Sequence[Content], system: str | None = None, tools: Tools = ()) -> list[int]:
        ids = [] if system is None else [_SYSTEM, *map(ord, system)]
        for turn, said in enumerate(messages):
            text = said if isinstance(said, str) else "\n".join(part for _, part in said)
            if tools and not turn:
                text = f"{listing(tools)}\n\n{text}"
            ids += [_MODEL if turn % 2 else _USER, *map(ord, text)]
        return [*ids, _MODEL]

    def bridge(self, observation: Content) -> list[int] | None:
        return [_USER, *map(ord, observation), _MODEL] if isinstance(observation, str) else None

    def close(self) -> list[int]:
        return []

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        return False

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        return "".join(chr(one) for one in ids if one < _SYSTEM)


class TextPool:
    """A player of texts with the interface of a pool. ``counted`` has the tokens of each key."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self.counted: Counter[str] = Counter()

    async def generate(
        self,
        prompt: Sequence[int],
        *,
        sampling: SamplingConfig,
        key: str,
        stop_token_ids: Sequence[int],
        deadline: float | None = None,
        experts_from: int | None = None,
    ) -> Completion:
        """Continue the conversation that ``prompt`` stands for. Raises what the player raises."""
        system, messages = None, list[str]()
        starts = [place for place, one in enumerate(prompt) if one >= _SYSTEM]
        for start, end in zip(starts, [*starts[1:], len(prompt)], strict=True):
            text = "".join(map(chr, prompt[start + 1 : end]))
            if prompt[start] == _SYSTEM:
                system = text
            else:
                messages.append(text)
        written = await self._write(messages[:-1], system, sampling, key)
        self.counted[key] += written.tokens_out
        tokens = [ord(letter) for letter in written.text]
        return Completion(tokens, [0.0] * len(tokens), (Span(0, 0, len(tokens)),), written.finish)


def endpoint_pool(endpoint: Endpoint) -> TextPool:
    """Return an endpoint as a pool."""

    async def write(
        messages: list[str], system: str | None, sampling: SamplingConfig, key: str
    ) -> EndpointReply:
        return await endpoint.write(messages, sampling=sampling, system=system)

    return TextPool(write)


def scripted_pool(reply: Callable[[str, list[str]], str]) -> TextPool:
    """Return a baseline as a pool: ``reply`` gets the key of the sample and the messages."""

    async def write(
        messages: list[str], system: str | None, sampling: SamplingConfig, key: str
    ) -> EndpointReply:
        return EndpointReply(reply(key, messages), "stop")

    return TextPool(write)
