"""Static reading of a program before it runs: quality control, not a wall. Stdlib only.

It runs in the instance's process, because parsing hostile text is already work for a sandbox.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

_words = str.split

FORBIDDEN_CALLS = frozenset(
    _words("eval exec compile open __import__ input breakpoint globals exit quit help")
)
FORBIDDEN_NAMES = frozenset(_words("__file__ __loader__ __spec__ __builtins__"))
FORBIDDEN_ATTRIBUTES = frozenset(
    _words("""
__globals__ __code__ __closure__ __subclasses__ __bases__ __mro__ __builtins__ __loader__ __spec__
__file__ f_back f_globals f_locals f_builtins f_code tb_frame gi_frame co_code co_consts
""")
)
# How Python spells what the base class of tool environments keeps to itself.
OWNED_PREFIX = "_ToolEnv__"
SYSTEM_MODULES = frozenset(("os", "sys"))
SYSTEM_ATTRIBUTES = frozenset(
    _words("path name sep linesep maxsize version version_info byteorder float_info")
)
SYSTEM_ATTRIBUTES |= frozenset(_words("setrecursionlimit getrecursionlimit getsizeof stdout stderr"))
# Importable at run time for the sake of the standard library, yet nothing a game needs.
FORBIDDEN_IMPORTS = frozenset(
    _words("ctypes inspect gc linecache importlib builtins ast traceback threading")
)


def lint(tree: ast.AST, importable: Iterable[str]) -> str:
    """Return the first finding as ``line N: reason``, or the empty string.

    ``importable`` holds the top-level names a program may import.
    """
    allowed = frozenset(name.partition(".")[0] for name in importable) - FORBIDDEN_IMPORTS
    assigned = {name for node in ast.walk(tree) for name in _bound(node)}
    for node in ast.walk(tree):
        reason = _import(node, allowed) or _name(node, assigned) or _attribute(node)
        if reason:
            return f"line {getattr(node, 'lineno', 0)}: {reason}"
    return ""


def _loads(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _bound(node: ast.AST) -> tuple[str, ...]:
    """Names that ``node`` binds: a game may call a variable ``open`` or a method's argument ``exit``."""
    if isinstance(node, ast.Name):
        return () if _loads(node) else (node.id,)
    if isinstance(node, ast.arg):
        return (node.arg,)
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return (node.name,)
    return ()


def _import(node: ast.AST, allowed: frozenset[str]) -> str:
    if isinstance(node, ast.ImportFrom) and node.module == "sandbox.tools":
        return ""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""] if not node.level else ["."]
    else:
        return ""
    for name in names:
        if name.partition(".")[0] not in allowed:
            return f"import of {name} is not allowed; use the standard library's pure modules or numpy"
    return ""


def _name(node: ast.AST, assigned: set[str]) -> str:
    if not isinstance(node, ast.Name) or not _loads(node):
        return ""
    if node.id in FORBIDDEN_NAMES:
        return f"{node.id} is not allowed: a program must not read its own source"
    if node.id in FORBIDDEN_CALLS and node.id not in assigned:
        return f"{node.id}() is not allowed in an environment"
    return ""


def _attribute(node: ast.AST) -> str:
    if not isinstance(node, ast.Attribute):
        return ""
    if node.attr in FORBIDDEN_ATTRIBUTES or node.attr.startswith(OWNED_PREFIX):
        return f"attribute {node.attr} is not allowed in an environment"
    owner = node.value.id if isinstance(node.value, ast.Name) else ""
    if owner in SYSTEM_MODULES and node.attr not in SYSTEM_ATTRIBUTES:
        return f"{owner}.{node.attr} is not allowed in an environment"
    return ""
