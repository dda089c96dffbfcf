"""Checkpoints: complete or not there, the newest good one wins, a full disk is said."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_scene import write_tensors
from structlog.testing import capture_logs

from bus.messages import BatchTrained, Credit
from engine.errors import SpadeError
from engine.lineage import Lineage, Version
from engine.training import checkpoint
from engine.training.buffer import BufferState, KeptSample
from engine.training.checkpoint import CheckpointTensors, LearnerState, needed, newest, places, restart


def made(value: float) -> CheckpointTensors:
    head = torch.full((3, 2), value)
    optimizer = {
        "state": {0: {"step": torch.tensor(1.0), "exp_avg": head * 2}},
        "param_groups": [{"lr": 0.1}],
    }
    return CheckpointTensors(
        {"head": head}, {"optimizer": optimizer, "generators": {"torch": torch.get_rng_state()}}
    )


def save(directory: Path, state: LearnerState, tensors: CheckpointTensors, **settings: Any) -> Path:
    return checkpoint.begin(directory, state, lambda place: write_tensors(place, tensors), **settings)()


def state(step: int, cursor: int = 0, fence: int = 0) -> LearnerState:
    return LearnerState(version=Version(fence, step), cursor=cursor)


def full_state() -> LearnerState:
    trained = BatchTrained(
        round=3, step=4, version=Version(1, 4).pack(), trained=("a",), dropped=(("b", "stale"),),
        agent_samples=1, designer_samples=0, max_staleness=2, mean_staleness=1.5, metrics={"loss": 0.5},
        seconds=0.25, final=True,
    )  # fmt: skip
    buffer = BufferState(
        closed=((0, 3),),
        kept=(KeptSample(7, "c"), KeptSample(8, "e", Credit("e", "agent", "g", 0.5, -1.0, 4), 3)),
        dropped={"d": "lost"},
        counts={"trained": 1},
        settled=2,
    )
    return LearnerState(
        version=Version(1, 4), lineage=Lineage().fork(1, 2), cursor=9, buffer=buffer, announced=trained
    )


def test_what_is_saved_is_read_back(tmp_path: Path):
    save(tmp_path, full_state(), made(1.0), keep=2)
    found = newest(tmp_path)
    assert found is not None
    assert found.state == full_state()
    tensors = found.tensors()
    assert torch.equal(tensors.model["head"], torch.full((3, 2), 1.0))
    assert torch.equal(tensors.extra["optimizer"]["state"][0]["exp_avg"], torch.full((3, 2), 2.0))
    assert tensors.extra["optimizer"]["param_groups"] == [{"lr": 0.1}]


def test_the_newest_ones_are_kept(tmp_path: Path):
    assert newest(tmp_path / "nothing") is None
    for fence, step in ((0, 9), (0, 10), (1, 3)):
        save(tmp_path, state(step, fence=fence), made(0.0), keep=2)
    found = newest(tmp_path)
    assert found is not None
    assert found.state.version == Version(1, 3)
    assert [path.name[:17] for path in sorted(tmp_path.iterdir())] == [
        "000000-0000000010",
        "000001-0000000003",
    ]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "extra.pt", "state.msgpack", "manifest.json"]
)
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_checkpoints_are_skipped_with_a_warning(name: str, damage: str, tmp_path: Path):
    save(tmp_path, state(1), made(1.0), keep=5)
    victim = save(tmp_path, state(2), made(2.0), keep=5) / name
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 0xFF
    if damage == "flip":
        victim.write_bytes(content)
    elif damage == "cut":
        victim.write_bytes(victim.read_bytes()[:-3])
    else:
        victim.unlink()
    with capture_logs() as logs:
        found = newest(tmp_path)
    assert found is not None
    assert found.state.version == Version(0, 1)
    assert [log["log_level"] for log in logs] == ["warning"]
    save(tmp_path, state(2), made(3.0), keep=5)
    again = newest(tmp_path)
    assert again is not None
    assert float(again.tensors().model["head"][0, 0]) == 3.0


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"3",
        b'{"model.safetensors": 3}',
        b'{"model.safetensors": [1, 2]}',
        b"{}",
        b'{"x": [1, "2"]}',
        b"",
    ],
)
@pytest.mark.parametrize("name", ["manifest.json", "state.msgpack"])
def test_a_file_of_another_form_costs_only_its_checkpoint(name: str, content: bytes, tmp_path: Path):
    save(tmp_path, state(1), made(1.0), keep=5)
    victim = save(tmp_path, state(2), made(2.0), keep=5)
    (victim / name).write_bytes(content)
    if name == "state.msgpack":  # with a manifest that fits it
        (victim / "manifest.json").unlink()
        checkpoint._seal(victim)
    found = newest(tmp_path)
    assert found is not None
    assert found.state.version == Version(0, 1)
    assert needed(tmp_path, keep=5) is not None


def test_nothing_usable_is_an_error_and_not_a_fresh_start(tmp_path: Path):
    place = save(tmp_path, state(1), made(1.0), keep=1)
    (place / "model.safetensors").unlink()
    with pytest.raises(SpadeError, match="None of 1 checkpoints is usable"):
        newest(tmp_path)


def test_a_write_that_dies_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save(tmp_path, state(1), made(1.0), keep=1)
    real = checkpoint.sync

    def full(path: Path) -> None:
        if path.name == "extra.pt":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path)

    monkeypatch.setattr(checkpoint, "sync", full)
    with pytest.raises(SpadeError, match="disk is full") as caught:
        save(tmp_path, state(2), made(2.0), keep=1)
    assert "Free some space" in caught.value.remedy
    monkeypatch.undo()
    found = newest(tmp_path)
    assert found is not None
    assert found.state.version == Version(0, 1)
    assert len(list(tmp_path.iterdir())) == 1


def test_remains_of_a_killed_writer_are_ignored_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    monkeypatch.setattr(checkpoint, "_seal", killed)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises(Killed):
        save(tmp_path, state(1), made(1.0), keep=2)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1
    assert newest(tmp_path) is None
    save(tmp_path, state(1), made(1.0), keep=2)
    assert [path.name for path in tmp_path.iterdir()] == ["000000-0000000001-000000000000"]


def test_the_stream_is_needed_from_the_oldest_checkpoint_on(tmp_path: Path):
    assert needed(tmp_path, keep=2) is None
    save(tmp_path, state(1, cursor=20), made(1.0), keep=2)
    assert needed(tmp_path, keep=2) == 21
    waiting = BufferState(kept=((7, "c"), (9, "d")))
    save(tmp_path, LearnerState(version=Version(0, 2), cursor=30, buffer=waiting), made(1.0), keep=2)
    assert needed(tmp_path, keep=2) == 7
    assert needed(tmp_path, keep=1) == 7
    save(tmp_path, state(3, cursor=40), made(1.0), keep=1)
    assert needed(tmp_path, keep=1) == 41
    (next(tmp_path.iterdir()) / "state.msgpack").write_bytes(b"torn")
    assert needed(tmp_path, keep=1) is None


def test_the_best_stays_and_does_not_hold_the_stream(tmp_path: Path):
    first = save(tmp_path, state(1, cursor=20), made(1.0), keep=1)
    for step in (2, 3, 4):
        save(tmp_path, state(step, cursor=20 + step), made(1.0), keep=1, spared={first.name})
    assert [path.name[:17] for path in places(tmp_path)] == ["000000-0000000004", "000000-0000000001"]
    assert needed(tmp_path, keep=1) == 25


def test_the_curriculum_lies_in_the_checkpoint_and_is_proved_with_it(tmp_path: Path):
    place = save(tmp_path, state(1), made(1.0), keep=2, curriculum=b"what the scorer knows")
    assert (place / "curriculum.snapshot").read_bytes() == b"what the scorer knows"
    found = newest(tmp_path)
    assert found is not None
    (place / "curriculum.snapshot").write_bytes(b"what the scorer knowz")
    with pytest.raises(SpadeError, match="None of 1"):
        newest(tmp_path)


def test_a_copy_starts_a_new_run(tmp_path: Path):
    place = save(tmp_path / "old", full_state(), made(1.0), keep=2, curriculum=b"old")
    restart(place, tmp_path / "new")
    found = newest(tmp_path / "new")
    assert found is not None
    assert found.state == LearnerState()
    assert torch.equal(found.tensors().model["head"], torch.full((3, 2), 1.0))
    assert float(found.tensors().extra["optimizer"]["state"][0]["step"]) == 1.0
    (place / "extra.pt").write_bytes(b"torn")
    with pytest.raises(ValueError, match="damaged"):
        restart(place, tmp_path / "other")
    assert not (tmp_path / "other").exists()
