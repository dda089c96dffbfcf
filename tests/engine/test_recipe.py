"""Recipes: merging, overrides, and errors that name file, key, value and what is allowed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes.small_run import config

from engine import recipe
from engine.errors import ConfigError

BASE = """
[run]
name = "base"
steps = 5
roles = ["designer", "agent"]

[model]
path = "m"

[server.args]
max-num-seqs = 320
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path / "base.toml", BASE)


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        recipe.load(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_recipe_extends_another_key_by_key(base: Path, tmp_path: Path) -> None:
    child = write(
        tmp_path / "child.toml",
        'extends = "base.toml"\n[run]\nname = "child"\nroles = ["scorer"]\n[learner]\nkl = 0.5\n',
    )
    loaded = recipe.load(child)
    assert (loaded.config.run.name, loaded.config.run.steps) == ("child", 5)
    assert loaded.config.run.roles == ("scorer",)
    assert loaded.config.learner.kl == 0.5
    assert [file.name for file in loaded.files] == ["base.toml", "child.toml"]


def test_extends_in_a_circle_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.toml", 'extends = "b.toml"')
    write(tmp_path / "b.toml", 'extends = "a.toml"')
    assert "a.toml -> b.toml -> a.toml" in refused(tmp_path / "a.toml")


def test_overrides_are_laid_over_the_files(base: Path) -> None:
    loaded = recipe.load(
        base,
        [
            "learner.optimizer.learning_rate=1e-4",
            "run.name=other",
            "curriculum.environments=8",
            "run.roles=scorer,learner",
            "server.args.enforce-eager=true",
            'designer.skills=["A", "B"]',
            "bus.token=12345",
        ],
    ).config
    assert loaded.learner.optimizer.learning_rate == 1e-4
    assert loaded.run.name == "other"
    assert loaded.run.roles == ("scorer", "learner")
    assert loaded.server.args == {"max-num-seqs": 320, "enforce-eager": True}
    assert loaded.designer.skills == ("A", "B")
    assert loaded.bus.token == "12345"


DEEP = f"a = {'[' * 5000}{']' * 5000}"


@pytest.mark.parametrize(
    ("written", "parts"),
    [
        (
            BASE + "[learner.optimizer]\nlearning_rat = 3\n",
            [
                "learner.optimizer.learning_rat = 3",
                "Did you mean learner.optimizer.learning_rate?",
                "beta1, beta2",
            ],
        ),
        (BASE + '[[evaluator.suites]]\nname = "mid"\nepisode = 3\n', ["evaluator.suites[0].episode = 3"]),
        ('[run]\nname = "x"\n[model]\n', ["model.path is missing"]),
        ("[run]\nname = \n", ["line 2"]),
        ('[run]\nname = "\xff"\n', ["UTF-8", "byte 14 is 0xff"]),
        (DEEP, ["nested"]),
    ],
    ids=["unknown key", "unknown key in a list", "missing key", "no TOML", "no UTF-8", "too deep"],
)
def test_a_recipe_that_does_not_fit_is_refused_by_file_key_and_value(
    tmp_path: Path, written: str, parts: list[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(written.encode("latin-1"))
    text = refused(path)
    for part in (*parts, "bad.toml"):
        assert part in text


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("run.steps=many", ['run.steps = "many"', "the command line", "a whole number"]),
        ("run.steps=2.5", ["run.steps = 2.5", "a whole number"]),
        ("curriculum.schedule=weekly", ['curriculum.schedule = "weekly"', '"rolling" or "epoch"']),
        ("learner.clip_low=true", ["learner.clip_low = true", "a number"]),
        ("run.roles=3", ["run.roles = 3", "a list, each item a text"]),
        ("sandbox.allow_unsafe=1", ["sandbox.allow_unsafe = 1", "true or false"]),
        ("agent.plays_per_round=3", ["Did you mean curriculum.plays_per_round?"]),
        ("learning_rate=1e-4", ["Did you mean learner.optimizer.learning_rate?"]),
        ("server.args.odd={a = 1}", ["server.args.odd = "]),
        ("run", []),
        ("=3", []),
        ("run.name.first=x", []),
        ("nothing.at.all=3", []),
    ],
)
def test_an_override_that_does_not_fit_is_refused_with_what_does(
    base: Path, override: str, parts: list[str]
) -> None:
    text = refused(base, override)
    for part in parts:
        assert part in text


def test_a_recipe_that_is_not_there_lists_its_neighbours(base: Path, tmp_path: Path) -> None:
    text = refused(tmp_path / "bsae.toml")
    assert "Did you mean" in text
    assert "base.toml" in text


def test_conflicts_name_the_value_and_where_it_comes_from(base: Path) -> None:
    text = refused(base, "curriculum.delay=2")
    assert "curriculum.delay = 2 in the command line" in text
    assert "at least curriculum.rounds_per_window = 4" in text
    text = refused(base, "curriculum.rounds_per_window=8", "curriculum.delay=8")
    assert "learner.designer.max_staleness = 8 in" in text
    assert "(by default)" in text


def test_a_dumped_recipe_reads_back(tmp_path: Path) -> None:
    first = config(tmp_path)
    path = write(tmp_path / "dumped.toml", recipe.dump(first))
    assert recipe.load(path).config == first


@settings(max_examples=50)
@given(st.text(max_size=30), st.text(max_size=30))
def test_no_override_escapes_as_another_error(key: str, value: str) -> None:
    with TemporaryDirectory() as directory, suppress(ConfigError):
        recipe.load(write(Path(directory) / "base.toml", BASE), [f"{key}={value}"])


def test_a_text_table_takes_a_number_as_text(base: Path) -> None:
    found = recipe.load(base, ["server.environment.OMP_NUM_THREADS=2"]).config
    assert found.server.environment == {"OMP_NUM_THREADS": "2"}


def test_a_byte_order_mark_is_no_fault(base: Path, tmp_path: Path) -> None:
    path = tmp_path / "mark.toml"
    path.write_text(BASE, encoding="utf-8-sig")
    assert recipe.load(path).config == recipe.load(base).config


def test_a_directory_lists_its_recipes(base: Path) -> None:
    text = refused(base.parent)
    assert "Is a directory" in text
    assert f"Recipes in {base.parent}: {base.name}" in text
