"""The import contracts of pyproject.toml cover every package, and each package keeps its budget of lines."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"bus", "sandbox", "engine", "roles"}


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


def test_each_room_keeps_its_budget() -> None:
    budgets = {"bus": 4_495, "sandbox": 6_250, "engine": 29_550, "roles": 9_640}
    lines = {
        package: sum(len(path.read_text().splitlines()) for path in (ROOT / package).rglob("*.py"))
        for package in PACKAGES
    }
    assert {package: count for package, count in lines.items() if count > budgets[package]} == {}
