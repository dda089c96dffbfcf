"""The floors of the house: import-linter's contracts of pyproject.toml, and nobody outside them."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"bus", "sandbox", "engine", "roles"}


def linter(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_contracts_are_kept() -> None:
    result = linter()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "3 kept, 0 broken" in result.stdout


def test_the_contracts_cover_every_floor() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    assert set(settings["root_packages"]) == PACKAGES
    forbidden = {
        (source, target)
        for contract in settings["contracts"]
        if contract["type"] == "forbidden"
        for source in contract["source_modules"]
        for target in contract["forbidden_modules"]
    }
    assert forbidden >= {(floor, "roles") for floor in PACKAGES - {"roles"}}
    assert forbidden >= {(floor, "engine") for floor in ("bus", "sandbox")}


def test_a_broken_floor_would_be_noticed(tmp_path: Path) -> None:
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("import roles\n" if package == "engine" else "")
    contracts = (ROOT / "pyproject.toml").read_text().partition("[tool.importlinter]")
    (tmp_path / "pyproject.toml").write_text("".join(contracts[1:]))
    result = linter(cwd=tmp_path)
    assert result.returncode != 0
    assert "nothing imports roles BROKEN" in " ".join(result.stdout.split())


def test_each_room_keeps_its_budget() -> None:
    """Lines of source a package; the plan's budgets. A package that needs more says what it replaces."""
    budgets = {"bus": 8_800, "sandbox": 6_400, "engine": 28_000, "roles": 10_700}
    lines = {
        package: sum(len(path.read_text().splitlines()) for path in (ROOT / package).rglob("*.py"))
        for package in PACKAGES
    }
    assert {package: count for package, count in lines.items() if count > budgets[package]} == {}
