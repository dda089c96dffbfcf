"""Similarity of texts."""

from __future__ import annotations

import importlib.util
import sys
import zipfile
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import similarity
from engine.errors import ConfigError
from engine.nano import seeds
from engine.similarity import HashedTfidf, embedder, nearest, similarities, terms

embed = HashedTfidf().embed
TEXTS = st.lists(st.text(max_size=200), max_size=8)


@given(TEXTS)
def test_rows_are_of_unit_length_and_do_not_depend_on_their_neighbours(texts: list[str]) -> None:
    rows = embed(texts)
    assert rows.shape == (len(texts), similarity.PLACES)
    assert rows.dtype == np.float32
    lengths = np.linalg.norm(rows, axis=1)
    assert np.all((np.abs(lengths - 1) < 1e-4) | (lengths == 0))
    for row, text in zip(rows, texts, strict=True):
        assert np.array_equal(embed([text])[0], row)
        assert bool(row.any()) == bool(terms(text))


@given(TEXTS)
def test_cosines_are_symmetric_and_bounded(texts: list[str]) -> None:
    found = similarities(embed(texts), embed(texts))
    assert np.allclose(found, found.T, atol=1e-5)
    assert np.all(np.abs(found) <= 1.0)


@given(
    st.lists(st.sampled_from(["a cat", "two dogs", "one whale", "a red lamp"]), min_size=1), st.integers(0, 9)
)
def test_nearest_is_sorted_and_finds_the_text_itself(texts: list[str], count: int) -> None:
    rows = embed(texts)
    order, cosines = nearest(rows, rows, count)
    assert order.shape == cosines.shape == (len(texts), min(count, len(texts)))
    assert np.all(np.diff(cosines, axis=1) <= 1e-6)
    if count:
        assert [texts[place] for place in order[:, 0]] == texts


def test_identifiers_are_taken_apart() -> None:
    assert terms("self.hiddenNumber = HTTPLevel_12 + 7") == [
        "self", "hidden", "number", "http", "level", "12", "7",
    ]  # fmt: skip


def test_a_family_is_nearer_to_itself_than_to_any_other() -> None:
    rng = Random(3)
    programs = [
        (family.name, family.program(family.draw(level, rng, withheld=False), rng.choice(seeds.NOUNS)))
        for family in seeds.families()
        for level in (1, 2, 3)
    ]
    found = similarities(*[embed([text for _, text in programs])] * 2)
    same = np.array([[one == other for one, _ in programs] for other, _ in programs])
    assert found[same].min() > found[~same].max()


def test_a_model_that_is_not_there_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match="no sentence model"):
        embedder(str(tmp_path / "nothing"))
    (tmp_path / "config.json").write_text("{}")
    similarity.check(str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        embedder(str(tmp_path))


def test_minilm_is_used_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    present: list[Path] = []

    def find_spec(name: str) -> object:
        if name == similarity.PACKAGE:
            return SimpleNamespace(origin=str(present[0] / "__init__.py")) if present else None
        return find(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    made: list[Path] = []
    monkeypatch.setattr(similarity, "MiniLM", lambda path: made.append(path) or "model")
    assert isinstance(embedder.__wrapped__("auto"), HashedTfidf)
    with pytest.raises(ConfigError, match="not installed"):
        embedder.__wrapped__("minilm")
    present.append(tmp_path)
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("config.json", "{}")
    monkeypatch.setenv("SPADE_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        assert embedder.__wrapped__("auto") == "model"
    assert made[0] == made[1]
    assert (made[0] / "config.json").read_text() == "{}"
    assert made[0].is_relative_to(tmp_path / "cache")
