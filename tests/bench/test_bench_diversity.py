"""The comparison of two arms: known programs in, known figures out; a run that fails is said."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from archive_fakes import GAMES, judged, played, run_with, source, written

from bus.messages import Message
from engine.bench import diversity as bench
from engine.bench import machine
from engine.bench.diversity import Settings, compare, spread, text
from engine.errors import SpadeError
from engine.run import RunDirectory

RECIPE = Path(__file__).parent.parent.parent / "configs" / "nano.toml"
LOAD = machine.Load(seconds=1.0, own=1.0, others=0.0, steal=0.0, average=(0.0, 0.0, 0.0))
SETTINGS = Settings(recipe=RECIPE, changes=("corpus=off",), rounds=2, seeds=(0, 1))


def run_of(directory: Path, name: str, words: tuple[str, ...]) -> RunDirectory:
    """One round with a program a word."""
    facts = [
        written(f"{name}-{at}", source(word), document=f"doc-{word}", skill=f"skill {at % 2}")
        for at, word in enumerate(words)
    ]
    messages: list[Message] = [*facts, *played(0, [fact.design for fact in facts])]
    return run_with(directory, [*messages, *(judged(fact) for fact in facts)], name)


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, list[tuple[int, RunDirectory]]]:
    varied, poor = GAMES[:6], ("apples",) * 4 + ("foxes",) * 4
    return {
        "base": [(seed, run_of(tmp_path, f"base-{seed}", varied)) for seed in (0, 1)],
        "changed": [(seed, run_of(tmp_path, f"changed-{seed}", poor)) for seed in (0, 1)],
    }


def test_arms_are_compared_at_one_size(runs: dict[str, list[tuple[int, RunDirectory]]]) -> None:
    report = compare(SETTINGS, runs, load=LOAD)
    assert report.compared == 6
    base, changed = report.arms["base"][0], report.arms["changed"][0]
    assert (base.environments, base.programs, base.documents) == (6, 6, 6)
    assert (changed.environments, changed.programs, changed.documents) == (8, 2, 2)
    assert 1 < changed.vendi < 2 < base.vendi <= 6
    assert base.vendi_within <= 3
    assert changed.vendi_weighed < 2.1 < base.vendi < base.vendi_weighed <= 6
    assert (base.win, base.repeats) == (0.5, 0.0)
    assert changed.repeats == 0.75
    difference = report.figures["vendi"]["difference"]
    assert difference.mean == pytest.approx(
        report.figures["vendi"]["changed"].mean - report.figures["vendi"]["base"].mean
    )
    assert difference.seeds == 2
    shown = text(report)
    assert "6 environments of each run" in shown
    assert "changed-1" in shown


def test_a_run_without_environments_is_named(tmp_path: Path) -> None:
    pairs = {arm: [(0, run_of(tmp_path, arm, words))] for arm, words in (("base", ("x",)), ("changed", ()))}
    with pytest.raises(SpadeError, match="no environment"):
        compare(SETTINGS, pairs, load=LOAD)


def test_intervals_are_those_of_student() -> None:
    found = spread([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.high == pytest.approx(2.0 + 4.302653 / 3**0.5, abs=1e-4)
    assert (spread([4.0]).low, spread([4.0]).mean) == (None, 4.0)


def test_each_run_has_its_own_name_and_only_one_arm_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str], **_: object) -> None:
            called.append(command)
            values = dict(part.partition("=")[::2] for part in command if "=" in part)
            name, seed = values["run.name"], int(values["run.seed"])
            words = GAMES[: 3 + seed] if "corpus=off" in command else GAMES[:5]
            root = Path(values["run.directory"]) / name
            (root / "bench.out").unlink()
            root.rmdir()
            run_of(tmp_path / "runs", name, words)

        def wait(self, timeout: float | None = None) -> int:
            return 0

        def poll(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Process)
    monkeypatch.setattr(sys, "argv", ["diversity"])
    report = bench.measure(
        Settings(recipe=RECIPE, changes=("corpus=off",), rounds=2, seeds=(0, 1), directory=tmp_path / "runs"),
        lambda line: None,
    )
    assert len({one.run for arm in report.arms.values() for one in arm}) == 4
    assert ["corpus=off" in command for command in called] == [False, True, False, True]
    assert all("run.steps=2" in command and "evaluator.suites=[]" in command for command in called)
    assert report.compared == 3


@pytest.mark.slow
def test_a_run_that_fails_ends_the_command_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "bad.toml"
    recipe.write_text(f'extends = {json.dumps(str(RECIPE))}\n[model]\npath = "{tmp_path}/nothing"\n')
    with pytest.raises(SystemExit) as caught:
        bench.main(
            [str(recipe), "--set", "corpus=off", "--seeds", "0", "--directory", str(tmp_path / "runs")]
        )
    assert "failed with status" in str(caught.value.code)
    assert "nothing" in str(caught.value.code)
    assert "bad-" in capsys.readouterr().err
