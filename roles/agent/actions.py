"""The action in a reply: pure text in, text out."""

from __future__ import annotations

import re

_TOKENS = re.compile(r"\\boxed\s*\{|\{|\}")
_THINK_END = "</think>"


def find_action(reply: str) -> str | None:
    r"""Return the inner text of the last complete ``\boxed{...}`` group of ``reply``, else None.

    Only the text after the last closing think tag counts: a tentative box inside the reasoning is not a
    move. "Last" is by opening brace among the groups whose braces balance, so an unfinished group at the
    end does not hide the one before it, and of nested groups the inner one is taken. Surrounding white
    space is removed; an empty group is the action "". Linear in the length of the reply.

    Differs from the reference, which takes the first group (reference spec 3.3 and 14.1, row 18).
    """
    answer = reply.rpartition(_THINK_END)[2]
    opened: list[int] = []  # start of the inner text of a boxed group, -1 for a plain brace
    best: tuple[int, int] | None = None
    for match in _TOKENS.finditer(answer):
        if match.group() != "}":
            opened.append(-1 if match.group() == "{" else match.end())
        elif opened:
            start = opened.pop()
            if start >= 0 and (best is None or start > best[0]):
                best = (start, match.start())
    return None if best is None else answer[best[0] : best[1]].strip()
