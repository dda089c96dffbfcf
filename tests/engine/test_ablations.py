"""Switches and presets in recipes and on the command line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine import ablations, recipe
from engine.config import Config
from engine.errors import ConfigError
from engine.run import RunDirectory
from engine.running import plan


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "recipe.toml"
    file.write_text(
        '[run]\nname = "t"\n[model]\npath = "m"\n[designer]\ncorpus = "pydoc:json"\nskills_per_cohort = 3\n'
    )
    return file


def changed(one: Config, other: Config) -> set[str]:
    before, after = msgspec.to_builtins(one), msgspec.to_builtins(other)
    return {
        f"{table}.{key}"
        for table in before
        for key in before[table]
        if before[table][key] != after[table][key]
    }


@pytest.mark.parametrize(
    ("switch", "keys"),
    [
        ("corpus=off", {"designer.corpus"}),
        ("memory=off", {"designer.memory"}),
        ("designer=frozen", {"designer.kind"}),
        ("skills=two", {"designer.skills", "designer.skills_per_cohort"}),
    ],
)
def test_a_switch_changes_its_own_settings(path: Path, switch: str, keys: set[str]) -> None:
    plain, switched = recipe.load(path).config, recipe.load(path, [switch]).config
    assert changed(plain, switched) == keys
    before, after = ablations.factors(plain), ablations.factors(switched)
    factor, _, value = switch.partition("=")
    assert {name for name in after if after[name] != before[name]} == {factor}
    assert after[factor].split()[0] == value
    shown = plan.render(plan.make(switched, RunDirectory.of(switched))).splitlines()
    assert f"  {factor:<12} {after[factor]}" in shown


def test_a_later_override_goes_over_a_switch(path: Path) -> None:
    assert recipe.load(path, ["corpus=off", "designer.corpus=pydoc:re"]).config.designer.corpus == "pydoc:re"


@pytest.mark.parametrize("override", ["corpus=on", "skills=three", "designer=gone", "memory="])
def test_an_unknown_switch_names_the_known_ones(path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="corpus=off, memory=off, designer=frozen, skills=two"):
        recipe.load(path, [override])


def test_what_is_no_switch_is_left_alone() -> None:
    assert ablations.expand("designer.corpus=off") == ("designer.corpus=off",)
    assert ablations.expand("corpus") == ("corpus",)


@pytest.mark.parametrize("written", ['skills = "tools"', 'skills = ["tools"]'])
def test_presets_of_skills(path: Path, written: str) -> None:
    path.write_text(path.read_text() + written)
    assert recipe.load(path).config.designer.skills == ablations.TOOLS
    override = ["designer.skills=two", "designer.skills_per_cohort=2"]
    assert recipe.load(path, override).config.designer.skills == ablations.TWO


def test_two_skills_of_a_recipe_with_skills_of_its_own(path: Path) -> None:
    path.write_text(
        path.read_text()
        + 'skills = ["Juggling", "Optimization", "Pattern Recognition", "Music"]\n'
        + 'custom_skills = [{name = "Juggling"}, {name = "Pattern Recognition", description = "x"}]\n'
    )
    assert len(recipe.load(path).config.designer.custom_skills) == 2
    two = recipe.load(path, ["skills=two"]).config.designer
    assert two.skills == ablations.TWO
    assert [skill.name for skill in two.custom_skills] == ["Pattern Recognition"]


def test_a_resolved_recipe_reads_back(path: Path) -> None:
    mixed = 'designer.corpus=[{source = "pydoc:json", weight = 3}, {source = "seeds:"}]'
    config = recipe.load(path, [mixed, "skills=two"]).config
    again = path.with_name("again.toml")
    again.write_text(recipe.dump(config))
    assert recipe.load(again).config == config
    assert ablations.factors(config)["corpus"] == "75% pydoc:json + 25% seeds:"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('corpus = [{source = "ftp:x"}]', r"designer.corpus\[0\].source.*jsonl:"),
        ('corpus = [{source = "seeds:", weight = 0}]', r"designer.corpus\[0\].weight"),
        ('corpus = [{sauce = "seeds:"}]', r"designer.corpus\[0\]"),
        ('corpus = "ftp:x"', "designer.corpus.*jsonl:"),
        ('[[designer.custom_skills]]\nname = "Juggling"', r"custom_skills\[0\].name.*Juggling"),
        ('skills = ["A"]\ncustom_skills = [{name = "A"}, {name = "A"}]\nskills_per_cohort = 0', "twice"),
        ('prompt = "huge"', '"full" or "tools" or "nano"'),
    ],
)
def test_what_cannot_be_is_refused(path: Path, lines: str, words: str) -> None:
    path.write_text(f'[run]\nname = "t"\n[model]\npath = "m"\n[designer]\n{lines}\n')
    with pytest.raises(ConfigError, match=words):
        recipe.load(path)
