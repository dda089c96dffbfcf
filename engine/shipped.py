"""The recipes that come with spade: found by name, in a checkout as in an installed package."""

from __future__ import annotations

import shutil
import site
import sysconfig
from pathlib import Path

from engine.errors import ConfigError

_ROOT = Path(__file__).resolve().parent.parent


def directory() -> Path:
    """Return the directory of the shipped recipes. Raises ConfigError when the installation has none."""
    installed = Path("share/spade/configs")
    places = [_ROOT / "configs", _ROOT / installed, Path(sysconfig.get_path("data")) / installed]
    if site.USER_BASE:
        places.append(Path(site.USER_BASE) / installed)
    for place in places:
        if (place / "nano.toml").is_file():
            return place
    raise ConfigError("This installation of spade has no recipes.", remedy="Install spade again.")


def names() -> dict[str, str]:
    """Return the shipped recipes by name, each with the first sentence of its header."""
    return {path.stem: _headline(path) for path in sorted(directory().glob("*.toml"))}


def recipe_path(given: str | Path) -> Path:
    """Return the file of a recipe that is given as a path or by the name of a shipped one.

    A path that does not exist is returned unchanged; its reader explains the error.
    """
    path = Path(given)
    if path.exists() or path.suffix or path.parent != Path():
        return path
    named = directory() / f"{path.name}.toml"
    if named.is_file():
        return named
    raise ConfigError(
        f"There is no recipe {str(given)!r}, neither a file nor one that comes with spade.",
        remedy=f"Recipes that come with spade: {', '.join(names())}. A file is named with its path.",
    )


def copy_to(target: Path) -> None:
    """Copy the shipped recipes to ``target``. Raises ConfigError when that has files, and OSError."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists and is not an empty directory.", remedy="Name a new directory.")
    shutil.copytree(directory(), target, dirs_exist_ok=True)


def _headline(path: Path) -> str:
    """Return the first sentence of the comment at the top of a recipe."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").strip())
    return " ".join(lines).split(". ")[0].split(": ")[0].rstrip(".:")
