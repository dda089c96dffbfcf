"""Grounding documents: where they come from and which one a design gets.

A source is a line of the recipe (``designer.corpus``):

``""``                no documents (the no-corpus ablation)
``seeds:``            the documents of the seed families (nano); ``seeds:a,b`` names families
``jsonl:PATH``        one object a line, text in ``text`` or ``orig_doc``, optional ``id`` and ``skill``
``dir:PATH``          every text file below a directory
``pydoc:a,b.c``       the documentation of Python modules and of what they export
"""

from __future__ import annotations

import importlib
import inspect
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from engine.errors import ConfigError

_TEXT_SUFFIXES = {".txt", ".md", ".rst", ".tex", ".py"}
_SHORTEST_DOCSTRING = 200


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


class _Line(msgspec.Struct):
    text: str | None = None
    orig_doc: str | None = None
    id: str | int | None = None
    skill: str = ""


def _seeds(argument: str) -> Iterator[Document]:
    from engine import seeds

    names = [name.strip() for name in argument.split(",") if name.strip()]
    yield from (Document(item.id, item.text, item.skill) for item in seeds.documents(names))


def _jsonl(argument: str) -> Iterator[Document]:
    path = _existing(Path(argument))
    decoder = msgspec.json.Decoder(_Line)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                item = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"a corpus line is not an object with a text: {error}",
                    where=f"{path}, line {number}",
                    remedy="correct or remove the line",
                ) from error
            text = (item.orig_doc or item.text or "").strip()
            if text:
                yield Document(
                    str(item.id if item.id is not None else f"{path.name}:{number}"), text, item.skill
                )


def _directory(argument: str) -> Iterator[Document]:
    root = _existing(Path(argument))
    for path in sorted(root.rglob("*")):
        if path.suffix in _TEXT_SUFFIXES and path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace").strip()
            if text:
                yield Document(path.relative_to(root).as_posix(), text)


def _pydoc(argument: str) -> Iterator[Document]:
    for name in filter(None, (part.strip() for part in argument.split(","))):
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise ConfigError(
                f"the corpus names a Python module that cannot be imported: {name}",
                where="designer.corpus",
                remedy="install it or take it out of the list",
            ) from error
        yield from _documented(name, module)


def _documented(name: str, module: Any) -> Iterator[Document]:
    parts = [(name, module)]
    exported = getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]
    for key in sorted(exported):
        member = getattr(module, key, None)
        if inspect.isclass(member) or inspect.isroutine(member):
            parts.append((f"{name}.{key}", member))
    seen: set[str] = set()
    for label, member in parts:
        text = inspect.getdoc(member) or ""
        if len(text) >= _SHORTEST_DOCSTRING and text not in seen:
            seen.add(text)
            yield Document(label, f"{label}\n\n{text}")


_SCHEMES: dict[str, Callable[[str], Iterable[Document]]] = {
    "seeds": _seeds,
    "jsonl": _jsonl,
    "dir": _directory,
    "pydoc": _pydoc,
}


def _existing(path: Path) -> Path:
    if not path.exists():
        raise ConfigError(
            f"the corpus does not exist: {path}", where="designer.corpus", remedy="give its path"
        )
    return path


def load(source: str) -> list[Document]:
    """Read the documents that ``source`` names; blocks on files and imports.

    Raises ConfigError for an unknown scheme, a missing path, a broken line, or no document at all.
    """
    if not source:
        return []
    scheme, colon, argument = source.partition(":")
    if not colon or scheme not in _SCHEMES:
        known = ", ".join(f"{name}:" for name in _SCHEMES)
        raise ConfigError(
            f"unknown corpus source {source!r}", where="designer.corpus", remedy=f"use one of {known}"
        )
    documents = _unique(_SCHEMES[scheme](argument))
    if not documents:
        raise ConfigError(f"the corpus {source!r} holds no document", where="designer.corpus")
    return documents


def _unique(documents: Iterable[Document]) -> list[Document]:
    """Give a repeated id the number of its repetition, so that every document can be named."""
    seen: Counter[str] = Counter()
    kept = []
    for document in documents:
        seen[document.id] += 1
        again = seen[document.id]
        kept.append(document if again == 1 else document._replace(id=f"{document.id}#{again}"))
    return kept


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


class Corpus:
    """Deals documents: no document comes back for a skill before all its others were dealt.

    Instead of a shuffled deck it counts how often each was used and draws among the least used: the same
    thing, but the counts can be told from the facts on the bus after a restart.
    """

    def __init__(self, documents: Sequence[Document], *, limit: int, tokens: Tokens) -> None:
        self._documents = {document.id: document for document in documents}
        self._limit, self._tokens = limit, tokens
        self._used: Counter[str] = Counter()
        self._by_skill: dict[str, list[str]] = defaultdict(list)
        for document in documents:
            self._by_skill[document.skill].append(document.id)

    def __len__(self) -> int:
        return len(self._documents)

    def note_used(self, document: str) -> None:
        """Count a use that another life of this role made."""
        if document in self._documents:
            self._used[document] += 1

    def draw(self, skill: str, rng: random.Random) -> Document:
        """Return a least used document for ``skill``, cut to the token limit; NO_DOCUMENT without a corpus.

        Documents of the skill come first, then those of no skill, then any.
        """
        candidates = self._by_skill.get(skill) or self._by_skill.get("") or list(self._documents)
        if not candidates:
            return NO_DOCUMENT
        fewest = min(self._used[candidate] for candidate in candidates)
        chosen = rng.choice([candidate for candidate in candidates if self._used[candidate] == fewest])
        self._used[chosen] += 1
        document = self._documents[chosen]
        return document._replace(text=cut(document.text, self._limit, self._tokens))

    def get(self, document: str) -> Document:
        """Return a document by id, cut to the limit; NO_DOCUMENT when it is not in the corpus."""
        found = self._documents.get(document, NO_DOCUMENT)
        return found._replace(text=cut(found.text, self._limit, self._tokens))
