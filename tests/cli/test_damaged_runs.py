"""Damaged run directories: what is whole is used, what is lost is named."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from scenes.small_run import config

from engine.errors import ConfigError
from engine.records import history
from engine.run import RunDirectory
from engine.running import run_command, salvage


def database(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (name TEXT, value TEXT)")
        connection.executemany(
            "INSERT INTO notes VALUES (?, ?)", [(str(one), "x" * 500) for one in range(99)]
        )


@pytest.mark.parametrize("fault", ["text", "header", "page", "cut"])
def test_a_damaged_database_is_moved_aside(fault: str, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    database(directory.database)
    content = bytearray(directory.database.read_bytes())
    if fault == "text":
        content = bytearray(b"no database")
    elif fault == "header":
        content[:16] = b"x" * 16
    elif fault == "page":
        content[4096:8192] = b"\xff" * 4096
    else:
        del content[9000:]
    directory.database.write_bytes(content)
    assert not run_command.is_complete(directory, config(tmp_path))
    (aside,) = tmp_path.glob("run.db.damaged-*")
    assert aside.read_bytes() == content
    assert not directory.database.exists(), "the supervisor builds it again from the facts"


def test_a_whole_database_stays(tmp_path: Path) -> None:
    database(tmp_path / "run.db")
    assert history.set_aside_if_damaged(tmp_path / "run.db") is None
    assert [path.name for path in tmp_path.iterdir()] == ["run.db"]


@pytest.mark.parametrize("content", ["", "\n", "models/policy", "\0\0\0\0"])
def test_a_damaged_file_with_the_starting_model_is_named(content: str, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.model_file.write_text(content)
    with pytest.raises(ConfigError, match=r"model\.path is damaged: it does not name a directory"):
        directory.starting_model()


def test_a_missing_file_of_a_run_that_began_at_a_checkpoint_leads_to_its_model(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.starting_model() is None
    (tmp_path / "start").mkdir()
    assert directory.starting_model() == tmp_path / "start"


def damaged(tmp_path: Path) -> RunDirectory:
    old = RunDirectory(tmp_path / "a")
    (old.root / "learner" / "checkpoints" / "000000-0000000002-000000000009").mkdir(parents=True)
    (old.root / "learner" / "checkpoints" / "000000-0000000002-000000000009" / "manifest.json").touch()
    old.config_file.touch()
    return old


@pytest.mark.parametrize("fault", ["itself", "unknown", "running", "no checkpoint"])
def test_a_run_that_cannot_be_salvaged_is_refused(fault: str, tmp_path: Path) -> None:
    old, new = damaged(tmp_path), RunDirectory(tmp_path / "b")
    if fault == "no checkpoint":
        next(old.root.rglob("manifest.json")).unlink()
    words = {
        "itself": "run.name=NAME",
        "unknown": "There is no run",
        "running": "is running",
        "no checkpoint": "has no",
    }
    name = "z" if fault == "unknown" else "a"
    if fault == "running":
        with old.locked(), pytest.raises(ConfigError, match=words[fault]):
            salvage.source(name, tmp_path, new)
        return
    with pytest.raises(ConfigError, match=words[fault]):
        salvage.source(name, tmp_path, old if fault == "itself" else new)


@pytest.mark.parametrize("memory", ["whole", "cut", "missing"])
async def test_a_salvaged_run_has_archive_and_memory(memory: str, tmp_path: Path) -> None:
    from scenes.memory_bus import MemoryBus

    from engine.records.archive import ProgramArchive
    from roles.designer import memory_store
    from roles.designer.memory import Memory, MemoryState

    old, new = damaged(tmp_path), RunDirectory(tmp_path / "b")
    program = ProgramArchive(old.root).put("class Game: ...")
    snapshot = memory_store.MemorySnapshot(
        run="a", position=77, key="k", memory=MemoryState(), used={"d": 3}, through=80
    )
    memory_store.write(old.root, snapshot)
    if memory == "cut":
        (old.root / memory_store.FILE).write_bytes((old.root / memory_store.FILE).read_bytes()[:-4])
    elif memory == "missing":
        (old.root / memory_store.FILE).unlink()
    kept, lost = salvage.carry_over(salvage.source("a", tmp_path, new), new)
    assert "1 archived programs" in kept
    assert ("the designer's memory" in kept) == (memory == "whole")
    assert "Lost" in lost
    assert ProgramArchive(new.root).get(program) == "class Game: ..."
    used: list[str] = []
    bus = MemoryBus(run="b", role="designer", instance="0")
    store = memory_store.MemoryStore(bus, new.root, Memory(records=10), used.append)
    await store.read_back()
    assert used == (["d"] if memory == "whole" else [])
    assert store.position == 0
