"""Grounding documents: reading them from their sources, and sampling one for each attempt at a design.

A source is a line of the recipe (``designer.corpus``). Its scheme is an entry of the group ``spade.corpora``.
Several sources are mixed by weight.
"""

from roles.designer.corpus.document import NO_DOCUMENT, Document, Encoder, Reading, cut
from roles.designer.corpus.sampler import Corpus
from roles.designer.corpus.sources import (
    LoadedCorpus,
    LoadedSource,
    load,
    load_for,
    probe,
    read_revisions,
    write_revisions,
)

__all__ = [
    "NO_DOCUMENT",
    "Corpus",
    "Document",
    "Encoder",
    "LoadedCorpus",
    "LoadedSource",
    "Reading",
    "cut",
    "load",
    "load_for",
    "probe",
    "read_revisions",
    "write_revisions",
]
