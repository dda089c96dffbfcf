"""Static reading of a program before it runs: quality control, not a wall. Stdlib only.

It runs in a sandboxed process, because parsing hostile text is already work for a sandbox; the modules of
that process tell which names lead from one module to another.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType

_words = str.split

FORBIDDEN_CALLS = frozenset(
    _words("eval exec compile open __import__ input breakpoint globals exit quit help")
)
FORBIDDEN_NAMES = frozenset(_words("__file__ __loader__ __spec__ __builtins__"))
FORBIDDEN_ATTRIBUTES = frozenset(
    _words("""
__globals__ __code__ __closure__ __subclasses__ __bases__ __mro__ __builtins__ __loader__ __spec__ __self__
__file__ f_back f_globals f_locals f_builtins f_code tb_frame gi_frame co_code co_consts
""")
)
# The prefix that Python gives private names of the base class of tool environments.
OWNED_PREFIX = "_ToolEnv__"
SYSTEM_MODULES = frozenset(("os", "sys"))
# Functions of other modules that read or write files, by module; of pathlib, whatever they are attributes of.
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
    _words("""
path name sep linesep maxsize version version_info byteorder float_info setrecursionlimit getrecursionlimit
getsizeof stdout stderr
""")
)
_TYPING_ONLY, _GUARDS = "TYPE_CHECKING", frozenset(_words("ImportError ModuleNotFoundError Exception"))


def lint(tree: ast.Module, importable: Iterable[str]) -> str:
    """Return the first finding as ``line N: reason``, or the empty string.

    ``importable`` holds the top-level names that a program may import. Code that never runs is left out: the
    bodies of ``if __name__ == "__main__"`` and ``if TYPE_CHECKING``, and an import whose failure is caught.
    """
    allowed = frozenset(name.partition(".")[0] for name in importable)
    nodes = [*_running(tree)]
    modules = _modules(nodes)
    paths = PATH_ATTRIBUTES - _members(nodes) if "pathlib" in modules.values() else frozenset[str]()
    builtin = FORBIDDEN_CALLS - _bound(nodes)
    for node in nodes:
        reason = _import(node, allowed) or _name(node, builtin) or _attribute(node, modules, paths)
        reason = reason or _call(node, modules)
        if reason:
            return f"line {getattr(node, 'lineno', 0)}: {reason}"
    return ""


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of code that may run, in the order of a breadth-first walk."""
    todo = [tree]
    for node in todo:
        yield node
        skipped: set[int] = set()
        if isinstance(node, ast.If) and _never(node.test):
            skipped = {id(part) for part in node.body}
        elif isinstance(node, ast.Try) and any(_catches(handler) for handler in node.handlers):
            skipped = {
                id(part)
                for part in node.body
                if isinstance(part, ast.Import | ast.ImportFrom) and _absent(part)
            }
        todo += [child for child in ast.iter_child_nodes(node) if id(child) not in skipped]


def _never(test: ast.expr) -> bool:
    """Return whether a condition is false in the sandbox: not the main module, not type checking."""
    match test:
        case ast.Compare(
            left=ast.Name(id="__name__"), ops=[ast.Eq()], comparators=[ast.Constant("__main__")]
        ):
            return True
        case ast.Compare(
            left=ast.Constant("__main__"), ops=[ast.Eq()], comparators=[ast.Name(id="__name__")]
        ):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name == _TYPING_ONLY
    return False


def _catches(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(one is None or (isinstance(one, ast.Name) and one.id in _GUARDS) for one in caught)


def _absent(node: ast.Import | ast.ImportFrom) -> bool:
    """Return whether the import fails in the sandbox: nothing can be loaded there any more."""
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return all(name.partition(".")[0] not in sys.modules for name in names)


def _modules(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Return the modules behind names: imported, under whatever name, or assigned from such a name."""
    found: dict[str, str] = {}
    assigned: list[tuple[str, str]] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.partition(".")[0]
                found[alias.asname or top] = alias.name if alias.asname else top
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                if node.module == "pathlib":
                    found[alias.asname or alias.name] = "pathlib"
                elif f"{node.module}.{alias.name}" in sys.modules:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
            assigned += [(one.id, node.value.id) for one in node.targets if isinstance(one, ast.Name)]
    return found | {name: found[value] for name, value in assigned if value in found}


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that the program binds somewhere: a game may define its own ``open``.

    A method is no binding of a name, nor is an assignment or a default value that is the name itself.
    """
    found: set[str] = set()
    skipped: set[int] = set()
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=one) as target], value=ast.Name(id=other)) if one == other:
                skipped.add(id(target))
            case ast.ClassDef(body=body):
                skipped |= {id(part) for part in body if isinstance(part, ast.FunctionDef)}
            case ast.arguments():
                places = [*node.posonlyargs, *node.args][::-1], node.defaults[::-1]
                pairs = [*zip(*places, strict=False), *zip(node.kwonlyargs, node.kw_defaults, strict=True)]
                skipped |= {id(arg) for arg, value in pairs if getattr(value, "id", "") == arg.arg}
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {alias.asname or alias.name.partition(".")[0] for alias in names}
            case (
                ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
                | ast.ExceptHandler(name=str(name))
            ):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                found |= {name} if id(node) not in skipped else set()
            case _:
                pass
    return found


