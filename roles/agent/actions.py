"""Finds the action in a reply: pure, text in, text out."""

from __future__ import annotations

import json
import re

from engine.inference.replies import visible_reply

_TOKENS = re.compile(r"\\boxed\s*\{|\{|\}")
_BOX = re.compile(r"\\boxed\s*\{\s*(?=[{\[])")
_FENCE = re.compile(r"^```(json)?[ \t]*$", re.MULTILINE)
_TEXT = re.compile(r"\S|\Z")
_BEGINS = re.compile(r"^[ \t]*(?=[{\[])", re.MULTILINE)
_MARKS = ("<tool_call>", "<answer>")
_PLACES = 64
_decoder = json.JSONDecoder()


def find_action(reply: str, *, thought_open: bool = False) -> str | None:
    r"""Return the inner text of the last complete ``\boxed{...}`` group of ``reply``, else None.

    Only the text outside reasoning counts (:func:`visible_reply`, which explains ``thought_open``): a
    tentative box inside the reasoning is not a move, whether the reasoning ends or not. "Last" is by opening
    brace among the groups whose braces balance, so an unfinished group at the end does not hide the one
    before it, and of nested groups the inner one is taken. Surrounding white space is removed; an empty group
    is the action "". Linear in the length of the reply.

    Differs from the reference, which takes the first group (reference spec 3.3 and 14.1, row 18).
    """
    answer = visible_reply(reply, thought_open=thought_open)
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


def find_call(reply: str, *, thought_open: bool = False) -> str | None:
    r"""Return the part of ``reply`` that goes to a tool environment, None when it holds nothing of the kind.

    It is the whole text outside reasoning (:func:`visible_reply`) when that holds ``<tool_call>`` or
    ``<answer>``, is JSON or a fence of it. Else it is the JSON of the last box (whose strings may
    hold braces that do not balance), the box's text, or JSON that begins a fence or a line.
    """
    answer = visible_reply(reply, thought_open=thought_open).strip()
    if any(mark in answer for mark in _MARKS) or _json(answer, 0) == answer:
        return answer
    for match in reversed([*_BOX.finditer(answer)][-_PLACES:]):
        found = _json(answer, match.end())
        if found is not None and answer[match.end() + len(found) :].lstrip().startswith("}"):
            return found
    boxed = find_action(answer)
    if boxed is not None:
        return boxed
    for starts in (_fenced(answer), [match.end() for match in _BEGINS.finditer(answer)]):
        for start in reversed(starts[-_PLACES:]):
            found = _json(answer, _TEXT.search(answer, start).start())  # type: ignore[union-attr]
            if found is not None:
                return found
    return None


def _fenced(text: str) -> list[int]:
    """Return where the inside of each closed fence begins, in order; linear in the length of ``text``."""
    found: list[int] = []
    opened = -1
    for match in _FENCE.finditer(text):
        if opened < 0:
            opened = match.end()
        elif match.group(1) is None:
            found.append(opened)
            opened = -1
    return found


def _json(text: str, start: int) -> str | None:
    """Return the text of the JSON object or list at ``start``, None when there is none."""
    if text[start : start + 1] not in ("{", "["):
        return None
    try:
        return text[start : _decoder.raw_decode(text, start)[1]]
    except (ValueError, RecursionError):
        return None
