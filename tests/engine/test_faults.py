"""Whatever was raised becomes a paragraph with a remedy."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

import pytest

from bus import BusError
from engine.errors import ConfigError, SpadeError
from engine.faults import RoleFailed, explain


def failing(role: str, error: Exception) -> RoleFailed:
    outer = RoleFailed(role)
    outer.__cause__ = error
    return outer


def test_an_error_with_a_remedy_wins_over_its_neighbours(tmp_path: Path) -> None:
    known = failing("server", SpadeError("vLLM did not start", remedy="Read its log."))
    told = explain(ExceptionGroup("many", [ValueError("x"), ExceptionGroup("inner", [known])]), tmp_path)
    assert str(told) == "The role server failed: vLLM did not start Read its log."


def test_bad_input_keeps_its_exit_code(tmp_path: Path) -> None:
    assert explain(failing("designer", ConfigError("no corpus")), tmp_path).exit_code == 2


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), ValueError("x")])
def test_a_full_disk_explains_it(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(error, OSError):
        monkeypatch.setattr("engine.faults.free_mb", lambda _path: 3)
    told = explain(ExceptionGroup("many", [RuntimeError("y"), error]), tmp_path)
    assert "is full" in told.what
    assert "Free some space" in told.remedy


def test_errors_of_the_bus_keep_their_remedy(tmp_path: Path) -> None:
    told = explain(BusError("port 5000 is taken", remedy="Choose another."), tmp_path)
    assert (told.what, told.remedy) == ("port 5000 is taken.", "Choose another.")


def test_the_database_is_named(tmp_path: Path) -> None:
    assert "database failed: locked" in explain(sqlite3.OperationalError("locked"), tmp_path).what


def test_a_defect_points_to_the_logs(tmp_path: Path) -> None:
    told = explain(failing("scorer", KeyError("round")), tmp_path)
    assert told.what == "The role scorer failed: KeyError: 'round'"
    assert "SPADE_TRACE=1" in told.remedy
    (tmp_path / "logs").mkdir()
    told = explain(failing("scorer", KeyError("round")), tmp_path)
    assert str(tmp_path / "logs") in told.remedy
    assert told.exit_code == 1
