"""The run directory: its lock, what a resume may change, finding runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from scenes.small_run import config

from engine import recipe
from engine.config import Config, LoraConfig, RunConfig
from engine.errors import ConfigError, SpadeError
from engine.files import free_mb
from engine.run import FIXED, RunDirectory, find, newest_first
from engine.running.run_command import _start
from engine.views import overview

HOLD = "import sys; from pathlib import Path; from engine.run import RunDirectory\n" + (
    "with RunDirectory(Path(sys.argv[1])).locked(): print('held', flush=True); sys.stdin.read()"
)


def test_a_second_process_is_told_who_holds_the_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "toy")
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"held\n"
        assert directory.holder()["pid"] == other.pid
        with pytest.raises(SpadeError, match=f"process {other.pid} on"), directory.locked():
            pass
        other.kill()
    with directory.locked():
        assert directory.holder() is not None
    assert directory.holder() is None


def test_looking_who_holds_a_run_does_not_create_it(tmp_path: Path) -> None:
    assert RunDirectory(tmp_path / "none").holder() is None
    assert not (tmp_path / "none").exists()


def test_the_recipe_of_another_build_is_said_to_be_one(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "toy")
    directory.root.mkdir()
    directory.config_file.write_text("[designer]\nrepair = false\n")
    with pytest.raises(ConfigError, match=r"Unknown key designer\.repair.*Another build of spade"):
        directory.config()


def test_a_resume_may_raise_the_steps_but_not_change_the_curriculum(tmp_path: Path) -> None:
    first = config(tmp_path)
    directory = RunDirectory.of(first)
    with directory.locked():
        assert directory.adopt(first) is False
        longer = msgspec.structs.replace(first, run=RunConfig(name="toy", directory=str(tmp_path), steps=9))
        assert directory.adopt(longer) is True
        assert directory.config().run.steps == 9
        other = msgspec.structs.replace(
            first, curriculum=msgspec.structs.replace(first.curriculum, environments=8)
        )
        with pytest.raises(ConfigError, match=r"curriculum\.environments was 4, is 8"):
            directory.adopt(other)
    assert directory.config() == longer


def changed(first: Config, setting: str, value: object) -> Config:
    """``first`` with another value of ``setting``, named as in a recipe."""
    *tables, key = setting.split(".")
    path = [first]
    for table in tables:
        path.append(getattr(path[-1], table))
    found = msgspec.structs.replace(path.pop(), **{key: value})
    for table in reversed(tables):
        found = msgspec.structs.replace(path.pop(), **{table: found})
    return found


STAYS = {
    "agent.max_turns": 7, "agent.play_tokens": 512, "agent.context_tokens": 77, "agent.prompt": "tools",
    "agent.sampling.max_tokens": 7, "agent.truncated": "mask", "designer.kind": "frozen",
    "designer.invalid": "drop", "designer.designs_per_ticket": 2, "designer.skills_per_cohort": 1,
    "learner.train_hinted": True, "learner.hinted_weight": 0.25, "learner.agent.max_staleness": 9,
    "reward.low": 0.3,
}  # fmt: skip
CHANGES = {
    "agent.concurrency": 7, "agent.episode_seconds": 7.0, "designer.attempts": 7, "designer.target": 0.7,
    "designer.memory": False, "learner.kl": 0.7, "learner.entropy": 0.7,
    "learner.optimizer.learning_rate": 0.7, "learner.checkpoint_every": 7, "server.request_seconds": 7.0,
}  # fmt: skip


@pytest.mark.parametrize("setting", [*STAYS, *CHANGES])
def test_a_resume_changes_no_setting_that_the_curriculum_reads(tmp_path: Path, setting: str) -> None:
    first = config(tmp_path)
    directory = RunDirectory.of(first)
    with directory.locked():
        directory.adopt(first)
    other = changed(first, setting, (STAYS | CHANGES)[setting])
    if setting in CHANGES:
        assert directory.require_same(other)
    else:
        value = re.escape(json.dumps(STAYS[setting]))
        with pytest.raises(ConfigError, match=rf"{re.escape(setting)} was .*, is {value}"):
            directory.require_same(other)


def test_every_fixed_setting_exists(tmp_path: Path) -> None:
    for setting in FIXED:
        found: object = config(tmp_path)
        for name in setting.split("."):
            found = getattr(found, name)


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "toy")
    directory.require_space(1)
    with pytest.raises(ConfigError, match="is full"):
        directory.require_space(free_mb(tmp_path) + 1024)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match="cannot be created"),
        RunDirectory(tmp_path / "file" / "x").locked(),
    ):
        pass
    with pytest.raises(ConfigError, match="cannot be created"):
        RunDirectory(tmp_path / "file" / "x").require_space()


def test_the_newest_run_is_found_when_none_is_named(tmp_path: Path) -> None:
    for age, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.db").touch()
        os.utime(tmp_path / name / "run.db", (age, age))
    assert [run.root.name for run in newest_first(tmp_path)] == ["new", "old"]
    assert find(None, tmp_path).root.name == "new"
    assert find("old", tmp_path).root.name == "old"
    assert find(str(tmp_path / "old"), Path("elsewhere")).root.name == "old"
    with pytest.raises(ConfigError, match=r"There is no run other.*new, old"):
        find("other", tmp_path)
    with pytest.raises(ConfigError, match="Start one"):
        find(None, tmp_path / "empty")
    with RunDirectory(tmp_path / "third").locked():  # it prepares its model and has no database
        (tmp_path / "third" / "config.toml").touch()
        assert find(None, tmp_path).root.name == "third"
        assert overview.listing(tmp_path).splitlines()[1].split() == ["third", "starting", "-", "none"]


def test_a_resumed_run_keeps_the_model_it_started_from(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "toy")
    model = tmp_path / "model"
    model.mkdir()
    with directory.locked():
        assert directory.starting_model() is None
        directory.keep_starting_model(model)
        assert directory.starting_model() == model.resolve()
        model.rmdir()
        with pytest.raises(ConfigError, match=r"which is gone.*run\.name=NAME"):
            directory.starting_model()


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path / "runs" / "mine")
    found.root.mkdir(parents=True)
    return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    place = tmp_path / "checkpoint"
    place.mkdir()
    (place / "manifest.json").write_text("{}")
    return place


def test_auto_goes_on_or_starts(directory: RunDirectory):
    assert _start("auto", directory, config()) is None
    directory.config_file.write_text("")
    directory.model_file.write_text("")
    assert _start("auto", directory, config()) is None


def test_never_refuses_what_was_started(directory: RunDirectory):
    assert _start("never", directory, config()) is None
    directory.config_file.write_text("")
    with pytest.raises(ConfigError, match="was started before") as caught:
        _start("never", directory, config())
    assert "run.name=NAME" in caught.value.remedy


def test_a_checkpoint_begins_a_new_run_only(directory: RunDirectory, checkpoint: Path):
    assert _start(str(checkpoint), directory, config()) == checkpoint
    directory.config_file.write_text("")
    assert _start(str(checkpoint), directory, config()) == checkpoint, "the first attempt had no model yet"
    directory.model_file.write_text("")
    with pytest.raises(ConfigError, match="was started before"):
        _start(str(checkpoint), directory, config())


def test_what_is_no_checkpoint_is_said(directory: RunDirectory, tmp_path: Path):
    for wrong in (tmp_path, tmp_path / "nothing", "always"):
        with pytest.raises(ConfigError, match="no checkpoint"):
            _start(str(wrong), directory, config())


def test_a_checkpoint_of_another_kind_of_learner_is_refused_before_anything_starts(
    directory: RunDirectory, tmp_path: Path
):
    theirs = config()
    learner = msgspec.structs.replace(theirs.learner, lora=LoraConfig(rank=8))
    place = tmp_path / "runs" / "theirs" / "learner" / "checkpoints" / "000000-0000000001-000000000009"
    place.mkdir(parents=True)
    (place / "manifest.json").write_text("{}")
    adapted = msgspec.structs.replace(theirs, learner=learner)
    (tmp_path / "runs" / "theirs" / "config.toml").write_text(recipe.dump(adapted))
    assert _start(str(place), directory, adapted) == place
    with pytest.raises(ConfigError, match=r"learner\.lora\.rank is 8 in that run and 0"):
        _start(str(place), directory, theirs)
