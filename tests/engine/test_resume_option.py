"""What ``spade run --resume`` allows."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from scenes.small_run import config

from engine import recipe
from engine.config import LoraConfig
from engine.errors import ConfigError
from engine.run import RunDirectory
from engine.running.run_command import _start


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
