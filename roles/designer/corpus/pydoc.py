"""``pydoc:`` - the documentation of Python: of the standard library, or of the packages named.

``pydoc:`` alone reads some hundred modules of the standard library; ``pydoc:networkx,sympy`` reads packages
that are installed, their public submodules too.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

from engine.errors import ConfigError
from roles.designer.corpus.document import WHERE, Document, Reading, listed
from sandbox.contract import STDLIB

_words = str.split
_STANDARD = (
    *STDLIB,
    *_words("""
    argparse ast asyncio.queues asyncio.locks cmd codecs concurrent.futures configparser csv ctypes
    email.message filecmp gettext glob gzip http.cookies imaplib inspect ipaddress linecache mailbox
    mimetypes mmap
    multiprocessing.pool netrc optparse pickle pickletools plistlib poplib profile quopri reprlib rlcompleter
    sched selectors shelve shutil smtplib socket socketserver sqlite3 stat subprocess symtable tarfile
    tempfile threading timeit tokenize trace traceback tracemalloc urllib.parse urllib.robotparser wave
    xml.etree.ElementTree xmlrpc.client zipfile zoneinfo
    """),
)
_SHORTEST = 200
_MOST_MODULES = 500


def read(argument: str, reading: Reading) -> Iterator[Document]:
    """Yield one document a module, class or function whose docstring is long enough to stand alone."""
    seen: set[str] = set()
    for module in _named(listed(argument), reading):
        for label, text in _documented(module):
            if text not in seen:
                seen.add(text)
                yield Document(label, f"{label}\n\n{text}"[: reading.longest])


def _named(names: list[str], reading: Reading) -> Iterator[ModuleType]:
    for name in names:
        yield from _with_submodules(_import(name), reading)
    for name in () if names else _STANDARD:
        try:
            yield _load(name)
        except ImportError as error:  # an interpreter may be built without some
            reading.skip(name, f"cannot be imported: {error}")


def _import(name: str) -> ModuleType:
    try:
        return _load(name)
    except ImportError as error:
        raise ConfigError(
            f"the corpus names a Python module that cannot be imported: {name} ({error})",
            where=WHERE,
            remedy=f"Install it (pip install {name.partition('.')[0]}) or take it out of the list.",
        ) from error


def _load(name: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a package's own deprecations are none of the reader's business
        return importlib.import_module(name)


def _with_submodules(module: ModuleType, reading: Reading) -> Iterator[ModuleType]:
    """Yield a module and, of a package that is not the standard library's, its public submodules."""
    yield module
    root = module.__name__.partition(".")[0]
    if root in sys.stdlib_module_names or not hasattr(module, "__path__"):
        return
    names = sorted(
        found.name
        for found in pkgutil.iter_modules(module.__path__, f"{module.__name__}.")
        if not found.name.rpartition(".")[2].startswith("_")
    )
    for name in names[:_MOST_MODULES]:
        try:
            yield _load(name)
        except (
            Exception,
            SystemExit,
        ) as error:  # what a foreign module does on import is not ours to foresee
            reading.skip(name, f"cannot be imported: {error}")


def _documented(module: ModuleType) -> Iterator[tuple[str, str]]:
    name = module.__name__
    exported = getattr(module, "__all__", None) or [key for key in vars(module) if not key.startswith("_")]
    parts = [(name, module), *((f"{name}.{key}", getattr(module, key, None)) for key in sorted(exported))]
    for label, part in parts:
        if not (part is module or inspect.isclass(part) or inspect.isroutine(part)):
            continue
        text = inspect.getdoc(part) or ""
        if len(text) >= _SHORTEST:
            yield label, text
