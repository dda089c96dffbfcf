"""Import the modules that programs may use, before the zygote gives up its files. Stdlib only.

A package is loaded with its public submodules and with the modules that its functions import when they are
called: nothing can be imported later.
"""

from __future__ import annotations

import contextlib
import dis
import importlib
import importlib.util
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.abc import InspectLoader
from types import CodeType, ModuleType
from typing import Any

from sandbox import contract

# Submodules that no program needs.
_LEFT_OUT = frozenset(("__main__", "benchmarks", "conftest", "setup", "test", "tests", "this", "tool"))
# Optional imports of packages that cost memory, start threads or are of no use without files.
_REFUSED = frozenset(
    ("IPython", "cupy", "hypothesis", "jax", "matplotlib", "numpy.distutils", "pytest", "tensorflow", "torch")
)
_IMPORT = dis.opmap["IMPORT_NAME"]


def preload(packages: Sequence[str]) -> None:
    """Import the standard library's modules and ``packages``, whole. Raises ImportError for a missing one."""
    for name in (*contract.STDLIB, *contract.HIDDEN, *packages):
        importlib.import_module(name)
    with _refused(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*contract.STDLIB, *packages):
            for submodule in _public(sys.modules[name]):
                _try_import(submodule)
        for name in packages:
            _import_lazy_parts(name.partition(".")[0])


def _public(module: ModuleType) -> list[str]:
    """Return the names of the public submodules of ``module``, none where it is no package."""
    found = pkgutil.iter_modules(getattr(module, "__path__", ()))
    names = [info.name for info in found if info.name not in _LEFT_OUT and not info.name.startswith("_")]
    return [f"{module.__name__}.{name}" for name in names]


def _import_lazy_parts(package: str) -> None:
    """Import the modules of ``package`` that functions of its loaded modules import, and so on."""
    read: set[str] = set()
    while fresh := [name for name in sys.modules if name.partition(".")[0] == package and name not in read]:
        read.update(fresh)
        wanted = {imported for name in fresh for imported in _imported_by_functions(sys.modules[name])}
        for name in sorted(wanted - sys.modules.keys()):
            if name.partition(".")[0] == package and not _LEFT_OUT.intersection(name.split(".")):
                _try_import(name)


def _imported_by_functions(module: ModuleType) -> Iterator[str]:
    """Yield the names that functions of ``module`` import; some may be names inside of modules."""
    spec = module.__spec__
    if spec is None or not isinstance(spec.loader, InspectLoader):
        return
    code, package = spec.loader.get_code(spec.name), spec.parent
    for function in _functions(code) if code else ():
        # this look is far cheaper than the next one
        if _IMPORT not in function.co_code[::2]:
            continue
        constants: list[Any] = []
        for instruction in dis.get_instructions(function):
            if instruction.opcode == _IMPORT:
                level, parts = constants[-2:]
                with contextlib.suppress(ImportError):
                    name = importlib.util.resolve_name("." * level + instruction.argval, package)
                    yield from (name, *(f"{name}.{part}" for part in parts or ()))
            elif instruction.opname == "LOAD_CONST":
                constants.append(instruction.argval)


def _functions(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _functions(constant)


def _try_import(name: str) -> None:
    """Import ``name`` if it is a module that works here: one may need a package that is not installed."""
    with contextlib.suppress(Exception):
        importlib.import_module(name)


class _Refusal:
    """A finder that finds nothing of what is refused."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name in _REFUSED:
            raise ModuleNotFoundError(f"{name} is not loaded for programs", name=name)


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    sys.meta_path.insert(0, _Refusal)
    try:
        yield
    finally:
        sys.meta_path.remove(_Refusal)
