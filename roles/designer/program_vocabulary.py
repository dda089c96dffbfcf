"""The words of a program, by what they do: what works, what is shown, what is only said about it. Pure."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from engine.diversity.similarity import terms
from roles.designer.dead_code import unused

_LONGEST_NAME = 24
_PREFIX = re.compile(r"^[A-Za-z]{0,2}('''|\"\"\"|'|\")")
_QUIET = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING}
_LINE_ENDS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


class Anatomy(NamedTuple):
    """Stems of words. ``works``: names and short strings, which the code compares and keeps; ``shown``:
    longer strings, which are texts for the player; ``said``: comments, docstrings, declared metadata, the
    name of the class, and what nothing in the program reads.
    """

    works: frozenset[str]
    shown: frozenset[str]
    said: frozenset[str]


def dissect(source: str) -> Anatomy:
    """Return the words of a program; one that cannot be read has all its words in ``works``."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    except (tokenize.TokenError, SyntaxError, ValueError):
        return Anatomy(stems(source), frozenset(), frozenset())
    works, shown, said = list[str](), list[str](), list[str]()
    idle = unused(source)
    for token, declared in _marked(tokens):
        idly = idle.covers(token.start) or (token.type == tokenize.NAME and token.string in idle.names)
        if declared or idly or token.type == tokenize.COMMENT:
            said.append(token.string)
        elif token.type == tokenize.NAME:
            works.append(token.string)
        elif "STRING" in tokenize.tok_name[token.type]:
            text = _PREFIX.sub("", token.string).strip("'\"")
            (works if _is_name(token.string, text) else shown).append(text)
    return Anatomy(*(stems(" ".join(part)) for part in (works, shown, said)))


def stems(*texts: str) -> frozenset[str]:
    """Return the stems of all words of three letters or more."""
    return frozenset(stem(word) for text in texts for word in terms(text) if len(word) > 2 and word.isalpha())


def stem(word: str) -> str:
    """Return the word without a common English ending, so that *kites* and *kite* are one."""
    for ending in ("ingly", "edly", "ing", "ies", "ed", "es", "ly", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)].rstrip("e")
    return word.rstrip("e")


def _marked(tokens: Iterable[tokenize.TokenInfo]) -> Iterator[tuple[tokenize.TokenInfo, bool]]:
    """Yield each token with whether it is of a docstring or of the declared METADATA."""
    line: list[tokenize.TokenInfo] = []
    for token in tokens:
        if token.type in _QUIET:
            yield token, token.type == tokenize.COMMENT
        elif token.type in _LINE_ENDS:
            yield from ((part, _declares(line)) for part in line)
            line = []
        else:
            line.append(token)
    yield from ((part, _declares(line)) for part in line)


def _declares(line: list[tokenize.TokenInfo]) -> bool:
    """Whether a logical line is a lone string, or sets METADATA."""
    if all(token.type == tokenize.STRING for token in line):
        return True
    return len(line) > 1 and line[0].string == "METADATA" and line[1].string == "="


def _is_name(literal: str, text: str) -> bool:
    """Whether a string is a name that the code works with, and not a text."""
    formatted = "f" in literal.partition(text[:1] or "'")[0].lower()
    return not formatted and len(text) <= _LONGEST_NAME and len(text.split()) <= 2
