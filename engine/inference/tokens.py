"""Text to token ids and back for a chat model, and the segments a conversation is trained as.

Contexts grow by appending ids; nothing that was sampled is ever tokenised again (invariant I3). What the
chat template puts between a reply and the next one (the bridge) is found once, from the template itself,
and verified; a template that rewrites earlier turns has no bridge, and each turn opens a new segment.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bus.messages import Segment, Span
from engine.errors import ConfigError
from engine.inference.completion import Completion

Thinking = Literal["off", "on", "unset"]

_USER, _REPLY = "Qx7 first words", "Rx7 answer words"
_SECOND, _SECOND_REPLY = "Sx7 second words", "Tx7 more words"
_THIRD = "Ux7 third words"
_MARK = "Mx7q{}x7M"


@dataclass(frozen=True)
class Bridge:
    """``stop`` is the id that ends a reply. What follows it up to the next reply is what the template
    renders after the first ``skip`` characters of a known first turn, its reply and the stop token."""

    stop: int
    skip: int


class ChatTokens:
    """The tokenizer and chat template of a model directory.

    ``thinking`` is handed to the template as ``enable_thinking`` (``unset``: not at all). ``rewrites`` says
    why there is no bridge, empty when there is one. Raises ConfigError when the directory has no usable
    tokenizer or template.
    """

    def __init__(self, path: Path | str, *, thinking: Thinking = "unset") -> None:
        self._tokenizer = _load(Path(path))
        self._fast = self._tokenizer.backend_tokenizer
        self._options: dict[str, bool] = {} if thinking == "unset" else {"enable_thinking": thinking == "on"}
        self._texts = copy.deepcopy(self._fast)  # a copy: the switch is the tokenizer's state
        self._texts.encode_special_tokens = True
        added = self._tokenizer.added_tokens_decoder.values()
        self._specials = [str(token) for token in added if token.special and str(token)]
        self._opening = self._text([_USER])
        self._bridge, self.rewrites = self._find_bridge()
        self.stop_token_ids: tuple[int, ...] = self._stops(Path(path))

    def first(self, content: str, system: str | None = None) -> list[int]:
        """Return the ids of a conversation's first turn, up to where the reply begins."""
        return self.render([content], system)

    def render(self, messages: Sequence[str], system: str | None = None) -> list[int]:
        """Return the ids of a whole conversation, up to where the next reply begins.

        ``messages`` are what the user and the model said in turn, the user first and last.
        """
        return self._rendered(messages, system)

    def bridge(self, observation: str) -> list[int] | None:
        """Return the ids to append after a reply that ended with its stop token, so that the next reply
        may begin; None when the template rewrites history (then ``render`` the conversation anew).

        A reply that was cut off has no stop token: append ``close()`` to it first.
        """
        if self._bridge is None:
            return None
        return self._rendered([_USER, _REPLY, observation], None, skip=self._bridge.skip)

    def close(self) -> list[int]:
        """Return the ids that end a reply which was cut off for length: the turn's stop token."""
        return [] if self._bridge is None else [self._bridge.stop]

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text; the names of special tokens in it are plain text too."""
        return self._plain(text) if self._holds_special([text]) else self._ids(text)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of ``ids``, without special tokens unless ``special``."""
        return str(self._fast.decode(list(ids), skip_special_tokens=not special))

    def _text(self, messages: Sequence[str], system: str | None = None) -> str:
        chat = [] if system is None else [{"role": "system", "content": system}]
        roles = ("user", "assistant")
        chat += [{"role": roles[turn % 2], "content": content} for turn, content in enumerate(messages)]
        rendered = self._tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, **self._options
        )
        return str(rendered)

    def _rendered(self, messages: Sequence[str], system: str | None, skip: int = 0) -> list[int]:
        """Encode the rendered conversation from character ``skip`` on.

        Where a message holds the name of a special token, each message is encoded on its own, as text: the
        template is rendered around marks, which are then replaced. Elsewhere the text is encoded in one go.
        """
        parts = list(messages) if system is None else [system, *messages]
        if not self._holds_special(parts):
            return self._ids(self._text(messages, system)[skip:])
        marks = [part if part in (_USER, _REPLY) else _MARK.format(index) for index, part in enumerate(parts)]
        text = self._text(marks[len(parts) - len(messages) :], None if system is None else marks[0])[skip:]
        ids: list[int] = []
        for mark, part in zip(marks, parts, strict=True):
            before, found, rest = text.partition(mark)
            if found:
                ids += [*self._ids(before), *self._plain(part)]
                text = rest
        return ids + self._ids(text)

    def _holds_special(self, parts: Sequence[str]) -> bool:
        return any(special in part for part in parts for special in self._specials)

    def _ids(self, text: str) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=False).ids)

    def _plain(self, text: str) -> list[int]:
        return list(self._texts.encode(text, add_special_tokens=False).ids)

    def _find_bridge(self) -> tuple[Bridge | None, str]:
        """Find the stop token and prove on two more turns that appending equals rendering."""
        two = self._text([_USER, _REPLY, _SECOND])
        if not two.startswith(self._opening + _REPLY):
            return None, "the template changes a turn once it is answered"
        tail = two[len(self._opening) + len(_REPLY) :]
        stop = max(
            (word for word in self._tokenizer.get_added_vocab() if tail.startswith(word)), key=len, default=""
        )
        if not stop:
            return None, f"the template ends a turn with {tail[:20]!r}, which is not one special token"
        skip = len(self._opening) + len(_REPLY) + len(stop)
        bridge = Bridge(int(self._fast.token_to_id(stop)), skip)
        three = self._text([_USER, _REPLY, _SECOND, _SECOND_REPLY, _THIRD])
        again = tail.replace(_SECOND, _THIRD)
        if three != two + _SECOND_REPLY + again:
            return None, "the template changes earlier turns as the conversation grows"
        return bridge, ""

    def _stops(self, path: Path) -> tuple[int, ...]:
        ids: list[int] = [] if self._bridge is None else [self._bridge.stop]
        generation = path / "generation_config.json"
        if generation.is_file():
            ids += _as_list(json.loads(generation.read_text()).get("eos_token_id"))
        ids += _as_list(self._tokenizer.eos_token_id)
        if not ids:
            raise ConfigError(
                "no token ends a reply: the tokenizer names no end-of-sequence token",
                where=str(path),
                remedy="Add eos_token to tokenizer_config.json.",
            )
        return tuple(dict.fromkeys(ids))


