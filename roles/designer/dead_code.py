"""What of a program nothing reads: names that are only set, functions that nobody calls. Pure.

A document's words are soon written into a program: as variables, texts or functions of no use. What works is
what is read. A doubt is decided for the program: where names are looked up by their text nothing is unused.
"""

from __future__ import annotations

import ast
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from roles.designer.syntax import parse

Place = tuple[int, int]

# The sandbox reads or calls these; everything of a class with a base may be read by the base.
_READ = frozenset(("METADATA", "max_turns", "reset", "step", "solution", "close", "render", "self"))
_BY_TEXT = frozenset(("getattr", "hasattr", "vars", "locals", "globals", "eval", "exec", "__dict__"))
_PASSES = 4

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Setting = ast.Assign | ast.AnnAssign | ast.AugAssign


class Unused(NamedTuple):
    """``names`` that are never read, and where statements that only set them or define them begin and end:
    lines from 1 on, columns in characters, in order and apart from each other.
    """

    names: frozenset[str] = frozenset()
    begins: tuple[Place, ...] = ()
    ends: tuple[Place, ...] = ()

    def covers(self, place: Place) -> bool:
        """Whether ``place`` lies in a statement of no use."""
        at = bisect_right(self.begins, place)
        return at > 0 and place < self.ends[at - 1]


def unused(source: str) -> Unused:
    """Return what is unused in a program; nothing of one that cannot be read."""
    tree = parse(source)
    if tree is None:
        return Unused()
    heirs = {id(part) for node in ast.walk(tree) if _is_heir(node) for part in ast.walk(node)}
    dead: list[ast.stmt] = []
    names: frozenset[str] = frozenset()
    for _ in range(_PASSES):
        skipped = {id(part) for node in dead for part in ast.walk(node)}
        loaded, stored = _names(part for part in ast.walk(tree) if id(part) not in skipped)
        if loaded & _BY_TEXT:
            return Unused()
        kept = _names(part for part in ast.walk(tree) if id(part) in heirs)[1]
        names = frozenset(name for name in names | stored - loaded - kept - _READ if not _is_magic(name))
        statements = (node for node in ast.walk(tree) if isinstance(node, ast.stmt) and id(node) not in heirs)
        found = [node for node in statements if _is_dead(node, names)]
        if len(found) == len(dead):
            break
        dead = found
    return Unused(names, *_places(dead, source))


def _names(nodes: Iterator[ast.AST]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that are read and those that are set."""
    loaded, stored = set[str](), set[str]()
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=context) | ast.Attribute(attr=name, ctx=context):
                (loaded if isinstance(context, ast.Load) else stored).add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                stored.add(name)
            case ast.arg(arg=name):
                stored.add(name)
            case ast.keyword(arg=str(name)):
                loaded.add(name)
            case _:
                pass
    return frozenset(loaded), frozenset(stored)


def _is_heir(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef) and bool(node.bases)


def _is_dead(node: ast.stmt, names: frozenset[str]) -> bool:
    if isinstance(node, _Function):
        return node.name in names
    if not isinstance(node, _Setting):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return all(_sets(target, names) for target in targets)


def _sets(target: ast.expr, names: frozenset[str]) -> bool:
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in names
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return all(_sets(part, names) for part in parts)
        case ast.Starred(value=part):
            return _sets(part, names)
        case _:
            return False


def _is_magic(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _places(nodes: list[ast.stmt], source: str) -> tuple[tuple[Place, ...], tuple[Place, ...]]:
    """Return where ``nodes`` begin and end, those inside of others left out."""
    lines = [None if line.isascii() else line.encode() for line in source.split("\n")]

    def place(line: int, offset: int) -> Place:
        """Turn an offset in bytes into a column in characters."""
        text = lines[line - 1] if line <= len(lines) else None
        return line, offset if text is None else len(text[:offset].decode(errors="ignore"))

    begins, ends = list[Place](), list[Place]()
    for node in sorted(nodes, key=lambda one: (one.lineno, one.col_offset)):
        begin = place(node.lineno, node.col_offset)
        if not ends or begin >= ends[-1]:
            begins.append(begin)
            ends.append(place(node.end_lineno or node.lineno, node.end_col_offset or 0))
    return tuple(begins), tuple(ends)
