"""From a recipe's ``designer.corpus`` to documents on shelves, one shelf a source."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from engine.config import Config, CorpusSource
from engine.errors import ConfigError
from roles.designer.corpus.document import Document
from roles.designer.corpus.reading import WHERE, Reading, Scheme

SCHEMES = ("seeds", "jsonl", "dir", "pydoc", "botocore", "hf")
_MODULES = {"dir": "directory"}
# Characters kept of a document for each token that a design may get of it: what is cut by tokens later.
_CHARACTERS_A_TOKEN = 16


@dataclass(frozen=True)
class Shelf:
    """The documents of one source, and its share of the draws (a weight, not yet normalised)."""

    source: str
    weight: float
    documents: tuple[Document, ...]


@dataclass(frozen=True)
class Library:
    """Everything a run draws from. ``bad`` places held no document; the first of them are ``named``.
    ``revisions`` are pairs of a source and the revision of it that was read, for sources that have any.
    """

    shelves: tuple[Shelf, ...] = ()
    bad: int = 0
    named: tuple[str, ...] = ()
    revisions: tuple[tuple[str, str], ...] = ()

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return sum(len(shelf.documents) for shelf in self.shelves)


def sources(setting: str | Sequence[CorpusSource]) -> tuple[CorpusSource, ...]:
    """Return the sources of a setting; none for an empty text."""
    if isinstance(setting, str):
        return (CorpusSource(source=setting),) if setting else ()
    return tuple(setting)


def load(
    setting: str | Sequence[CorpusSource],
    *,
    seed: int = 0,
    longest: int = 1_000_000,
    pins: Mapping[str, str] | None = None,
) -> Library:
    """Read all documents that ``setting`` names, ids made unique; blocks on files and imports. ``pins`` are
    revisions to read of sources that name none.

    Raises ConfigError for an unknown scheme, for what is not there, and for a source without any document.
    """
    seen: Counter[str] = Counter()
    shelves, bad, named, revisions = [], 0, list[str](), list[tuple[str, str]]()
    for item in sources(setting):
        reading = Reading(seed=seed, longest=longest, pin=(pins or {}).get(item.source, ""))
        scheme, argument = _scheme(item.source)
        documents = tuple(_unique(scheme(argument, reading), seen))
        if not documents:
            raise _empty(item.source, reading)
        shelves.append(Shelf(item.source, item.weight, documents))
        bad += reading.bad
        named += reading.named
        revisions += [(item.source, reading.revision)] if reading.revision else []
    return Library(tuple(shelves), bad, tuple(named), tuple(revisions))


def load_for(config: Config, pins: Mapping[str, str] | None = None) -> Library:
    """Read the documents of a recipe; ``seeds:`` alone means the families of its warm start."""
    return load(
        _with_families(config),
        seed=config.run.seed,
        longest=config.designer.corpus_tokens * _CHARACTERS_A_TOKEN,
        pins=pins,
    )


def probe(config: Config) -> None:
    """Check that every source of a recipe yields a document, reading no further than the first.

    Raises ConfigError as :func:`load` does.
    """
    for item in _with_families(config):
        reading = Reading(seed=config.run.seed)
        scheme, argument = _scheme(item.source)
        if next(iter(scheme(argument, reading)), None) is None:
            raise _empty(item.source, reading)


def _with_families(config: Config) -> tuple[CorpusSource, ...]:
    families = ",".join(config.warmstart.families)
    return tuple(
        CorpusSource(source=f"seeds:{families}", weight=item.weight) if item.source == "seeds:" else item
        for item in sources(config.designer.corpus)
    )


def _scheme(source: str) -> tuple[Scheme, str]:
    name, colon, argument = source.partition(":")
    if not colon or name not in SCHEMES:
        raise ConfigError(
            f"unknown corpus source {source!r}",
            where=WHERE,
            remedy=f"It begins with one of {', '.join(f'{known}:' for known in SCHEMES)}.",
        )
    # One module a scheme, imported only when a recipe asks for it.
    module = importlib.import_module(f"roles.designer.corpus.{_MODULES.get(name, name)}")
    scheme: Scheme = module.read
    return scheme, argument


def _empty(source: str, reading: Reading) -> ConfigError:
    bad = f"; {reading.bad} places hold none, the first: {reading.named[0]}" if reading.bad else ""
    return ConfigError(
        f"the corpus {source!r} holds no document{bad}",
        where=WHERE,
        remedy="Mend or replace it, or leave documents out with corpus=off.",
    )


def _unique(documents: Iterable[Document], seen: Counter[str]) -> Iterable[Document]:
    """Give a repeated id the number of its repetition, so that every document can be named."""
    for document in documents:
        seen[document.id] += 1
        again = seen[document.id]
        yield document if again == 1 else document._replace(id=f"{document.id}#{again}")
