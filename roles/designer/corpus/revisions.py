"""Which revisions of its sources a run reads, kept beside it: a resumed run reads the same documents."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from engine.errors import SpadeError
from engine.records.archive import replace

FILE = "corpus.json"


def read(directory: Path) -> dict[str, str]:
    """Return the revision of each source; nothing before the run has begun. Raises SpadeError for a file that
    cannot be understood.
    """
    path = directory / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {str(source): str(revision) for source, revision in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError) as error:
        raise SpadeError(
            f"{path}, which names the revisions of the corpus, cannot be understood: {error}.",
            remedy="Delete it: the run takes the revisions of today, and may get other documents.",
        ) from error


def write(directory: Path, revisions: Mapping[str, str]) -> None:
    """Keep ``revisions``, unless there are none. Raises OSError."""
    if revisions:
        directory.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dict(revisions), indent=1, sort_keys=True)
        replace(directory / FILE, f"{text}\n".encode(), durable=True)
