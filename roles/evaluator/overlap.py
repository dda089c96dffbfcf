"""Counts the accepted designs that repeat a program or a text of a held-out suite.

Nothing stops a designer from writing such a program, so each evaluation is published with the count. Programs
are compared without names, comments, docstrings and texts, except texts that are a variable's value: those of
one family with the same parameters are equal. A text of a suite that is no program is looked for by its words
(:mod:`engine.evals.contamination`).
"""

from __future__ import annotations

import ast
import hashlib
import warnings
from collections.abc import Iterable, Mapping

from bus.messages import EnvironmentReady
from engine.evals.contamination import Guard

_NAMES = frozenset({"id", "arg", "attr", "name", "names", "asname", "module", "kind", "type_comment"})


def fingerprint(source: str) -> str:
    """Return a digest of the structure and the numbers of a program, "" when it cannot be parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
        return hashlib.sha256(repr(_shape(tree)).encode()).hexdigest()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""


class Overlap:
    """The designs that repeat a program or text of a suite; ``texts`` maps a suite to those."""

    def __init__(self, texts: Mapping[str, Iterable[str]]) -> None:
        prints = {suite: {one: fingerprint(one) for one in found} for suite, found in texts.items()}
        self._suites = {suite: set(found.values()) - {""} for suite, found in prints.items()}
        prose = {suite: {one: one for one in found if not found[one]} for suite, found in prints.items()}
        self._guard = Guard(prose)
        self._designs: dict[str, set[str]] = {suite: set() for suite in texts}

    def note(self, fact: EnvironmentReady) -> None:
        """Count an accepted design, once however often its fact is read."""
        found = fingerprint(fact.source)
        for suite, programs in self._suites.items():
            if found in programs:
                self._designs[suite].add(fact.design)
        for suite, _ in self._guard.found(fact.source):
            self._designs[suite].add(fact.design)

    def count(self, suite: str) -> int:
        """Return the number of designs that repeat something of ``suite``."""
        return len(self._designs[suite])


def _shape(node: object) -> object:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
        return "Assign", repr(node.value.value)
    if isinstance(node, ast.AST):
        fields = [(name, value) for name, value in ast.iter_fields(node) if name not in _NAMES]
        return type(node).__name__, [_shape(value) for name, value in fields if not _is_text(value)]
    if isinstance(node, list):
        return [_shape(item) for item in node if not _is_docstring(item)]
    return node


def _is_text(value: object) -> bool:
    return isinstance(value, str | bytes)


def _is_docstring(item: object) -> bool:
    return isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and _is_text(item.value.value)
