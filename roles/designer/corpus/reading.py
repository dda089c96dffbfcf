"""What a scheme is given to read with, and how it reports what it could not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from engine.errors import ConfigError
from roles.designer.corpus.document import Document

_NAMED = 20
WHERE = "designer.corpus"


class Reading:
    """One pass over one source. ``seed`` orders what has no order; ``longest`` bounds the characters of a
    document, so that a corpus fits into memory (what a design gets is cut by tokens later). ``pin`` is the
    revision to read where the source names none; a scheme that knows revisions sets ``revision``.
    """

    def __init__(self, *, seed: int = 0, longest: int = 1_000_000, pin: str = "") -> None:
        self.seed, self.longest, self.pin = seed, longest, pin
        self.revision = ""
        self.bad = 0
        self.named: list[str] = []

    def skip(self, where: str, why: str) -> None:
        """Count a place that holds no document; the first of them are kept by name."""
        self.bad += 1
        if len(self.named) < _NAMED:
            self.named.append(f"{where}: {why}")


# Documents of the argument behind the colon. Raises ConfigError when there is nothing to read at all.
Scheme = Callable[[str, Reading], Iterator[Document]]


def existing(argument: str) -> Path:
    """Return the path that a source names. Raises ConfigError when it is not there."""
    path = Path(argument).expanduser()
    if not argument or not path.exists():
        raise ConfigError(
            f"the corpus does not exist: {argument or 'no path is given'}",
            where=WHERE,
            remedy="A relative path starts at the working directory.",
        )
    return path


def listed(argument: str) -> list[str]:
    """Return the names of a list with commas."""
    return [name for name in (part.strip() for part in argument.split(",")) if name]
