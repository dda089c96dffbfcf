"""A package of another author, installed as pip would: modules, and metadata with entry points."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

from engine import registry


def install(directory: Path, name: str, modules: Mapping[str, str], points: Mapping[str, str]) -> Path:
    """Write package ``name`` into ``directory``, which the caller puts on ``sys.path``.

    ``modules`` maps a module of the package to its source; ``points`` maps "group/name" to "module:object".
    """
    package = directory / name
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for module, source in modules.items():
        (package / f"{module}.py").write_text(source)
    groups: dict[str, dict[str, str]] = {}
    for point, target in points.items():
        group, _, entry = point.partition("/")
        groups.setdefault(group, {})[entry] = f"{name}.{target}"
    return _with_metadata(directory, name, groups)


def install_example(directory: Path, example: Path) -> Path:
    """Install a package of ``docs/examples``: its modules, and the entry points of its ``pyproject.toml``."""
    directory.mkdir(parents=True)
    for module in example.glob("*.py"):
        shutil.copy(module, directory)
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    return _with_metadata(directory, project["name"].replace("-", "_"), project["entry-points"])


def _with_metadata(directory: Path, name: str, groups: Mapping[str, Mapping[str, str]]) -> Path:
    metadata = directory / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{entry} = {target}" for entry, target in entries.items()))
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    registry.registered.cache_clear()
    return directory
