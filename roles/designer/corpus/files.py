"""Documents in files: ``jsonl:PATH`` and ``dir:PATH``.

``jsonl:`` reads one object per line, with its text in ``orig_doc`` or ``text``; ``id`` and ``skill`` are used
when they are there, other keys are metadata that no prompt shows. PATH may be a directory: its files
``*.jsonl`` are read one after the other. Only the place of each line is kept in memory, and its text is read
when a design needs it; packed files (``.gz``) have no places, so the beginnings of their texts are kept.

``dir:`` reads every text file below a directory; the id of a document is its path there.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec

from engine.errors import ConfigError, SpadeError
from roles.designer.corpus.document import WHERE, Document, Reading, existing

_SUFFIXES = frozenset((".txt", ".md", ".rst", ".tex", ".py", ".html", ".org"))
_PATTERNS = ("*.jsonl", "*.jsonl.gz")


class _Line(msgspec.Struct):
    orig_doc: str | None = None
    text: str | None = None
    id: str | int | None = None
    skill: str | None = None


_DECODER = msgspec.json.Decoder(_Line)


def read_lines(argument: str, reading: Reading) -> Iterator[Document]:
    """Yield the documents of all lines; a line without one is counted and named."""
    for path in _files(existing(argument)):
        yield from _file(path, reading)


def read_directory(argument: str, reading: Reading) -> Iterator[Document]:
    """Yield the files by path; a file that is empty, unreadable or not UTF-8 is counted and named."""
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


def document(fields: dict[str, Any], place: str) -> Document | str:
    """Return the document in an object of the schema, or the reason why it has none."""
    try:
        return _document(msgspec.convert(fields, _Line), place)
    except msgspec.ValidationError as error:
        return str(error)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(file for pattern in _PATTERNS for file in path.rglob(pattern))
    if not found:
        raise ConfigError(f"no file in {path} is called {' or '.join(_PATTERNS)}", where=WHERE)
    return found


class _Place(NamedTuple):
    """The place of a line in its file, and the digest of its bytes."""

    path: Path
    offset: int
    size: int
    digest: bytes
    longest: int

    def read(self) -> str:
        """Return the text of the line. Raises SpadeError when the file has changed."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                line = file.read(self.size)
        except OSError as error:
            raise _changed(self.path, str(error)) from error
        if _digest(line) != self.digest:
            raise _changed(self.path, f"byte {self.offset}")
        found = _document(_DECODER.decode(line), "")
        assert isinstance(found, Document)
        return found.text[: self.longest]


def _file(path: Path, reading: Reading) -> Iterator[Document]:
    packed, offset = path.suffix == ".gz", 0
    for number, line in enumerate(_lines(path, packed=packed), start=1):
        place = _Place(path, offset, len(line), b"" if packed else _digest(line), reading.longest)
        offset += len(line)
        if not line.strip():
            continue
        try:
            found = _document(_DECODER.decode(line), f"{path.name}:{number}")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            found = str(error)
        if isinstance(found, str):
            reading.skip(f"{path}, line {number}", found)
        elif packed:
            yield found._replace(text=found.text[: reading.longest])
        else:
            yield found._replace(text="", stored=place)


def _lines(path: Path, *, packed: bool) -> Iterator[bytes]:
    try:
        with cast("BinaryIO", gzip.open(path, "rb")) if packed else path.open("rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(
            f"the corpus {path} cannot be read: {error}",
            where=WHERE,
            remedy="Fetch or pack the file again, or take it out of the list.",
        ) from error


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=8).digest()


def _changed(path: Path, where: str) -> SpadeError:
    return SpadeError(
        f"the corpus {path} has changed while the run reads from it ({where})",
        where=WHERE,
        remedy="Put the file back as it was, or run the same command again to read the new file.",
    )


def _document(line: _Line, place: str) -> Document | str:
    text = (line.orig_doc or line.text or "").strip()
    if not text:
        return "no text in orig_doc or text"
    return Document(str(place if line.id is None else line.id), text, line.skill or "")
