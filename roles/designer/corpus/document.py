"""One grounding document, and cutting it to a number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Stored(Protocol):
    """A text that stays where it is until a design needs it."""

    def read(self) -> str:
        """Return the text. Raises SpadeError when it is not there any more."""


class Document(NamedTuple):
    """One grounding text. ``skill`` empty: it suits every skill. ``text`` is empty where the text is
    ``stored`` elsewhere: :meth:`whole` returns it in either case.
    """

    id: str
    text: str
    skill: str = ""
    stored: Stored | None = None

    def whole(self) -> str:
        """Return the text; reads a file where it is stored in one. Raises SpadeError."""
        return self.text if self.stored is None else self.stored.read()


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
