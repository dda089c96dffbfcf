"""The program in a completion."""

from __future__ import annotations

import re

_THINK_END = "</think>"
_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+.-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.DOTALL | re.MULTILINE)
_PYTHON = frozenset(("python", "py", "python3"))


def extract(text: str) -> str:
    """Return the first complete fenced Python block after the last closing think tag.

    A fence without a language counts when none says Python; without any complete block the whole text
    after the tag is the program.
    """
    answer = text.rpartition(_THINK_END)[2]
    blocks = [(match[1].lower(), match[2]) for match in _FENCE.finditer(answer)]
    for wanted in (_PYTHON, frozenset(("",))):
        for language, body in blocks:
            if language in wanted:
                return body.strip("\n")
    return answer.strip()