class SegmentBuilder:
    """Collects what a conversation's model really saw, as training segments; pure.

    ``context`` is at any time the prompt of the next completion. Call ``prompt`` for what the world adds,
    ``completion`` for what the model adds, ``rewrite`` when the context is replaced as a whole.
    """

    def __init__(self) -> None:
        self._closed: list[Segment] = []
        self._reset([])

    @property
    def context(self) -> list[int]:
        """The ids the model sees next (a copy)."""
        return list(self._tokens)

    def __len__(self) -> int:
        """The length of the context."""
        return len(self._tokens)

    def prompt(self, ids: Iterable[int]) -> None:
        """Append ids that were not sampled."""
        self._append(list(ids), None)

    def completion(self, completion: Completion) -> None:
        """Append sampled ids with their log-probs and versions.

        Raises ValueError when the spans do not cover exactly the tokens.
        """
        _check_cover(completion)
        offset = len(self._tokens)
        for span in completion.spans:
            self._extend_span(span.version, offset + span.start, offset + span.stop)
        self._append(completion.tokens, completion.logprobs)
        if completion.tokens:
            self._sampled_to = len(self._tokens)

    def rewrite(self, ids: Iterable[int]) -> None:
        """Replace the context: what was sampled so far becomes a closed segment."""
        self._close()
        self._reset(list(ids))

    def segments(self) -> tuple[Segment, ...]:
        """Return all segments that hold sampled tokens, each cut after its last sampled token."""
        current = self._current()
        return (*self._closed, current) if current else tuple(self._closed)

    def _reset(self, ids: list[int]) -> None:
        self._tokens: list[int] = ids
        self._mask: list[int] = [0] * len(ids)
        self._logprobs: list[float] = [0.0] * len(ids)
        self._spans: list[Span] = []
        self._sampled_to = 0

    def _append(self, ids: list[int], logprobs: list[float] | None) -> None:
        self._tokens += ids
        self._mask += [0 if logprobs is None else 1] * len(ids)
        self._logprobs += [0.0] * len(ids) if logprobs is None else logprobs

    def _extend_span(self, version: int, start: int, stop: int) -> None:
        if start == stop:
            return
        if self._spans and self._spans[-1].version == version and self._spans[-1].stop == start:
            start = self._spans.pop().start
        self._spans.append(Span(version, start, stop))

    def _close(self) -> None:
        current = self._current()
        if current:
            self._closed.append(current)

    def _current(self) -> Segment | None:
        if not self._sampled_to:
            return None
        end = self._sampled_to
        return Segment(
            tokens=np.asarray(self._tokens[:end], dtype="<i4").tobytes(),
            mask=np.asarray(self._mask[:end], dtype="u1").tobytes(),
            logprobs=np.asarray(self._logprobs[:end], dtype="<f4").tobytes(),
            spans=tuple(self._spans),
        )


def _check_cover(completion: Completion) -> None:
    position = 0
    for span in completion.spans:
        if span.start != position or span.stop < span.start:
            raise ValueError(f"spans {completion.spans} leave a gap at {position}")
        position = span.stop
    if not position == len(completion.tokens) == len(completion.logprobs):
        raise ValueError(
            f"{len(completion.tokens)} tokens, {len(completion.logprobs)} log-probs, spans to {position}"
        )


def _as_list(value: int | list[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _load(path: Path) -> Any:
    from transformers import AutoTokenizer

    if not path.is_dir():
        raise ConfigError("the model directory does not exist", where=f"model.path = {str(path)!r}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
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
