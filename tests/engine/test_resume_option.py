"""What ``spade run --resume`` allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from engine.job import _start
from engine.run import RunDirectory


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
    assert _start("auto", directory) is None
    directory.config_file.write_text("")
    directory.model_file.write_text("")
    assert _start("auto", directory) is None


def test_never_refuses_what_was_started(directory: RunDirectory):
    assert _start("never", directory) is None
    directory.config_file.write_text("")
    with pytest.raises(ConfigError, match="was started before") as caught:
        _start("never", directory)
    assert "run.name=NAME" in caught.value.remedy


def test_a_checkpoint_begins_a_new_run_only(directory: RunDirectory, checkpoint: Path):
    assert _start(str(checkpoint), directory) == checkpoint
    directory.config_file.write_text("")
    assert _start(str(checkpoint), directory) == checkpoint, "the first attempt had no model yet"
    directory.model_file.write_text("")
    with pytest.raises(ConfigError, match="was started before"):
        _start(str(checkpoint), directory)


def test_what_is_no_checkpoint_is_said(directory: RunDirectory, tmp_path: Path):
    for wrong in (tmp_path, tmp_path / "nothing", "always"):
        with pytest.raises(ConfigError, match="no checkpoint"):
            _start(str(wrong), directory)