def _members(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the attributes that the program itself defines or assigns: a search may keep ``self.open``."""
    stored = (node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef)} | {node.attr for node in stored}


def _import(node: ast.AST, allowed: frozenset[str]) -> str:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""] if not node.level else ["."]
        if node.module == "sandbox.tools":
            return ""
    else:
        return ""
    for name in names:
        if name.partition(".")[0] not in allowed:
            known = ", ".join(sorted(allowed - {"__future__"}))
            return f"import of {name} is not allowed; a program may import {known}"
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            if _reaches(node.module or "", alias.name):
                return f"{node.module}.{alias.name} is not allowed in an environment"
    return ""


def _reaches(module: str, name: str) -> bool:
    """Return whether ``name`` of ``module`` leads to the host or to another module."""
    if module in SYSTEM_MODULES:
        return name not in SYSTEM_ATTRIBUTES
    if name in FILE_ATTRIBUTES.get(module, ()) or (name == "*" and module in FILE_ATTRIBUTES):
        return True
    if module and name == "__dict__":
        return True
    other = getattr(sys.modules.get(module), name, None) if module else None
    return isinstance(other, ModuleType) and f"{module}.{name}" not in sys.modules


def _name(node: ast.AST, builtin: frozenset[str]) -> str:
    if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
        return ""
    if node.id in FORBIDDEN_NAMES:
        return f"{node.id} is not allowed: a program must not read its own source"
    if node.id in builtin:
        return f"{node.id}() is not allowed in an environment"
    return ""


def _attribute(node: ast.AST, modules: dict[str, str], paths: frozenset[str]) -> str:
    if not isinstance(node, ast.Attribute):
        return ""
    if node.attr in FORBIDDEN_ATTRIBUTES or node.attr.startswith(OWNED_PREFIX):
        return f"attribute {node.attr} is not allowed in an environment"
    owner = _module(node.value, modules)
    if _reaches(owner, node.attr):
        return f"{owner}.{node.attr} is not allowed in an environment"
    if node.attr in paths:
        return f"pathlib's {node.attr} is not allowed in an environment: there are no files"
    return ""


def _call(node: ast.AST, modules: dict[str, str]) -> str:
    """Refuse the real clock of numpy, and a module's attributes looked up by a computed name."""
    if not isinstance(node, ast.Call) or not node.args:
        return ""
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    first, *rest = node.args
    if name == "datetime64" and isinstance(first, ast.Constant) and first.value in ("now", "today"):
        return f"numpy.datetime64({first.value!r}) is not allowed: a program has no clock"
    owner = _module(first, modules) if name in ("getattr", "vars", "dir") else ""
    if not owner:
        return ""
    if rest and isinstance(rest[0], ast.Constant):
        forbidden = _reaches(owner, str(rest[0].value))
    else:
        held = vars(sys.modules[owner]) if owner in sys.modules else {}
        forbidden = name != "dir" and (owner in SYSTEM_MODULES or any(_reaches(owner, one) for one in held))
    return f"{name}({owner}, ...) is not allowed in an environment" if forbidden else ""


def _module(node: ast.expr, modules: dict[str, str]) -> str:
    """Return the name of the module that an expression stands for, "" for none."""
    if isinstance(node, ast.Name):
        return modules.get(node.id, "")
    if isinstance(node, ast.Attribute) and (owner := _module(node.value, modules)):
        inner = f"{owner}.{node.attr}"
        return inner if inner in sys.modules else ""
    return ""
