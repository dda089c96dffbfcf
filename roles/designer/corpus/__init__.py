"""Grounding documents: reading them from their sources, and sampling one for each attempt at a design.

A source is a line of the recipe (``designer.corpus``). Its scheme is an entry of the group ``spade.corpora``.
Several sources are mixed by weight.
"""

from roles.designer.corpus.document import NO_DOCUMENT as NO_DOCUMENT
from roles.designer.corpus.document import Document as Document
from roles.designer.corpus.document import cut as cut
from roles.designer.corpus.sampler import Corpus as Corpus
from roles.designer.corpus.sources import LoadedCorpus as LoadedCorpus
from roles.designer.corpus.sources import LoadedSource as LoadedSource
from roles.designer.corpus.sources import load as load
from roles.designer.corpus.sources import load_for as load_for
from roles.designer.corpus.sources import probe as probe
from roles.designer.corpus.sources import read_revisions as read_revisions
from roles.designer.corpus.sources import write_revisions as write_revisions
