"""A matrix of runs: cells that differ in their factor only, records, the table and the figure."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from scenes import small_run
from scenes.small_run import batch, evaluation, events, finished, policy, summary

from engine import recipe
from engine.commands import repro as command
from engine.config import ModelConfig
from engine.errors import ConfigError, SpadeError
from engine.records import history
from engine.repro import figure, plan, record, table
from engine.run import RunDirectory

NANO = Path(__file__).resolve().parents[2] / "configs" / "repro" / "nano.toml"
PLAN = """
recipe = "toy.toml"
directory = "runs"
records = "records"
seeds = [1, 2]
reported = ["mid"]
[[cell]]
name = "whole"
title = "SPADE & all"
[[cell]]
name = "late"
title = "late"
factor = ["curriculum.delay"]
settings = ["curriculum.delay=3"]
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    model = ModelConfig(path="warmstart:", scale="nano")
    (tmp_path / "toy.toml").write_text(recipe.dump(small_run.config(tmp_path / "elsewhere", model=model)))
    file = tmp_path / "plan.toml"
    file.write_text(PLAN)
    return file


def test_each_cell_of_the_nano_plan_differs_in_its_factor_and_in_nothing_else() -> None:
    matrix, jobs = plan.load(NANO)
    first = jobs[0].config()
    for cell, job in zip(matrix.cell[1:], jobs[1:], strict=False):
        found = recipe.differences(first, job.config())
        assert any(recipe.is_within(key, cell.factor) for key in found), cell.name
    assert {"spade", "fixed", "sliding", "frozen", "no-corpus", "delay-0", "sync"} <= {
        job.cell.name for job in jobs
    }


def test_a_cell_that_differs_in_more_than_its_factor_is_refused(path: Path) -> None:
    path.write_text(PLAN.replace('settings = ["', 'settings = ["run.steps=9", "'))
    with pytest.raises(ConfigError, match=r"late differs from whole in run\.steps"):
        plan.load(path)


def test_a_cell_that_cannot_start_is_found_before_the_first_run(path: Path) -> None:
    path.write_text(
        PLAN.replace('settings = ["', 'settings = ["curriculum.hinted_plays=0", "').replace(
            'factor = ["', 'factor = ["curriculum.hinted_plays", "'
        )
    )
    with pytest.raises(ConfigError, match="needs the regret"):
        command.repro(path, dry_run=False, quick=False, only=None, table=False)


def test_the_runs_go_seed_by_seed_and_the_dry_run_names_the_factor(path: Path) -> None:
    _, jobs = plan.load(path)
    assert [job.name for job in jobs] == ["whole-1", "late-1", "whole-2", "late-2"]
    assert [job.config().run.seed for job in jobs] == [1, 1, 2, 2]
    lines = list(plan.describe(jobs))
    assert "the first" in lines[0]
    assert "seeds 1, 2   curriculum.delay: 2 -> 3" in lines[1]


def test_the_run_of_another_cell_with_the_same_seed_can_be_named(path: Path) -> None:
    pool = '"designer.kind=pool", "designer.pool.source=run:{run:whole}"'
    path.write_text(PLAN.replace('"curriculum.delay=3"', pool).replace('"curriculum.delay"', '"designer"'))
    sources = [job.config().designer.pool.source for job in plan.load(path)[1]]
    assert [source.rpartition("/")[2] for source in sources] == ["", "whole-1", "", "whole-2"]


def lived(job: plan.Job, *, complete: bool = True, level: float = 2.0) -> None:
    """Make the directory of a run of three rounds."""
    config = msgspec.structs.replace(job.config())
    run = RunDirectory.of(config)
    run.root.mkdir(parents=True)
    connection = history.create(run.database)
    messages = [policy(0), small_run.serving(0), evaluation(0)]
    for at in range(3):
        messages += [finished(f"{at}{n}", f"d{at}", n % 2, round_=at) for n in range(4)]
        messages += [
            msgspec.structs.replace(summary(at), difficulty=level),
            policy(at + 1),
            batch(at, at + 1, final=at == 2),
            evaluation(at + 1),
        ]
    history.apply(connection, events(messages))
    history.put_note(connection, "ended", {"at": 1.0, "complete": complete, "serving": []})
    connection.close()


def test_a_finished_run_gets_a_record_and_is_never_run_again(path: Path) -> None:
    matrix, jobs = plan.load(path)
    for number, job in enumerate(jobs):
        lived(job, level=1.0 + number)
    command.repro(path, dry_run=False, quick=False, only=None, table=False)
    found = [record.read(job.record) for job in jobs]
    assert [(one.cell, one.seed) for one in found] == [("whole", 1), ("late", 1), ("whole", 2), ("late", 2)]
    assert [(one.step, one.plays) for one in found[0].evaluations] == [(0, 0), (1, 4), (2, 8), (3, 12)]
    assert [row["level"] for row in found[1].rounds] == [2.0, 2.0, 2.0]
    # the directories are gone, as on another host: the records are enough
    for job in jobs:
        RunDirectory.of(job.config()).database.unlink()
    before = [job.record.stat().st_mtime_ns for job in jobs]
    command.repro(path, dry_run=False, quick=False, only=None, table=False)
    assert [job.record.stat().st_mtime_ns for job in jobs] == before
    shown = (path.parent / "records" / "table.md").read_text()
    assert "| SPADE & all | 1, 2 | 0.530" in shown
    assert "| late | 2.00 ± " not in shown
    assert "3.00 ± 12.71" in shown
    for name, title in (
        ("held-out", "mid: win rate by plays"),
        ("rounds", "mean level of designs, by round"),
    ):
        drawn = ElementTree.fromstring((path.parent / "records" / f"{name}.svg").read_text())
        assert {title, "SPADE & all"} <= {one.text for one in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert figure.render(matrix, found[:1])


def test_a_run_that_stops_early_has_no_record(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, jobs = plan.load(path)
    lived(jobs[0], complete=False)
    monkeypatch.setattr(command, "_child", lambda _: 3)
    with pytest.raises(SpadeError, match=r"whole-1 stopped early \(status 3\)"):
        command.repro(path, dry_run=False, quick=False, only=None, table=False)
    assert not jobs[0].record.exists()


def test_intervals_are_those_of_student() -> None:
    assert table.interval([0.4]) is None
    half = table.interval([0.4, 0.5, 0.6])
    assert half is not None
    assert half == pytest.approx(4.303 * 0.1 / 3**0.5, abs=1e-4)


def test_a_plan_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('recipe = "x"\nruns = 3\n')
    with pytest.raises(ConfigError, match="cannot be read"):
        plan.load(tmp_path / "plan.toml")
