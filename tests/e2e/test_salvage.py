"""A run whose stream of facts lost its tail: refused with the way out, and salvaged into a new run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import anyio
import pytest
import torch
from anyio import to_thread
from nano_runs import START_SECONDS, command, ended, nothing_left, output, spawn, start, status

from engine.records.archive import FOLDER
from engine.training.checkpoint import Checkpoint, newest, read_tensors
from roles.designer import memory_store

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
SETTINGS = (
    "curriculum.environments=4",
    "curriculum.rounds_per_window=2",
    "curriculum.delay=2",
    "curriculum.plays_per_round=4",
    "curriculum.hinted_plays=2",
    "learner.designer.scope=global",
    "learner.checkpoints_kept=9",
    "evaluator.suites=[]",
    "ui.report=false",
)
ALL = 'run.roles=["designer", "agent", "scorer", "learner", "server"]'


def cut_tail(directory: Path) -> None:
    """Take the second half of the stream EVENT and its index, as a power failure may."""
    (place,) = directory.rglob("EVENT_nano/msgs")
    (place / "index.db").unlink(missing_ok=True)
    blocks = sorted(place.glob("*.blk"), key=lambda path: int(path.stem))
    assert blocks
    for block in blocks:
        os.truncate(block, block.stat().st_size // 2 if block == blocks[0] else 0)


def optimizer_steps(path: Path) -> set[int]:
    state = read_tensors(path).extra["optimizer"]["state"]
    return {int(one["step"]) for one in state.values()}


def newest_of(directory: Path) -> Checkpoint:
    found = newest(directory / "learner" / "checkpoints")
    assert found is not None
    return found


async def test_a_run_that_lost_its_tail_goes_on_as_a_new_one(tmp_path: Path) -> None:
    old, new = tmp_path / "nano", tmp_path / "second"
    first = start(tmp_path, *SETTINGS, ALL, "run.steps=20")
    with anyio.fail_after(START_SECONDS):
        while (await to_thread.run_sync(status, tmp_path)).get("step", 0) < 2:
            assert first.poll() is None, output(tmp_path)
            await anyio.sleep(0.5)
    os.kill(first.pid, signal.SIGINT)
    assert await ended(first) in (0, 130), output(tmp_path)
    await nothing_left(tmp_path)
    checkpoint = newest_of(old)
    trained = checkpoint.state.version.step
    assert optimizer_steps(checkpoint.path) == {trained}
    cut_tail(old / "bus")

    again = start(tmp_path, *SETTINGS, 'run.roles=["scorer"]', "run.steps=20")
    assert await ended(again) == 1
    assert "--salvage" in output(tmp_path)
    await nothing_left(tmp_path)

    words = command(tmp_path, *SETTINGS, ALL, "run.steps=1", "run.name=second", "--salvage", "nano")
    assert await ended(spawn(words, tmp_path)) == 0, output(tmp_path)
    await nothing_left(tmp_path)
    assert "Kept: weights, optimiser" in output(tmp_path)
    assert "the designer's memory" in output(tmp_path)
    assert f"the run had trained round {trained - 1}" in output(tmp_path)
    begun = sorted((new / "learner" / "checkpoints").iterdir())[0]
    theirs, ours = read_tensors(checkpoint.path), read_tensors(begun)
    assert theirs.model.keys() == ours.model.keys()
    assert all(torch.equal(theirs.model[name], ours.model[name]) for name in ours.model)
    last = newest_of(new)
    assert last.state.version.step >= 1, "versions begin anew"
    assert optimizer_steps(last.path) == {trained + last.state.version.step}
    archived = {path.name for path in (old / FOLDER).glob("*.py")}
    assert archived
    assert archived <= {path.name for path in (new / FOLDER).glob("*.py")}
    was, now = memory_store.read(old), memory_store.read(new)
    assert was is not None
    assert now is not None
    remembered = {record.environment for record in (*was.memory.open, *was.memory.closed)}
    assert remembered
    assert remembered <= {record.environment for record in (*now.memory.open, *now.memory.closed)}
