"""Recipes: merging, overrides, and errors that name file, key, value and what is allowed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
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


def test_an_unknown_key_names_file_value_neighbour_and_table(base: Path, tmp_path: Path) -> None:
    text = refused(write(tmp_path / "bad.toml", BASE + "\n[learner.optimizer]\nlearning_rat = 3\n"))
    assert "learner.optimizer.learning_rat = 3" in text
    assert "bad.toml" in text
    assert "Did you mean learner.optimizer.learning_rate?" in text
    assert "beta1, beta2, kind, learning_rate" in text


def test_a_key_in_the_wrong_table_is_found_elsewhere(base: Path) -> None:
    assert "Did you mean curriculum.plays_per_round?" in refused(base, "agent.plays_per_round=3")


def test_an_unknown_key_in_a_list_of_tables_is_found(tmp_path: Path) -> None:
    bad = write(
        tmp_path / "bad.toml",
        BASE + '\n[[evaluator.suites]]\nname = "mid"\nsource = "seeds:mid"\nepisode = 3\n',
    )
    assert "evaluator.suites[0].episode = 3" in refused(bad)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("run.steps=many", ['run.steps = "many"', "the command line", "a whole number"]),
        ("run.steps=2.5", ["run.steps = 2.5", "a whole number"]),
        ("curriculum.schedule=weekly", ['curriculum.schedule = "weekly"', '"rolling" or "epoch"']),
        ("learner.clip_low=true", ["learner.clip_low = true", "a number"]),
        ("run.roles=3", ["run.roles = 3", "a list, each item a text"]),
        ("sandbox.allow_unsafe=1", ["sandbox.allow_unsafe = 1", "true or false"]),
    ],
)
def test_a_value_that_does_not_fit_says_what_does(base: Path, override: str, parts: list[str]) -> None:
    text = refused(base, override)
    for part in parts:
        assert part in text


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    text = refused(write(tmp_path / "bad.toml", '[run]\nname = "x"\n[model]\n'))
    assert "model.path is missing" in text
    assert "bad.toml" in text


def test_broken_toml_names_file_and_line(tmp_path: Path) -> None:
    text = refused(write(tmp_path / "bad.toml", "[run]\nname = \n"))
    assert "bad.toml" in text
    assert "line 2" in text


def test_a_recipe_that_is_not_there_lists_its_neighbours(base: Path, tmp_path: Path) -> None:
    text = refused(tmp_path / "bsae.toml")
    assert "Did you mean" in text
    assert "base.toml" in text


@pytest.mark.parametrize("override", ["run", "=3", "run.name.first=x", "nothing.at.all=3"])
def test_overrides_of_no_form_are_refused(base: Path, override: str) -> None:
    refused(base, override)


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


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_override_escapes_as_another_error(key: str, value: str) -> None:
    source = recipe._Source({}, {}, [Path("x.toml")])
    try:
        recipe._override(source, f"{key}={value}")
    except ConfigError:
        pass
    else:
        assert source.values


def test_a_text_table_takes_a_number_as_text(tmp_path: Path) -> None:
    recipe_file = tmp_path / "recipe.toml"
    recipe_file.write_text('[run]\nname = "toy"\n[model]\npath = "somewhere"\n')
    found = recipe.load(recipe_file, ["server.environment.OMP_NUM_THREADS=2"]).config
    assert found.server.environment == {"OMP_NUM_THREADS": "2"}


def test_a_recipe_that_is_no_text_names_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[run]\nname = "\xff"\n')
    text = refused(path)
    assert "UTF-8" in text
    assert "byte 14 is 0xff" in text


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "mark.toml"
    path.write_text(BASE, encoding="utf-8-sig")
    assert recipe.load(path).config == recipe.load(write(tmp_path / "plain.toml", BASE)).config


def test_a_directory_lists_its_recipes(base: Path) -> None:
    text = refused(base.parent)
    assert "Is a directory" in text
    assert f"Recipes in {base.parent}: {base.name}" in text


def test_a_recipe_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    assert "nested" in refused(write(tmp_path / "deep.toml", f"a = {'[' * 5000}{']' * 5000}"))


def test_a_wrong_value_of_a_free_table_is_named(base: Path) -> None:
    assert "server.args.odd = " in refused(base, "server.args.odd={a = 1}")


def test_a_key_at_the_top_level_is_found_in_its_table(base: Path) -> None:
    assert "Did you mean learner.optimizer.learning_rate?" in refused(base, "learning_rate=1e-4")
