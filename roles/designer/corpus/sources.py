"""Reads the sources of a recipe's ``designer.corpus``.

The scheme of a source is an entry of the group ``spade.corpora``: a function ``read(argument, reading)`` that
yields documents. Packages of others add schemes in the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine import registry
from engine.config import Config, CorpusSource
from engine.errors import ConfigError, SpadeError
from engine.files import replace
from roles.designer.corpus.document import WHERE, Document, Reading, Scheme, listed

REVISIONS = "corpus.json"
_CHARACTERS_PER_TOKEN = 16
"""Characters kept of a document per token that a prompt may take; the exact cut is by tokens, later."""


@dataclass(frozen=True)
class LoadedSource:
    """The documents of one source, and its share of the draws (a weight, not yet normalised)."""

    source: str
    weight: float
    documents: tuple[Document, ...]


@dataclass(frozen=True)
class LoadedCorpus:
    """All documents that a run draws from.

    ``bad`` counts places without a document; the first of them are ``named``. ``revisions`` are pairs of a
    source and the revision that was read, for sources with revisions.
    """

    sources: tuple[LoadedSource, ...] = ()
    bad: int = 0
    named: tuple[str, ...] = ()
    revisions: tuple[tuple[str, str], ...] = ()

    @property
    def documents(self) -> int:
        """The number of documents."""
        return sum(len(source.documents) for source in self.sources)


def listed_sources(setting: str | Sequence[CorpusSource]) -> tuple[CorpusSource, ...]:
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
) -> LoadedCorpus:
    """Read all documents of ``setting`` and make their ids unique; blocks on files and imports.

    ``pins`` are the revisions to read where a source names none. Raises ConfigError for an unknown scheme, a
    source that cannot be read, and a source without a document.
    """
    seen: Counter[str] = Counter()
    loaded, bad, named, revisions = [], 0, list[str](), list[tuple[str, str]]()
    for item in listed_sources(setting):
        reading = Reading(seed=seed, longest=longest, pin=(pins or {}).get(item.source, ""))
        scheme, argument = _scheme(item.source)
        documents = tuple(_unique(scheme(argument, reading), seen))
        if not documents:
            raise _empty(item.source, reading)
        loaded.append(LoadedSource(item.source, item.weight, documents))
        bad += reading.bad
        named += reading.named
        revisions += [(item.source, reading.revision)] if reading.revision else []
    return LoadedCorpus(tuple(loaded), bad, tuple(named), tuple(revisions))


def load_for(config: Config, pins: Mapping[str, str] | None = None) -> LoadedCorpus:
    """Read the documents of a recipe; ``seeds:`` alone means the families of its warm start."""
    return load(
        _with_families(config),
        seed=config.run.seed,
        longest=config.designer.corpus_tokens * _CHARACTERS_PER_TOKEN,
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
        for item in listed_sources(config.designer.corpus)
    )


def _scheme(source: str) -> tuple[Scheme, str]:
    name, _, argument = source.partition(":")
    scheme: Scheme = registry.load(registry.CORPORA, name, where=WHERE)
    return scheme, argument


def _empty(source: str, reading: Reading) -> ConfigError:
    bad = f"; {reading.bad} places have none, the first: {reading.named[0]}" if reading.bad else ""
    return ConfigError(
        f"the corpus {source!r} has no document{bad}",
        where=WHERE,
        remedy="Mend or replace it, or leave documents out with corpus=off.",
    )


def _unique(documents: Iterable[Document], seen: Counter[str]) -> Iterable[Document]:
    """Append the number of its repetition to a repeated id, so that ids are unique."""
    for document in documents:
        seen[document.id] += 1
        again = seen[document.id]
        yield document if again == 1 else document._replace(id=f"{document.id}#{again}")


def read_seeds(argument: str, reading: Reading) -> Iterable[Document]:
    """Yield every text of the seed families with every noun; ``seeds:a,b`` names families."""
    from engine.nano import seeds

    for item in seeds.documents(listed(argument)):
        yield Document(item.id, item.text, item.skill)


def read_revisions(directory: Path) -> dict[str, str]:
    """Return the revisions that a run reads, by source; none before it has begun.

    Raises SpadeError for a file that cannot be decoded.
    """
    path = directory / REVISIONS
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise SpadeError(
            f"{path}, which names the revisions of the corpus, cannot be decoded: {error}.",
            remedy="Delete it: the run then takes the current revisions, and may get other documents.",
        ) from error


def write_revisions(directory: Path, revisions: Mapping[str, str]) -> None:
    """Store ``revisions`` beside the run, so that a resumed run reads the same documents. Raises OSError."""
    if revisions:
        directory.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(dict(revisions), order="sorted"), indent=1)
        replace(directory / REVISIONS, text + b"\n", durable=True)
