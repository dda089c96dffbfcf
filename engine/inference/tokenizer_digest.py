"""Whether two hosts mean the same by a token id."""

from __future__ import annotations

import hashlib
from pathlib import Path

_FILES = ("tokenizer.json", "vocab.json", "merges.txt")


def tokenizer_digest(directory: Path) -> str:
    """Return the SHA-256 of what decides a model directory's token ids, "" when there is no such file."""
    digest = hashlib.sha256()
    found = [path for name in _FILES if (path := directory / name).is_file()]
    if not found:
        return ""
    for path in found[:1] if found[0].name == _FILES[0] else found:
        digest.update(path.read_bytes())
    return digest.hexdigest()
