"""``jsonl:PATH`` - one object a line, text in ``orig_doc`` or ``text`` (reference spec 8).

``id`` and ``skill`` are taken when they are there; other keys are metadata that no prompt shows. PATH may be
a directory: its files ``*.jsonl`` are read one after the other. Files ending in ``.gz`` are unpacked.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from engine.errors import ConfigError
from roles.designer.corpus.document import Document
from roles.designer.corpus.reading import WHERE, Reading, existing

_PATTERNS = ("*.jsonl", "*.jsonl.gz")


class _Line(msgspec.Struct):
    orig_doc: str | None = None
    text: str | None = None
    id: str | int | None = None
    skill: str | None = None


_DECODER = msgspec.json.Decoder(_Line)


def read(argument: str, reading: Reading) -> Iterator[Document]:
    """Yield the documents of all lines; a line that holds none is counted and named."""
    for path in _files(existing(argument)):
        yield from _file(path, reading)


def document(fields: dict[str, Any], place: str) -> Document | str:
    """Return the document in an object of the schema, or why there is none."""
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


def _file(path: Path, reading: Reading) -> Iterator[Document]:
    with cast("BinaryIO", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                found = _document(_DECODER.decode(line), f"{path.name}:{number}")
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                found = str(error)
            if isinstance(found, str):
                reading.skip(f"{path}, line {number}", found)
            else:
                yield found


def _document(line: _Line, place: str) -> Document | str:
    text = (line.orig_doc or line.text or "").strip()
    if not text:
        return "no text in orig_doc or text"
    return Document(str(place if line.id is None else line.id), text, line.skill or "")
