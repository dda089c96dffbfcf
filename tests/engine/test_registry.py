"""Plug-ins of other packages: found by entry point, imported when used, with settings of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from scenes import plugins

from engine import recipe, registry
from engine.errors import ConfigError
from engine.running.preflight import check_start

ROLE = """
import msgspec
from roles.base import Role

class Settings(msgspec.Struct):
    limit: int = 3
    label: str = "won"

class Counter(Role):
    name = "counter"
    settings_type = Settings

    async def run(self):
        await self.context.draining.wait()
"""
RECIPE = """
[run]
name = "plugged"
roles = ["counter"]
[model]
path = "warmstart:"
"""


class Limits(msgspec.Struct):
    limit: int = 3
    label: str = "won"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package with a role, and one whose role cannot be imported."""
    points = {"spade.roles/counter": "counter:Counter", "spade.roles/broken": "absent:Role"}
    monkeypatch.syspath_prepend(str(plugins.install(tmp_path, "guest_counter", {"counter": ROLE}, points)))
    yield tmp_path
    registry.registered.cache_clear()


def preflight(directory: Path, tables: str, *overrides: str) -> None:
    path = directory / "recipe.toml"
    path.write_text(RECIPE + tables)
    check_start(recipe.load(path, overrides).config)


def test_a_role_of_another_package_is_found_and_imported(package: Path) -> None:
    assert registry.load(registry.ROLES, "counter", where="run.roles").name == "counter"


def test_a_name_that_is_not_registered_is_refused_with_those_that_are(package: Path) -> None:
    with pytest.raises(ConfigError, match=r"no role 'count'.*run\.roles.*counter, designer"):
        registry.load(registry.ROLES, "count", where="run.roles")


def test_a_plug_in_that_cannot_be_imported_is_refused_with_the_reason(package: Path) -> None:
    with pytest.raises(ConfigError, match=r"guest_counter\.absent:Role\) cannot be imported: No module"):
        registry.load(registry.ROLES, "broken", where="run.roles")


def test_settings_are_decoded_by_their_owner() -> None:
    assert registry.settings({"counter": {"limit": 7}}, "counter", Limits) == Limits(limit=7)
    assert registry.settings({}, "counter", Limits) == Limits()


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ("[plugins.counter]\nlimit = 'x'", r"plugins\.counter\.limit: Expected `int`, got `str`"),
        ("[plugins.counter]\nlimits = 1", r"Unknown key plugins\.counter\.limits.*limit, label"),
        ("[plugins.counters]\nlimit = 1", r"\[plugins\.counters\] belongs to no plug-in.*counter"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_the_start(
    package: Path, tables: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        preflight(package, tables)


def test_settings_can_be_overridden_like_any_other(package: Path) -> None:
    preflight(package, "", "plugins.counter.limit=4")
    with pytest.raises(ConfigError, match=r"plugins\.counter\.limit: Expected `int`"):
        preflight(package, "", "plugins.counter.limit=many")
