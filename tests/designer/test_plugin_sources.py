"""A corpus scheme and a kind of environment pool that another package adds: one file, no change here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from scenes import plugins

from engine import recipe, registry
from engine.errors import ConfigError
from roles.designer.corpus import load
from roles.designer.environment_pool import Programs
from roles.designer.role import DesignerRole

SOURCES = """
from engine.errors import ConfigError
from roles.designer.corpus import Document

def proverbs(argument, reading):
    if argument != "english":
        raise ConfigError(f"there are no proverbs in {argument!r}")
    reading.skip("number 2", "not a proverb")
    yield Document("one", "A stitch in time saves nine.", skill="Optimization")

def riddles(argument):
    yield argument, "class RiddleEnv: ..."
"""
RECIPE = """
[run]
name = "plugged"
roles = ["designer"]
[model]
path = "warmstart:"
[designer]
similarity = "hashed"
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    points = {"spade.corpora/proverbs": "sources:proverbs", "spade.pools/riddles": "sources:riddles"}
    installed = plugins.install(tmp_path / "packages", "guest_sources", {"sources": SOURCES}, points)
    monkeypatch.syspath_prepend(str(installed))
    yield
    registry.registered.cache_clear()


def loaded(directory: Path, settings: str) -> recipe.Recipe:
    path = directory / "recipe.toml"
    path.write_text(RECIPE + settings)
    return recipe.load(path)


def test_a_corpus_of_another_package_is_read(tmp_path: Path) -> None:
    config = loaded(tmp_path, 'corpus = "proverbs:english"').config
    DesignerRole.check(config)
    corpus = load(config.designer.corpus)
    assert [item.whole() for source in corpus.sources for item in source.documents] == [
        "A stitch in time saves nine."
    ]
    assert corpus.named == ("number 2: not a proverb",)


def test_its_errors_come_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no proverbs in 'latin'"):
        DesignerRole.check(loaded(tmp_path, 'corpus = "proverbs:latin"').config)


def test_an_unknown_scheme_is_refused_with_all_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"designer\.corpus.*begin with botocore:.*proverbs:"):
        loaded(tmp_path, 'corpus = "poems:english"')


def test_a_pool_of_another_package_is_drawn_from(tmp_path: Path) -> None:
    config = loaded(tmp_path, 'kind = "pool"\npool = { source = "riddles:sphinx" }').config
    DesignerRole.check(config)
    assert Programs.open(config.designer.pool).draw(0, 0) == ("sphinx", "class RiddleEnv: ...")
