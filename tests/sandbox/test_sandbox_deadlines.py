"""The pure parts of an instance's end: deadlines and causes of death."""

from __future__ import annotations

import signal

import pytest

from sandbox import EnvCrashed, EnvTimeout, EnvViolation
from sandbox.instance import cause_of_death, overdue


def test_overdue_judges_by_cpu_first() -> None:
    limits = {"budget": 2.0, "soft": 10.0, "hard": 30.0}
    assert overdue(2.0, 2.0, False, **limits) == "cpu"
    assert overdue(2.0, 0.5, False, **limits) == pytest.approx(1.5)
    assert overdue(9.9, 0.0, False, **limits) == pytest.approx(0.1)
    assert overdue(10.0, 0.1, True, **limits) == "wall"
    assert overdue(10.0, 0.1, False, **limits) == pytest.approx(0.25)
    # a starved program is looked at often, yet not later than its budget ends
    assert overdue(10.0, 1.9, False, **limits) == pytest.approx(0.1)
    assert overdue(10.0, 1.9999, False, **limits) == pytest.approx(0.002)
    assert overdue(29.9, 0.1, False, **limits) == pytest.approx(0.1)
    assert overdue(10.0, None, False, **limits) == "wall"
    assert overdue(30.0, 0.1, False, **limits) == "wall"


def test_cause_of_death() -> None:
    assert isinstance(cause_of_death(signal.SIGSYS, 0.0, 30), EnvViolation)
    assert isinstance(cause_of_death(signal.SIGXCPU, 30.0, 30), EnvTimeout)
    assert isinstance(cause_of_death(signal.SIGKILL, 31.0, 30), EnvTimeout)
    crashed = cause_of_death(signal.SIGKILL, 1.0, 30)
    assert isinstance(crashed, EnvCrashed)
    assert crashed.signal == signal.SIGKILL
    exited = cause_of_death(7 << 8, 1.0, 30)
    assert isinstance(exited, EnvCrashed)
    assert exited.code == 7
