"""``dir:PATH`` - every text file below a directory; its path there is the document's id."""

from __future__ import annotations

from collections.abc import Iterator

from engine.errors import ConfigError
from roles.designer.corpus.document import Document
from roles.designer.corpus.reading import WHERE, Reading, existing

_SUFFIXES = frozenset((".txt", ".md", ".rst", ".tex", ".py", ".html", ".org"))


def read(argument: str, reading: Reading) -> Iterator[Document]:
    """Yield the files by path; one that is empty, unreadable or no UTF-8 is counted and named."""
    root = existing(argument)
    if not root.is_dir():
        raise ConfigError(f"{root} is no directory", where=WHERE, remedy="One file of lines is jsonl:PATH.")
    for path in sorted(root.rglob("*")):
        if path.suffix.lower() not in _SUFFIXES or not path.is_file():
            continue
        try:
            with path.open(encoding="utf-8") as file:
                text = file.read(reading.longest).strip()
        except (OSError, UnicodeDecodeError) as error:
            reading.skip(str(path), str(error))
            continue
        if text:
            yield Document(path.relative_to(root).as_posix(), text)
        else:
            reading.skip(str(path), "empty")
