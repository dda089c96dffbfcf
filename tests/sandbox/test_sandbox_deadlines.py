"""The pure parts of an instance's end: deadlines and causes of death."""

from __future__ import annotations

import signal

import pytest

from sandbox import EnvCrashed, EnvTimeout, EnvViolation
from sandbox.instance import cause_of_death, overdue


def test_overdue_judges_by_cpu_first() -> None:
    limits = {"budget": 2.0, "soft": 10.0, "hard": 30.0}
    assert overdue(2.0, 2.0, False, **limits) == "cpu"
    # a program that holds a turn is looked at often, one that sleeps less so
    assert 0.01 < overdue(2.0, 0.5, False, **limits) < 0.05  # type: ignore[operator]
    assert 0.1 < overdue(2.0, 0.5, True, **limits) < 0.5  # type: ignore[operator]
    assert overdue(9.95, 0.0, True, **limits) == pytest.approx(0.05)
    assert overdue(10.0, 0.1, True, **limits) == "wall"
    # a starved one is not to blame, and is looked at no later than its budget ends
    assert overdue(10.0, 1.99, False, **limits) == pytest.approx(0.01)
    assert overdue(10.0, 1.9999, False, **limits) == pytest.approx(0.002)
    assert overdue(29.99, 0.1, False, **limits) == pytest.approx(0.01)
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
