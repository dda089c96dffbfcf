"""A package of another author, installed as pip would: modules, and metadata with entry points."""

from __future__ import annotations

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
    metadata = directory / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups: dict[str, list[str]] = {}
    for point, target in points.items():
        group, _, entry = point.partition("/")
        groups.setdefault(group, []).append(f"{entry} = {name}.{target}")
    (metadata / "entry_points.txt").write_text(
        "".join(f"[{group}]\n" + "\n".join(lines) + "\n" for group, lines in groups.items())
    )
    registry.registered.cache_clear()
    return directory
