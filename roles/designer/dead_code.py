"""Share of a program that nothing reads: names that are only set, functions that nothing calls. Pure.

Words of a document are soon written into a program as variables, texts or functions of no use. A doubt is
decided for the program: where names are looked up by their text, nothing is unused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

# The sandbox reads or calls these; everything of a class with a base may be read by the base.
_READ = frozenset(("METADATA", "max_turns", "reset", "step", "solution", "close", "render", "self"))
_BY_TEXT = frozenset(("getattr", "hasattr", "vars", "locals", "globals", "eval", "exec", "__dict__"))
_PASSES = 4


def dead_share(tree: ast.Module) -> tuple[float, list[str]]:
    """Return the share of the program's lines that are of no use, and the names that nothing reads."""
    heirs = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.bases
        for part in ast.walk(node)
    }
    kept = _names(part for part in ast.walk(tree) if id(part) in heirs)[1]
    dead: list[ast.stmt] = []
    names: set[str] = set()
    for _ in range(_PASSES):
        skipped = {id(part) for node in dead for part in ast.walk(node)}
        loaded, stored = _names(part for part in ast.walk(tree) if id(part) not in skipped)
        if loaded & _BY_TEXT:
            return 0.0, []
        names |= {name for name in stored - loaded - kept - _READ if not name.startswith("__")}
        statements = (node for node in ast.walk(tree) if isinstance(node, ast.stmt) and id(node) not in heirs)
        found = [node for node in statements if _is_dead(node, names)]
        if len(found) == len(dead):
            break
        dead = found
    lines = {line for node in dead for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    all_lines = {node.lineno for node in ast.walk(tree) if isinstance(node, ast.stmt)} | lines
    return len(lines) / max(1, len(all_lines)), sorted(names)


def _names(nodes: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """Return the names that are read and those that are set."""
    loaded, stored = set[str](), set[str]()
    for node in nodes:
        match node:
            case ast.Name(id=name, ctx=context) | ast.Attribute(attr=name, ctx=context):
                (loaded if isinstance(context, ast.Load) else stored).add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
                stored.add(name)
            case ast.keyword(arg=str(name)):
                loaded.add(name)
            case _:
                pass
    return loaded, stored


def _is_dead(node: ast.stmt, names: set[str]) -> bool:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name in names
        case ast.Assign(targets=targets):
            return all(_sets(target, names) for target in targets)
        case ast.AnnAssign(target=target) | ast.AugAssign(target=target):
            return _sets(target, names)
        case _:
            return False


def _sets(target: ast.expr, names: set[str]) -> bool:
    match target:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in names
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return all(_sets(part, names) for part in parts)
        case _:
            return False
