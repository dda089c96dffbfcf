"""One grounding document, and cutting it to a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Document(NamedTuple):
    """One grounding text. ``skill`` empty: it suits every skill."""

    id: str
    text: str
    skill: str = ""


NO_DOCUMENT = Document("", "")


class Tokens(Protocol):
    """What cutting needs from a tokenizer."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def cut(text: str, limit: int, tokens: Tokens) -> str:
    """Return the longest prefix of ``text``, up to a word, that encodes to at most ``limit`` tokens."""
    if limit <= 0:
        return ""
    ids = tokens.encode(text)
    keep = limit
    while len(ids) > limit:
        text = tokens.decode(ids[:keep]).rstrip("\ufffd")
        head, space, _ = text.rpartition(" ")
        text = head if space and head.strip() else text
        ids = tokens.encode(text)
        keep = min(keep, len(ids)) - 1
    return text
