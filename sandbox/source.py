"""The program in a model's reply."""

from __future__ import annotations

import ast
import re
import threading
import warnings
from typing import NamedTuple

from markdown_it import MarkdownIt

THINK, THINK_END = "<think>", "</think>"
_TAG = re.compile(r"(?:python|py)[\d.]*|pycon|python-repl|ipython|sage", re.IGNORECASE)
_GAME = re.compile(r"^[ \t]*class[ \t]+\w*Env\b", re.MULTILINE)
_PROMPT = re.compile(r"^(?:>>>|\.\.\.)(?: |$)", re.MULTILINE)
_FENCE = re.compile(r" {0,3}(?:```|~~~)")
_LONGEST, _CANDIDATES, _REJOINED = 1 << 20, 24, 8
# CPython's counter of the parser's depth belongs to the interpreter, and so do the filters of warnings: two
# threads that parse at once can end with "AST constructor recursion depth mismatch" (3.11).
_ONE_AT_A_TIME = threading.Lock()
# blocks only: the text inside of paragraphs is not needed
_MARKDOWN = MarkdownIt("commonmark", {"maxNesting": 8})
_MARKDOWN.core.ruler.enableOnly(["normalize", "block"])


class _Block(NamedTuple):
    """A fenced block: the first word of its info string, its text, and the number of its first line."""

    tag: str
    body: str
    first: int
    closed: bool

    @property
    def is_python(self) -> bool:
        return _TAG.fullmatch(self.tag.strip("{}.")) is not None


def parse(source: str) -> ast.Module | None:
    """Return the syntax tree of ``source``, None when it is not a program. One parse at a time."""
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def extract(text: str) -> str:
    """Return the program in a reply: a fenced block of CommonMark after the last closing think tag.

    Of several blocks, the first that parses and holds a class ``...Env`` is taken, else the first that is
    marked as Python, else the first without a mark. A fence inside a text of the program ends its block too
    early: then the block is extended to a later fence with which it parses. Without any closed block the
    whole text is the program; reasoning that does not end is followed by no program. Lines end with a line
    feed in the result.
    """
    answer = text.replace("\r\n", "\n").rpartition(THINK_END)[2].lstrip("\ufeff")
    if answer.lstrip().startswith(THINK):
        return ""
    if not ("```" in answer or "~~~" in answer) or len(answer) > _LONGEST:
        return answer.strip()
    blocks = _blocks(answer)
    wanted = [block for block in blocks if block.is_python and block.closed]
    wanted += [block for block in blocks if not block.tag and block.closed]
    if not wanted:
        return _rejoined(answer, blocks) or answer.strip()
    whole = [_plain(block) for block in wanted[:_CANDIDATES]]
    if len(whole) == 1 and parse(whole[0]) is not None:
        return whole[0]
    games = [body for body in whole if _GAME.search(body)]
    for body in games:
        if parse(body) is not None:
            return body
    return _rejoined(answer, blocks) or (games or whole)[0]


def _plain(block: _Block) -> str:
    """Return the text of a block, without the prompts of an interactive session."""
    body = block.body.strip("\n")
    return _PROMPT.sub("", body) if body.startswith(">>> ") else body


def _rejoined(answer: str, blocks: list[_Block]) -> str:
    """Return a block that parses when it ends at a later fence, "" for none.

    By the rules of CommonMark a program that shows a fence at the start of a line ends its own block, and a
    fence with a text behind it ends none.
    """
    lines = answer.split("\n")
    marks = [number for number, line in enumerate(lines) if _FENCE.match(line)]
    for block in [block for block in blocks if block.is_python or not block.tag][:2]:
        for end in [number for number in marks if number > block.first][:_REJOINED]:
            body = "\n".join(lines[block.first : end]).strip("\n")
            if _GAME.search(body) and parse(body) is not None:
                return body
    return ""


def _blocks(text: str) -> list[_Block]:
    lines = text.split("\n")
    found = []
    for token in _MARKDOWN.parse(text):
        if token.type != "fence" or token.map is None:
            continue
        start, end = token.map
        last = lines[end - 1].lstrip(" \t>") if end <= len(lines) else ""
        mark = token.markup
        closed = end - start > 1 and last.startswith(mark) and not last.strip().strip(mark[0])
        words = token.info.split()
        found.append(_Block(words[0] if words else "", token.content, start + 1, closed))
    return found
