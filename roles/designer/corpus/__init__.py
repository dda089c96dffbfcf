"""Grounding documents: where they come from and which one a design gets.

A source is a line of the recipe (``designer.corpus``), its scheme a module here with a function
``read(argument, reading)``: ``seeds:``, ``jsonl:``, ``dir:``, ``pydoc:``, ``botocore:``, ``hf:``. Several
sources are mixed by weight.
"""

from roles.designer.corpus.document import NO_DOCUMENT, Document, Tokens, cut
from roles.designer.corpus.reading import Reading
from roles.designer.corpus.sampler import Corpus
from roles.designer.corpus.sources import Library, Shelf, load, load_for, probe

__all__ = [
    "NO_DOCUMENT",
    "Corpus",
    "Document",
    "Library",
    "Reading",
    "Shelf",
    "Tokens",
    "cut",
    "load",
    "load_for",
    "probe",
]
