"""Watching a run: what grows, what a step costs, and what is no process of the run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.bench import steady
from engine.bench.machine import Load
from engine.bench.steady import Look
from engine.errors import SpadeError
from engine.records import history
from engine.run import RunDirectory

LOAD = Load(seconds=1.0, own=0.0, others=1.5, steal=0.0, average=(1.0, 1.0, 1.0))

# Holds the run's lock, and keeps two megabytes more with every line it is sent.
HOLDER = """
import sys
from pathlib import Path
from engine.run import RunDirectory
kept = []
with RunDirectory(Path(sys.argv[1])).locked():
    print("held", flush=True)
    for line in sys.stdin:
        kept.append(bytearray(b"x") * 2_000_000)
        print("more", flush=True)
"""


def row(
    start: float, rate: float, *, cpu: float = 0.5, step: float = 10.0, until: float = 1200.0
) -> list[Look]:
    """``rate`` in MB a minute, ``cpu`` in cores."""
    count = int(until / step)
    return [Look(i * step, int(1e6 * (start + rate * i * step / 60)), cpu * i * step) for i in range(count)]


def judge(seen: dict[tuple[str, int], list[Look]], batches: list[tuple[float, float]]) -> steady.Steady:
    return steady.summary(RunDirectory(Path("some")), seen, 1200.0, 300.0, batches, LOAD)


def test_what_grows_is_named_and_what_does_not_is_not() -> None:
    result = judge({("learner", 1): row(500, 3.0), ("broker", 2): row(30, 0.1)}, [])
    assert result.grew == ("learner",)
    assert not result.within_target
    assert result.processes["learner"].slope == pytest.approx(3.0, abs=0.01)
    assert result.processes["learner"].first == pytest.approx(515.0, abs=0.6)
    assert result.processes["broker"].slope == pytest.approx(0.1, abs=0.01)
    assert result.cores == pytest.approx(1.0, abs=0.01)


def test_growth_within_the_warm_up_does_not_count() -> None:
    start = row(100, 100.0, until=300.0)
    then = [Look(look.at + 300.0, 600_000_000, look.cpu + 150.0) for look in row(600, 0.0, until=900.0)]
    result = judge({("server", 7): start + then}, [])
    assert result.grew == ()
    assert result.within_target
    assert result.processes["server"].slope == 0.0


def test_a_process_that_came_again_is_counted_and_judged_alone() -> None:
    first, second = (
        row(100, 0.0, until=700.0),
        [Look(o.at + 700, o.resident, o.cpu) for o in row(400, 0.0, until=500)],
    )
    batches = [(1000.0 + 10 * i, 1.0) for i in range(90)]
    result = judge({("server", 1): first, ("server", 2): second, ("learner", 3): row(9, 0.0)}, batches)
    assert result.replaced == 1
    assert result.cores == pytest.approx(1.0, rel=0.02), "both servers together used half a core"
    assert result.steps.cpu_first_half == pytest.approx(10.0, rel=0.05)
    assert result.steps.cpu_second_half == pytest.approx(10.0, rel=0.05)
    assert set(result.processes) == {"server 1", "server 2", "learner"}
    assert result.grew == ()


def test_what_a_step_costs_in_both_halves() -> None:
    batches = [(1000.0 + 10 * i, 1.0 if i < 45 else 2.0) for i in range(90)]
    result = judge({("learner", 1): row(500, 0.0, cpu=0.8)}, batches)
    assert result.steps.count == 90
    assert (result.steps.seconds_first_half, result.steps.seconds_second_half) == (1.0, 2.0)
    assert result.steps.seconds_slope > 0
    assert result.steps.cpu_first_half == pytest.approx(8.0, rel=0.05)
    assert "90 steps: 1.00 -> 2.00 s" in steady.text(result)


def test_nothing_seen_is_no_success() -> None:
    assert not judge({}, []).within_target


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[RunDirectory, subprocess.Popen[str]]]:
    run = RunDirectory(tmp_path / "run")
    run.root.mkdir()
    history.create(run.database).close()
    command = [sys.executable, "-c", HOLDER, str(run.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        yield run, child
        child.kill()


def test_a_process_that_lives_is_watched_until_it_ends(
    held: tuple[RunDirectory, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, child = held
    looked = steady.looks
    turns = 0

    def feed(root: object, at: float) -> object:
        nonlocal turns
        turns += 1
        assert child.stdin is not None
        assert child.stdout is not None
        if turns > 30:
            child.kill()
            child.wait()
            return []
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        return looked(root, at)

    monkeypatch.setattr(steady, "looks", feed)
    result = steady.watch(run, 50.0, 0.01, 0.0, lambda _: None)
    grown = result.processes["supervisor"]
    assert grown.samples == 30
    assert 40 < grown.last - grown.first < 80
    assert result.grew == ("supervisor",)
    assert result.steps.count == 0


def test_a_run_that_nobody_runs_is_told(tmp_path: Path) -> None:
    with pytest.raises(SpadeError, match=r"not running on this machine[\s\S]*spade run"):
        steady.watch(RunDirectory(tmp_path), 1.0, 0.1, 0.0, lambda _: None)


def test_a_run_that_ends_in_the_warm_up_is_told(
    held: tuple[RunDirectory, subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, child = held

    def end(root: object, at: float) -> list[tuple[tuple[str, int], Look]]:
        child.kill()
        child.wait()
        return []

    monkeypatch.setattr(steady, "looks", end)
    with pytest.raises(SpadeError, match=r"within the warm-up of 60 s[\s\S]*--warm-up"):
        steady.watch(run, 120.0, 0.01, 60.0, lambda _: None)
