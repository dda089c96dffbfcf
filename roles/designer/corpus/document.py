"""Grounding documents: one document, cutting it to a number of tokens, and one pass over a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from engine.errors import ConfigError

WHERE = "designer.corpus"
_NAMED = 20


class LazyText(Protocol):
    """A text that is read when a design needs it."""

    def read(self) -> str:
        """Return the text. Raises SpadeError when it is no longer there."""


class Document(NamedTuple):
    """One grounding text.

    An empty ``skill`` suits every skill. ``text`` is empty where the text is ``stored`` elsewhere;
    :meth:`whole` returns it in either case.
    """

    id: str
    text: str
    skill: str = ""
    stored: LazyText | None = None

    def whole(self) -> str:
        """Return the text; reads a file where it is stored in one. Raises SpadeError."""
        return self.text if self.stored is None else self.stored.read()


NO_DOCUMENT = Document("", "")


class Encoder(Protocol):
    """The part of a tokenizer that cutting needs."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def cut(text: str, limit: int, tokens: Encoder) -> str:
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


class Reading:
    """One pass over one source.

    ``seed`` orders documents that have no order. ``longest`` bounds the characters of a document, so that a
    corpus fits into memory; the text for a prompt is cut by tokens later. ``pin`` is the revision to read
    where the source names none; a scheme with revisions sets ``revision``.
    """

    def __init__(self, *, seed: int = 0, longest: int = 1_000_000, pin: str = "") -> None:
        self.seed, self.longest, self.pin = seed, longest, pin
        self.revision = ""
        self.bad = 0
        self.named: list[str] = []

    def skip(self, where: str, why: str) -> None:
        """Count a place without a document; the first twenty are kept by name."""
        self.bad += 1
        if len(self.named) < _NAMED:
            self.named.append(f"{where}: {why}")


Scheme = Callable[[str, Reading], Iterator[Document]]
"""Yields the documents of the argument after the colon. Raises ConfigError when the source cannot be read."""


def existing(argument: str) -> Path:
    """Return the path that a source names. Raises ConfigError when it is not there."""
    path = Path(argument).expanduser()
    if not argument or not path.exists():
        raise ConfigError(
            f"the corpus does not exist: {argument or 'no path is given'}",
            where=WHERE,
            remedy="A relative path starts at the working directory.",
        )
    return path


def listed(argument: str) -> list[str]:
    """Return the names of a list with commas."""
    return [name for name in (part.strip() for part in argument.split(",")) if name]
