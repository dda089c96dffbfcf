"""Finds suite texts in what a model was trained on, by common sequences of words: pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

WORDS = 13
"""Words in a row that count as a copy, as for GPT-3. Of a text with fewer all count, from SHORTEST on."""
SHORTEST = 8
SHARED = 2
"""A sequence that more items share belongs to the form of the questions, and is no copy of one."""
_WORD = re.compile(r"\w+")


def ngrams(text: str) -> set[tuple[str, ...]]:
    """Return the sequences of ``WORDS`` words of a text, without case and punctuation."""
    words = _WORD.findall(text.lower())
    if len(words) < SHORTEST:
        return set()
    size = min(WORDS, len(words))
    return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)}


class Guard:
    """The texts of suites, by suite and item."""

    def __init__(self, texts: Mapping[str, Mapping[str, str]]) -> None:
        self._owners: dict[tuple[str, ...], set[tuple[str, str]]] = {}
        self._sizes: set[int] = set()
        for suite, items in texts.items():
            for item, text in items.items():
                for gram in ngrams(text):
                    self._owners.setdefault(gram, set()).add((suite, item))
                    self._sizes.add(len(gram))
        self._owners = {gram: owners for gram, owners in self._owners.items() if len(owners) <= SHARED}

    def found(self, text: str) -> set[tuple[str, str]]:
        """Return the suite and item of each text that has a sequence in common with ``text``."""
        words = _WORD.findall(text.lower())
        owners: set[tuple[str, str]] = set()
        for size in self._sizes:
            for start in range(len(words) - size + 1):
                owners |= self._owners.get(tuple(words[start : start + size]), set())
        return owners

    def count(self, sources: Mapping[str, Iterable[str]]) -> dict[str, dict[str, int]]:
        """Return suite -> source -> the number of items of which a text of the source has a part."""
        counted: dict[str, dict[str, int]] = {}
        for source, texts in sources.items():
            owners: set[tuple[str, str]] = set().union(*map(self.found, texts))
            for suite, _ in owners:
                by_source = counted.setdefault(suite, {})
                by_source[source] = by_source.get(source, 0) + 1
        return counted
