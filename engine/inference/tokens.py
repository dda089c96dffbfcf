"""Text to token ids and back for a chat model.

Contexts grow by appending ids; sampled tokens are never tokenised again (invariant I3). The ids that the chat
template puts between two replies (the bridge) are found once, from the template itself, and verified. A
template that rewrites earlier turns has no bridge, and each turn opens a new segment. Text of environments is
only text: the name of a control token in it is encoded as letters, never as the token.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import structlog
from jinja2.exceptions import TemplateError

from engine.errors import ConfigError
from engine.inference.replies import CHANNEL_MARKS, THOUGHT_NAMES, opens_thought, visible_reply
from engine.inference.segments import SegmentBuilder as SegmentBuilder
from engine.native_calls import PROBE, TAGGED, CallFormat, Tools, listing, recognise
from sandbox.tool_calls import Unreadable

log = structlog.get_logger("spade.inference")

Thinking = Literal["off", "on", "unset"]
# A turn: a text, or (role, text) of results of tools ("tool") and of the user's words that follow them.
Content = str | Sequence[tuple[str, str]]
History = Literal["template", "keep"]

# Templates with a date line get this day: a prompt must not depend on the day or host of its rendering.
TODAY = date(2024, 7, 26)

_USER, _REPLY = "Qx7 first words", "Rx7 answer words"
_THOUGHTFUL = f"<think>\nWx7 idle thoughts\n</think>\n\n{_REPLY}"
_SECOND, _SECOND_REPLY = "Sx7 second words", "Tx7 more words"
_THIRD = "Ux7 third words"
_REASONING = re.compile(rf"[<\[◁]\W*(seed:)?({THOUGHT_NAMES})\W*[>\]▷]", re.IGNORECASE)
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": PROBE,
        "description": "A probe.",
        "parameters": {
            "type": "object",
            "properties": {"argument": {"type": "string"}},
            "required": ["argument"],
        },
    },
}
# The marks around "assistant" are not decoded.
_ANALYSIS = re.compile(r"analysis<\|message\|>(.*?)(?:assistant)?(?: ?to=|<\|channel\|>)", re.DOTALL)
_PROMPT_TAIL = 48  # tokens at the end of a prompt in which the template may open a thought
_VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt")
_PRIVATE = range(0xE000, 0xF8FF)
_SURROGATES = re.compile("[\ud800-\udfff]")
# Names of transformers' class for any tokenizer.json, and model types whose files get the class they name.
_PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
_TRUSTED = ("", "llama")


@dataclass(frozen=True)
class TurnBridge:
    """The ids between two replies: ``stop`` ends a turn, the rest is rendered after ``before``.

    ``before`` is a known first turn, its reply and the stop token.
    """

    stop: int
    before: str


@dataclass(frozen=True)
class ToolStyle:
    """The manner in which a chat template shows tools.

    ``calls`` is the format of calls, ``lists`` tells whether the template shows the tools that it is given,
    ``results`` is the role of their results: "user" where the template has none of its own.
    """

    calls: CallFormat
    lists: bool
    results: str


class ChatTokens:
    """The tokenizer and chat template of a model directory.

    ``thinking`` is passed to the template as ``enable_thinking`` (``unset``: not at all). ``history`` "keep"
    leaves the reasoning of earlier turns in the context where the template would take it out.
    ``rewrites`` is the reason why there is no bridge, "" when there is one. Raises ConfigError when the
    directory has no usable tokenizer or template.
    """

    def __init__(
        self, path: Path | str, *, thinking: Thinking = "unset", history: History = "template"
    ) -> None:
        self._path = Path(path)
        self._tokenizer = _load(self._path)
        self._fast = self._tokenizer.backend_tokenizer
        self._thinking, self._history = thinking, history
        self._options: dict[str, Any] = {"strftime_now": TODAY.strftime}
        if thinking != "unset":
            self._options["enable_thinking"] = thinking == "on"
        added = {str(token): token for token in self._tokenizer.added_tokens_decoder.values() if str(token)}
        self._added = tuple(added)
        reasoning = {name for name in added if _REASONING.fullmatch(name)}
        special = {name for name, token in added.items() if token.special}
        channels = special.intersection(CHANNEL_MARKS)
        self._channels = bool(channels)
        self._controls = sorted(special | reasoning)
        self._reply_controls = sorted(special - reasoning)
        self._silent = {int(self._fast.token_to_id(name)) for name in special - reasoning - channels}
        self._opening = self._text([_USER])
        self._stop = self._find_stop()
        self._bridge, self.rewrites = self._find_bridge()
        self.stop_token_ids: tuple[int, ...] = self._stops()

    def first(self, content: str, system: str | None = None, tools: Tools = ()) -> list[int]:
        """Return the ids of a conversation's first turn, up to where the reply begins.

        Raises ConfigError when the template refuses it (some take no system message).
        """
        return self.render([content], system, tools)

    def render(self, messages: Sequence[Content], system: str | None = None, tools: Tools = ()) -> list[int]:
        """Return the ids of a whole conversation, up to where the next reply begins.

        ``messages`` are the turns of user (and tools) and model, the user first and last.
        """
        if tools and not self.tool_style.lists:
            messages = [f"{listing(tools, self.tool_style.calls)}\n\n{messages[0]}", *messages[1:]]
        return self._pieces(*self._worded(messages, system, tools))

    @cached_property
    def tool_style(self) -> ToolStyle:
        """The manner in which the template shows tools, found by rendering some.

        Raises ConfigError for a template that shows tools, and writes calls in a form that is not read here.
        """
        asked = {"role": "user", "content": _USER}
        lists = PROBE in (self._tried([asked], [_PROBE_TOOL]) or "")
        given = {"argument": "..."}
        called = [_called({"name": PROBE, "arguments": one}) for one in (given, json.dumps(given))]
        texts = [self._tried([asked, one], ending=False) for one in called]  # some want arguments as text
        written = next(filter(None, texts), "").removeprefix((self._tried([asked]) or "").rstrip())
        calls = recognise(written.partition(self._stop)[0] if self._stop else written)
        reply = called[0] if calls and calls.in_channels else {"role": "assistant", "content": _REPLY}
        result = {"role": "tool", "content": _SECOND}
        ways = [self._tried([asked, reply, result, *more]) for more in ([], [asked])]
        own = lists and all(way is not None and _SECOND in way for way in ways)
        if calls is None and lists:
            raise ConfigError(
                "the chat template writes calls of tools in a form that cannot be read",
                where=str(self._path),
                remedy='Set agent.tool_format = "box".',
            )
        marks = {name for name in self._added if calls and name in calls.example}
        self._silent -= {int(self._fast.token_to_id(name)) for name in marks}
        return ToolStyle(calls or TAGGED, lists, "tool" if own else "user")

    def _tried(self, chat: list[dict[str, Any]], tools: Any = None, *, ending: bool = True) -> str | None:
        """Return the text of a made-up conversation; None where the template has no place for it."""
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    chat, tools=tools, tokenize=False, add_generation_prompt=ending, **self._options
                )
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError):
            return None

    def bridge(self, observation: Content) -> list[int] | None:
        """Return the ids between a reply and the next one, None when the template rewrites history.

        A template may rewrite it always, or because of this observation; then ``render`` the conversation. A
        reply that was cut off, or ended with another stop token, needs ``close()`` before the bridge.
        """
        if self._bridge is None:
            return None
        text, mark = self._worded([_USER, _REPLY, observation], None)
        before = self._bridge.before
        return self._pieces(text[len(before) :], mark) if text.startswith(before) else None

    def close(self) -> list[int]:
        """Return the ids that end a turn whose reply does not end with them: the turn's stop token."""
        return [] if self._bridge is None else [self._bridge.stop]

    def opens_thought(self, prompt: Sequence[int]) -> bool:
        """Return whether the template opened a thought at the end of ``prompt``."""
        return opens_thought(self.decode(prompt[-_PROMPT_TAIL:], special=True))

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text; the names of control tokens in it are plain text too."""
        (spelled,), mark = self._spelled([_sound(text)], [self._controls])
        return self._pieces(spelled, mark)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of ``ids``, without special tokens unless ``special``.

        The marks around reasoning and channels always stay: :func:`visible_reply` needs them.
        """
        kept = list(ids) if special else [token for token in ids if token not in self._silent]
        return str(self._fast.decode(kept, skip_special_tokens=False))

    def _text(self, messages: Sequence[str], system: str | None = None) -> str:
        roles = ("user", "assistant")
        chat = [(roles[turn % 2], content) for turn, content in enumerate(messages)]
        return self._rendered([("system", system), *chat] if system is not None else chat)

    def _rendered(self, turns: Sequence[tuple[str, str]], tools: Tools = ()) -> str:
        chat = [
            _called(json.loads(content)) if role == "call" else {"role": role, "content": content}
            for role, content in turns
        ]
        shown = {"tools": list(tools)} if tools and self.tool_style.lists else {}
        try:
            rendered = self._tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True, **shown, **self._options
            )
        except (TemplateError, TypeError) as error:
            names = " -> ".join(message["role"] for message in chat)
            raise ConfigError(
                f"the chat template refuses a conversation of {names}: {error}",
                where=str(self._path),
                remedy="It has to take user and assistant in turn; mend the chat_template.jinja there.",
            ) from error
        return str(rendered)

    def _worded(self, messages: Sequence[Content], system: str | None, tools: Tools = ()) -> tuple[str, str]:
        """Return the rendered conversation and the mark in it, as ``_spelled`` does.

        The template gets each message unchanged, except for names of control tokens in it. In replies the
        marks of reasoning stay, since the template may cut there.
        """
        turns = [] if system is None else [("system", system)]
        turns += self._flat(messages, tools)
        names = [self._reply_controls if role == "assistant" else self._controls for role, _ in turns]
        parts, mark = self._spelled([_sound(text) for _, text in turns], names)
        roles = [role for role, _ in turns]
        return self._rendered(list(zip(roles, parts, strict=True)), tools), mark

    def _flat(self, messages: Sequence[Content], tools: Tools) -> Iterator[tuple[str, str]]:
        """Yield role and text of each message; results of tools are the user's where they have no role."""
        answered = True
        for turn, content in enumerate(messages):
            if isinstance(content, str) and turn % 2 and self._channels:
                said = self._from_channels(content, tools)
                answered = said[0][0] == "call"
                yield from said
            elif isinstance(content, str):
                yield ("user", "assistant")[turn % 2], content
            elif self.tool_style.results == "user" or not answered:
                yield "user", "\n".join(text for _, text in content)
            else:
                yield from content

    def _from_channels(self, reply: str, tools: Tools) -> list[tuple[str, str]]:
        """Return the calls of a reply in channels as JSON, or its answer: the template writes the headers."""
        calls: list[dict[str, Any]] = []
        if tools and self.tool_style.calls.in_channels:
            with suppress(Unreadable):
                calls = self.tool_style.calls.calls("", tools, reply)
        if calls and (thought := _ANALYSIS.search(reply)):
            calls[0]["thinking"] = thought[1]
        return [("call", json.dumps(call, ensure_ascii=False)) for call in calls] or [
            ("assistant", visible_reply(reply))
        ]

    def _spelled(self, parts: list[str], names: Sequence[Sequence[str]]) -> tuple[list[str], str]:
        """Break every name of a control token in ``parts``, part by part those in ``names``.

        Returns the parts, with a character in each name that occurs nowhere else, and that character ("" when
        no name occurs). The tokenizer's normaliser may form a name from other characters. Texts that hold
        every character of private use lose one of them.
        """
        texts = [self._normal(part, these) for part, these in zip(parts, names, strict=True)]
        if texts == parts and not any(_holds(part, these) for part, these in zip(parts, names, strict=True)):
            return parts, ""
        used = set[str]().union(*texts)
        mark = next((letter for letter in map(chr, _PRIVATE) if letter not in used), chr(_PRIVATE[0]))
        if mark in used:
            texts = [text.replace(mark, "\N{REPLACEMENT CHARACTER}") for text in texts]
        for index, these in enumerate(names):
            for name in these:
                while name in texts[index]:
                    texts[index] = texts[index].replace(name, name[0] + mark + name[1:])
        return texts, mark

    def _normal(self, text: str, names: Sequence[str]) -> str:
        """Return ``text``, or its normalised form where that holds a name."""
        normaliser = self._fast.normalizer
        normal = normaliser.normalize_str(text) if normaliser else text
        return normal if _holds(normal, names) else text

    def _pieces(self, text: str, mark: str) -> list[int]:
        """Encode ``text``; with marks in it, encode the pieces between them one by one."""
        pieces = text.split(mark) if mark else [text]
        return [token for piece in pieces for token in self._ids(piece)]

    def _ids(self, text: str) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def _find_stop(self) -> str:
        """Return the token that the template puts behind a reply, empty when it is not one token."""
        tail = self._text([_USER, _REPLY, _SECOND]).rpartition(_REPLY)[2]
        added = self._tokenizer.get_added_vocab()
        return max((word for word in added if tail.startswith(word)), key=len, default="")

    def _find_bridge(self) -> tuple[TurnBridge | None, str]:
        """Prove on two more turns that appending equals rendering, in text and in ids."""
        two = self._text([_USER, _REPLY, _SECOND])
        if not two.startswith(self._opening + _REPLY):
            return None, "the template changes a turn once it is answered"
        tail = two[len(self._opening) + len(_REPLY) :]
        if not self._stop:
            return None, f"the template ends a turn with {tail[:20]!r}, which is not one special token"
        bridge = TurnBridge(int(self._fast.token_to_id(self._stop)), self._opening + _REPLY + self._stop)
        three = self._text([_USER, _REPLY, _SECOND, _SECOND_REPLY, _THIRD])
        again = tail.replace(_SECOND, _THIRD)
        if three != two + _SECOND_REPLY + again:
            return None, "the template changes earlier turns as the conversation grows"
        cuts = self._thinking != "off" and self._history == "template"
        if cuts and self._text([_USER, _THOUGHTFUL, _SECOND]) != (self._opening + _THOUGHTFUL + tail):
            return None, "the template takes the reasoning out of earlier turns"
        appended = [bridge.stop, *self._ids(two[len(bridge.before) :])]
        if self._ids(two)[-len(appended) :] != appended:
            return None, "the tokenizer encodes the text after a reply differently when it stands alone"
        return bridge, ""

    def _stops(self) -> tuple[int, ...]:
        """Return the ids that end a reply, the template's end of a turn first where it is one of them.

        The end of a turn is not always the end of a reply: in templates with channels it ends each channel.
        Where the model's generation_config.json names ends, the tokenizer's own among them, but not that one,
        the reply goes on after it.
        """
        turn_end = [int(self._fast.token_to_id(self._stop))] if self._stop else []
        own = _as_list(self._tokenizer.eos_token_id)
        generation = self._path / "generation_config.json"
        named = (
            _as_list(json.loads(generation.read_text()).get("eos_token_id")) if generation.is_file() else []
        )
        trusted = named or (own if self._channels else [])
        if set(own) & set(trusted) and not set(turn_end) & set(trusted):
            if turn_end:
                ends = self._tokenizer.convert_ids_to_tokens(trusted)
                log.warning("turn_end_is_no_stop", turn_end=self._stop, stops=ends, path=str(self._path))
            turn_end = []
        ids = [*turn_end, *named, *own]
        if not ids:
            raise ConfigError(
                "no token ends a reply: the tokenizer names no end-of-sequence token",
                where=str(self._path),
                remedy="Add eos_token to tokenizer_config.json.",
            )
        return tuple(dict.fromkeys(ids))


