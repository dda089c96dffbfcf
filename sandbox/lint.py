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
# What of other modules reads or writes files, by module; of pathlib, whatever it is an attribute of.
FILE_ATTRIBUTES = {
    "io": frozenset(_words("open open_code FileIO")),
    "tokenize": frozenset(("open",)),
}
PATH_ATTRIBUTES = frozenset(
    _words("""
open read_text read_bytes write_text write_bytes iterdir glob rglob unlink mkdir rmdir touch
""")
)
SYSTEM_ATTRIBUTES = frozenset(
    _words("path name sep linesep maxsize version version_info byteorder float_info")
)
SYSTEM_ATTRIBUTES |= frozenset(_words("setrecursionlimit getrecursionlimit getsizeof stdout stderr"))
# Importable at run time for the sake of the standard library, yet nothing a game needs.
FORBIDDEN_IMPORTS = frozenset(
    _words("ctypes inspect gc linecache importlib builtins ast traceback threading")
)


_Scope = frozenset[str]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def lint(tree: ast.AST, importable: Iterable[str]) -> str:
    """Return the first finding as ``line N: reason``, or the empty string.

    ``importable`` holds the top-level names a program may import.
    """
    allowed = frozenset(name.partition(".")[0] for name in importable) - FORBIDDEN_IMPORTS
    builtin = _builtin(tree)
    modules = _modules(tree)
    paths = PATH_ATTRIBUTES - _members(tree) if "pathlib" in modules.values() else frozenset[str]()
    for node in ast.walk(tree):
        reason = _import(node, allowed) or _name(node, builtin) or _attribute(node, modules, paths)
        if reason:
            return f"line {getattr(node, 'lineno', 0)}: {reason}"
    return ""


def _loads(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _members(tree: ast.AST) -> set[str]:
    """What the program itself defines or assigns as an attribute: a search may keep ``self.open``."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    stored = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return found | {node.attr for node in stored if isinstance(node.ctx, ast.Store)}


def _modules(tree: ast.AST) -> dict[str, str]:
    """The modules behind names: imported, under whatever name, or assigned from such a name."""
    found = {name: name for name in SYSTEM_MODULES}
    assigned: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                found[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module == "pathlib":
            found.update((alias.asname or alias.name, "pathlib") for alias in node.names)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            assigned += [(one.id, node.value.id) for one in node.targets if isinstance(one, ast.Name)]
    for name, value in assigned:
        if found.get(value) in SYSTEM_MODULES:
            found[name] = found[value]
    return found


def _builtin(tree: ast.AST) -> set[int]:
    """Identities of the names that stand for a forbidden built-in: a game may call its own ``open``.

    Python's rules of scope: a method's name is not seen inside methods, a default belongs to the scope
    around its function.
    """
    found: set[int] = set()
    top = _bound(getattr(tree, "body", []))
    # node, names seen where it stands, names that functions below it see
    todo: list[tuple[ast.AST, _Scope, _Scope]] = [(tree, top, top)]
    while todo:
        node, here, seen = todo.pop()
        inside: list[ast.AST] = []
        if isinstance(node, _FUNCTIONS):
            inside = [node.body] if isinstance(node, ast.Lambda) else [*node.body]
            names = seen | _bound(inside) | _arguments(node.args)
            todo += [(child, names, names) for child in inside]
        elif isinstance(node, ast.ClassDef):
            inside = [*node.body]
            names = seen | _bound(inside)
            todo += [(child, names, seen) for child in inside]
        elif isinstance(node, ast.Name) and _loads(node) and node.id in FORBIDDEN_CALLS - here:
            found.add(id(node))
        kept = {id(child) for child in inside}
        todo += [(child, here, seen) for child in ast.iter_child_nodes(node) if id(child) not in kept]
    return found


def _arguments(node: ast.arguments) -> _Scope:
    extra = [one for one in (node.vararg, node.kwarg) if one]
    return FORBIDDEN_CALLS.intersection(
        one.arg for one in (*node.posonlyargs, *node.args, *node.kwonlyargs, *extra)
    )


def _bound(body: Iterable[ast.AST]) -> _Scope:
    """Forbidden names that a scope with ``body`` binds; an assignment from the name itself is no binding."""
    names: set[str] = set()
    todo = list(body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            used = {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name) and _loads(one)}
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            stored = [one for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
            names |= {one.id for one in stored if not _loads(one)} - used
            todo.append(node.value)
            continue
        if isinstance(node, ast.Name) and not _loads(node):
            names.add(node.id)
        elif isinstance(node, ast.MatchAs | ast.MatchStar | ast.ExceptHandler) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        todo += ast.iter_child_nodes(node)
    return FORBIDDEN_CALLS & names


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
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if _reaches(node.module or "", alias.name):
                return f"{node.module}.{alias.name} is not allowed in an environment"
    return ""


def _reaches(module: str, name: str) -> bool:
    """Whether ``name`` of ``module`` leads to the host: to its files, processes or the interpreter."""
    if module in SYSTEM_MODULES:
        return name not in SYSTEM_ATTRIBUTES
    return name in FILE_ATTRIBUTES.get(module, ()) or (name == "*" and module in FILE_ATTRIBUTES)


def _name(node: ast.AST, builtin: set[int]) -> str:
    if not isinstance(node, ast.Name) or not _loads(node):
        return ""
    if node.id in FORBIDDEN_NAMES:
        return f"{node.id} is not allowed: a program must not read its own source"
    if id(node) in builtin:
        return f"{node.id}() is not allowed in an environment"
    return ""


def _attribute(node: ast.AST, modules: dict[str, str], paths: frozenset[str]) -> str:
    if not isinstance(node, ast.Attribute):
        return ""
    if node.attr in FORBIDDEN_ATTRIBUTES or node.attr.startswith(OWNED_PREFIX):
        return f"attribute {node.attr} is not allowed in an environment"
    owner = modules.get(node.value.id, "") if isinstance(node.value, ast.Name) else ""
    if _reaches(owner, node.attr):
        return f"{owner}.{node.attr} is not allowed in an environment"
    if node.attr in paths:
        return f"pathlib's {node.attr} is not allowed in an environment: there are no files"
    return ""
