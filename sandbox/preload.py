"""Import the modules that programs may use, before the zygote gives up its files. Stdlib only.

A package is loaded with all its public modules: nothing can be imported later, neither by a program nor by a
function of the package that imports when it is called.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType

from sandbox import contract

# Modules that no program needs.
_LEFT_OUT = frozenset(
    ("__main__", "benchmarks", "conftest", "f2py", "setup", "test", "tests", "this", "tool")
)
# Optional imports of packages that cost memory, start threads or are of no use without files.
_REFUSED = frozenset(
    (
        *("IPython", "cupy", "hypothesis", "jax", "matplotlib", "mypy", "numpy.distutils", "pytest"),
        *("tensorflow", "torch"),
    )
)


def preload(packages: Sequence[str]) -> None:
    """Import the standard library's modules and ``packages``, whole. Raises ImportError for a missing one."""
    for name in (*contract.STDLIB, *contract.HIDDEN, *packages):
        importlib.import_module(name)
    with _refused(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*contract.STDLIB, *packages):
            _import_parts(sys.modules[name])


def _import_parts(module: ModuleType) -> None:
    """Import the public modules of a package, and those of its packages, as far as they work here."""
    for info in pkgutil.iter_modules(getattr(module, "__path__", ())):
        name = f"{module.__name__}.{info.name}"
        if info.name in _LEFT_OUT or info.name.startswith("_"):
            continue
        # one may need a package that is not installed
        with contextlib.suppress(Exception):
            _import_parts(importlib.import_module(name))


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
