"""Reading programs as trees, one at a time.

The parser's depth counter belongs to the interpreter, not to a thread (CPython 3.11): two threads that build
trees at once can end with ``SystemError: AST constructor recursion depth mismatch``. The filters of warnings
are everybody's as well.
"""

from __future__ import annotations

import ast
import threading
import warnings

_ONE_AT_A_TIME = threading.Lock()


def parse(source: str) -> ast.Module | None:
    """Return the tree of a program, None for one that cannot be read."""
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes: the ladder judges them
        try:
            return ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None
