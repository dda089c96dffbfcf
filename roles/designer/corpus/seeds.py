"""``seeds:`` - the documents of the seed families; ``seeds:a,b`` names families."""

from __future__ import annotations

from collections.abc import Iterator

from roles.designer.corpus.document import Document
from roles.designer.corpus.reading import Reading, listed


def read(argument: str, reading: Reading) -> Iterator[Document]:
    """Yield every text of the families with every noun."""
    from engine import seeds

    for item in seeds.documents(listed(argument)):
        yield Document(item.id, item.text, item.skill)
