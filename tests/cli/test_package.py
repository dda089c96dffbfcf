"""The built wheel, installed outside the checkout: its recipes, licence and command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PARTS = ("bus", "sandbox", "engine", "roles", "configs", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources: a build leaves files in its tree."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, tree / part)
    pip("wheel", "--no-build-isolation", "-w", out, tree)
    return next(out.glob("*.whl"))


def pip(command: str, *arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", command, "-q", "--no-deps", *arguments], check=True)


def test_the_wheel_has_licence_and_recipes(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    recipes = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.toml")}
    assert {name.partition("/share/spade/")[2] for name in names if "/share/spade/" in name} == recipes
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_an_installed_spade_runs_its_recipes_from_any_directory(wheel: Path, tmp_path: Path) -> None:
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip("install", "--target", installed, wheel)

    def spade(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-c", "from engine.cli import main; main()", *arguments],
            cwd=elsewhere,
            env={**os.environ, "PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    known = {line.split()[0] for line in spade("recipes").splitlines()}
    assert known == {path.stem for path in (ROOT / "configs").glob("*.toml")}
    assert f"directory  {elsewhere / 'runs' / 'nano'} (new)" in spade("run", "nano", "--dry-run")
    spade("init", "mine")
    assert "(2.2 M parameters)" in spade("run", "mine/nano.toml", "--dry-run")
