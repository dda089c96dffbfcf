"""The import contracts of pyproject.toml hold, and they cover every package."""

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
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert f"{len(contracts)} kept, 0 broken" in result.stdout


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
    acyclic = [one for one in settings["contracts"] if one["type"] == "acyclic_siblings"]
    assert [set(one["ancestors"]) for one in acyclic] == [PACKAGES]


def test_a_broken_contract_would_be_noticed(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        """[tool.importlinter]
root_packages = ["engine", "roles"]
[[tool.importlinter.contracts]]
name = "nothing imports roles"
type = "forbidden"
source_modules = ["engine"]
forbidden_modules = ["roles"]
[[tool.importlinter.contracts]]
name = "no circle"
type = "acyclic_siblings"
ancestors = ["roles"]
"""
    )
    files = {"engine/__init__": "import roles", "roles/__init__": ""}
    files |= {"roles/one": "from roles import two", "roles/two": "from roles import one"}
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{text}\n")
    result = linter(cwd=tmp_path)
    assert result.returncode != 0
    assert "nothing imports roles BROKEN no circle BROKEN" in " ".join(result.stdout.split())


def test_each_room_keeps_its_budget() -> None:
    """Lines of source a package; the plan's budgets. A package that needs more says what it replaces."""
    budgets = {"bus": 8_800, "sandbox": 7_000, "engine": 22_600, "roles": 10_700}
    lines = {
        package: sum(len(path.read_text().splitlines()) for path in (ROOT / package).rglob("*.py"))
        for package in PACKAGES
    }
    assert {package: count for package, count in lines.items() if count > budgets[package]} == {}