def tokenizer_digest(directory: Path) -> str:
    """Return the SHA-256 of the files that decide a model directory's token ids, "" without such a file.

    Two hosts with the same digest mean the same text by a token id.
    """
    found = [path for name in _VOCABULARY if (path := directory / name).is_file()]
    if not found:
        return ""
    digest = hashlib.sha256()
    for path in found[:1] if found[0].name == _VOCABULARY[0] else found:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _called(call: dict[str, Any]) -> dict[str, Any]:
    """Return a call, and perhaps the ``thinking`` before it, as the message that templates take."""
    made = {"name": call["name"], "arguments": call["arguments"]}
    thinking = call.get("thinking", "")
    message = {"role": "assistant", "content": "", **({"thinking": thinking} if thinking else {})}
    return {**message, "tool_calls": [{"id": "probe0007", "type": "function", "function": made}]}


def _holds(text: str, names: Iterable[str]) -> bool:
    return any(name in text for name in names)


def _sound(text: str) -> str:
    """Return ``text`` with the halves of surrogate pairs joined, and those without a partner replaced."""
    if text.isascii() or not _SURROGATES.search(text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _as_list(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _class(path: Path) -> Any:
    """Return the tokenizer's class: the plain one where ``AutoTokenizer`` would choose it, else that.

    Importing AutoTokenizer imports torch, sklearn and pandas: four seconds and 400 MB in each process.
    """
    config = path / "config.json"
    try:
        names = json.loads((path / "tokenizer_config.json").read_bytes())
        model = json.loads(config.read_bytes()) if config.exists() else {"model_type": ""}
        plain = names["tokenizer_class"] in _PLAIN and "auto_map" not in names
        plain = plain and model["model_type"] in _TRUSTED
    except (OSError, ValueError, KeyError, TypeError):
        plain = False
    if plain:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _load(path: Path) -> Any:
    if not path.is_dir():
        raise ConfigError("the model directory does not exist", where=f"model.path = {str(path)!r}")
    try:
        tokenizer = _class(path).from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer can be read: {error}", where=str(path)) from error
    if not getattr(tokenizer, "is_fast", False):
        raise ConfigError(
            "the tokenizer has no fast form", where=str(path), remedy="Convert it to a tokenizer.json."
        )
    if not tokenizer.chat_template:
        raise ConfigError(
            "the tokenizer has no chat template",
            where=str(path),
            remedy="Add chat_template.jinja beside it, or choose an instruction-tuned model.",
        )
    return tokenizer
