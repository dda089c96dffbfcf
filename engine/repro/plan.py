"""A plan: cells (a recipe with settings) times seeds. A cell differs from the first in its factor only."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from engine import recipe
from engine.config import Config
from engine.errors import ConfigError

_PER_RUN = frozenset({"run.name", "run.directory", "run.seed", "ui.live", "ui.report"})


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cell. ``factor`` are the tables or settings in which it may differ from the first cell.

    In ``settings``, ``{run:NAME}`` is the directory of the run of cell NAME with the same seed.
    """

    name: str
    title: str
    factor: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


class Quick(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The changes of ``--quick``: fewer seeds, fewer cells, shorter runs."""

    seeds: tuple[int, ...] = (1,)
    cells: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A matrix of runs. Paths are relative to the file; ``settings`` are those of all cells.

    ``reported`` are the suites in the table, the first of which is compared; ``records`` is the directory of
    the results, one JSON file a run, which may come from several hosts.
    """

    recipe: str
    records: str
    directory: str
    seeds: tuple[int, ...]
    reported: tuple[str, ...]
    cell: tuple[Cell, ...]
    settings: tuple[str, ...] = ()
    quick: Quick = Quick()


class Job(msgspec.Struct, frozen=True):
    """One run of the matrix."""

    cell: Cell
    seed: int
    recipe: Path
    overrides: tuple[str, ...]
    record: Path

    @property
    def name(self) -> str:
        """The name of the run."""
        return f"{self.cell.name}-{self.seed}"

    def config(self) -> Config:
        """Return the resolved recipe. Raises ConfigError."""
        return recipe.load(self.recipe, self.overrides).config


def load(path: Path, *, quick: bool = False) -> tuple[Plan, list[Job]]:
    """Return the plan and its runs, seed by seed.

    Raises ConfigError for a plan that cannot be read, or a cell that differs in more than its factor.
    """
    try:
        plan = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Plan)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"The plan {path} cannot be read: {error}.", remedy="Compare it with configs/repro/nano.toml."
        ) from error
    names = [cell.name for cell in plan.cell]
    if not plan.cell or len(set(names)) < len(names):
        raise ConfigError(f"The cells of {path} need names of their own.", remedy="Rename one of them.")
    if quick:
        plan = msgspec.structs.replace(
            plan,
            seeds=plan.quick.seeds,
            cell=tuple(cell for cell in plan.cell if cell.name in plan.quick.cells or not plan.quick.cells),
            settings=(*plan.settings, *plan.quick.settings),
            directory=f"{plan.directory}-quick",
            records=f"{plan.directory}-quick/records",
        )
    jobs = [_job(plan, path, cell, seed) for seed in plan.seeds for cell in plan.cell]
    first = jobs[0].config()
    for job in jobs[: len(plan.cell)]:
        allowed = (*job.cell.factor, *_PER_RUN)
        beyond = [
            key for key in recipe.differences(first, job.config()) if not recipe.is_within(key, allowed)
        ]
        if beyond:
            raise ConfigError(
                f"The cell {job.cell.name} differs from {plan.cell[0].name} in {', '.join(beyond)}, "
                "which its factor does not name.",
                where=str(path),
                remedy="Change one factor only, or name the setting in factor.",
            )
    return plan, jobs


def describe(jobs: Sequence[Job]) -> Iterator[str]:
    """Yield a line for each cell: its seeds and the settings in which it differs from the first."""
    first = jobs[0].config()
    for cell in dict.fromkeys(job.cell.name for job in jobs):
        own = [job for job in jobs if job.cell.name == cell]
        changed = recipe.differences(first, own[0].config())
        told = "; ".join(
            f"{key}: {json.dumps(was)} -> {json.dumps(now)}"
            for key, (was, now) in changed.items()
            if key not in _PER_RUN
        )
        seeds = ", ".join(str(job.seed) for job in own)
        yield f"{cell:<20} seeds {seeds}   {told or ('the first' if own[0] is jobs[0] else 'no difference')}"


def _job(plan: Plan, path: Path, cell: Cell, seed: int) -> Job:
    runs = (path.parent / plan.directory).resolve()
    settings = [*plan.settings, *cell.settings]
    for other in plan.cell:
        settings = [
            text.replace(f"{{run:{other.name}}}", str(runs / f"{other.name}-{seed}")) for text in settings
        ]
    overrides = (
        *settings,
        f"run.name={cell.name}-{seed}",
        f"run.directory={runs}",
        f"run.seed={seed}",
        "ui.live=off",
    )
    record = (path.parent / plan.records).resolve() / f"{cell.name}-{seed}.json"
    return Job(cell, seed, (path.parent / plan.recipe).resolve(), overrides, record)
