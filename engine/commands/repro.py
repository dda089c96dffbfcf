"""``spade repro``: runs a matrix of recipes and seeds, and writes a table and figures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from types import FrameType

    from engine.repro.plan import Job, Plan
    from engine.repro.record import Record


def repro(
    plan: Annotated[Path, typer.Argument(help="Plan of the matrix (TOML).", show_default=False)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the cells and in what each differs from the first.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="The plan's short form, in a directory of its own.")
    ] = False,
    only: Annotated[list[str] | None, typer.Option(help="Run these cells only.")] = None,
    table: Annotated[
        bool, typer.Option("--table", help="Start no run; write table and figures again.")
    ] = False,
) -> None:
    """Run a matrix of recipes and seeds, one after another; repeat the command to go on after any stop.

    A run with a record is not repeated, so records may come from several hosts. Table and figures are written
    after each run, beside the records.
    """
    from engine.errors import ConfigError
    from engine.repro import plan as plans

    matrix, jobs = plans.load(plan, quick=quick)
    unknown = set(only or ()) - {cell.name for cell in matrix.cell}
    if unknown:
        raise ConfigError(
            f"The plan {plan} has no cell {', '.join(sorted(unknown))}.",
            remedy=f"Cells: {', '.join(cell.name for cell in matrix.cell)}.",
        )
    if not table:
        _check(jobs[: len(matrix.cell)])
    if dry_run:
        print("\n".join(plans.describe(jobs)))
        return
    for job in jobs:
        if table or job.record.exists() or (only and job.cell.name not in only):
            continue
        _run(job)
        _publish(matrix, jobs)
    text = _publish(matrix, jobs)
    print(text, flush=True)


def _check(jobs: Sequence[Job]) -> None:
    """Check the recipe of each cell, so that hours of runs do not end at one that cannot start."""
    from engine import recipe
    from engine.running.preflight import check_start

    for job in jobs:
        # a pool of a run that is yet to come
        late = any("source=run:" in text for text in job.overrides)
        check_start(recipe.load(job.recipe, [*job.overrides, *["designer.pool.source=seeds:"] * late]).config)


def _run(job: Job) -> None:
    """Run or resume one run to its end and write its record. Raises SpadeError where it stops early."""
    from engine.errors import SpadeError
    from engine.machine import commit
    from engine.recipe import dump
    from engine.repro import record
    from engine.run import RunDirectory
    from engine.running.run_command import is_complete

    config = job.config()
    directory = RunDirectory.of(config)
    print(f"{time.strftime('%H:%M:%S')} {job.name}", flush=True)
    before, load = os.times(), os.getloadavg()[1]
    status = 0
    if not is_complete(directory, config):
        status = _child([sys.executable, "-m", "engine.cli", "run", str(job.recipe), *job.overrides])
    if not is_complete(directory, config):
        raise SpadeError(
            f"The run {job.name} stopped early (status {status}).",
            where=str(directory.root),
            remedy="`spade status` says why. Repeat the command: the run goes on where it stopped.",
        )
    after = os.times()
    evaluations, rounds = record.collect(directory.database)
    record.write(
        job.record,
        record.Record(
            cell=job.cell.name,
            seed=job.seed,
            steps=config.run.steps,
            recipe=dump(config).replace(str(directory.root.parent), "RUNS"),
            commit=commit(),
            seconds=round(rounds[-1]["seconds"] or 0.0, 1),
            processor=round(
                after.children_user + after.children_system - before.children_user - before.children_system, 1
            ),
            load=round((load + os.getloadavg()[1]) / 2, 1),
            evaluations=evaluations,
            rounds=rounds,
        ),
    )


def _child(command: Sequence[str]) -> int:
    """Run ``command`` and pass signals on to it, so that it stops in order."""
    with subprocess.Popen(command) as child:

        def forward(number: int, _: FrameType | None) -> None:
            child.send_signal(number)

        before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return child.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _publish(plan: Plan, jobs: Sequence[Job]) -> str:
    """Write the table and the figures of the records that exist; return the table."""
    from engine.files import replace
    from engine.repro import figure, record
    from engine.repro import table as tables

    found: list[Record] = [record.read(job.record) for job in jobs if job.record.exists()]
    if not found:
        return "There is no record yet."
    text, home = tables.render(plan, found), jobs[0].record.parent
    replace(home / "table.md", text.encode())
    for name, drawn in figure.render(plan, found).items():
        replace(home / f"{name}.svg", drawn.encode())
    return text
