"""The program in a completion."""

from __future__ import annotations

import re
from collections.abc import Iterator

_THINK, _THINK_END = "<think>", "</think>"
_OPENING = re.compile(r"```[ \t]*([\w+.-]*)")
_PYTHON = frozenset(("python", "py", "python3"))


def extract(text: str) -> str:
    """Return the first complete fenced Python block after the last closing think tag.

    A fence without a language counts when none says Python; without any complete block the whole text
    after the tag is the program. A thought that does not end is followed by nothing. Lines end with a line
    feed, whatever ended them.
    """
    answer = text.replace("\r\n", "\n").rpartition(_THINK_END)[2]
    if answer.lstrip().startswith(_THINK):
        return ""
    blocks = list(_blocks(answer))
    for wanted in (_PYTHON, frozenset(("",))):
        for language, body in blocks:
            if language in wanted:
                return body.strip("\n")
    return answer.strip()


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (language, body) of each complete fenced block; looks at each line once.

    A search for the end from every opening fence would take minutes for a model that repeats itself.
    """
    language: str | None = None
    body: list[str] = []
    for line in text.split("\n"):
        bare = line.strip(" \t")
        if language is None:
            if opening := _OPENING.match(bare):
                language, body = opening[1].lower(), []
        elif bare == "```":
            yield language, "\n".join(body)
            language = None
        else:
            body.append(line)
