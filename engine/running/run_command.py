"""The main job: one recipe from its file to its report, in one call."""

from __future__ import annotations

import functools
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from rich.console import Console

from bus.concurrency import flat_task_group
from engine import recipe, telemetry
from engine.config import Config
from engine.errors import ConfigError
from engine.inference.server_checks import check_external_servers
from engine.records import history
from engine.records import status as standing
from engine.run import RunDirectory
from engine.running import capacity
from engine.running.preflight import check_flags, check_policy, check_start, prepare_model, prepare_restart
from engine.running.salvage import carry_over, source
from engine.running.supervisor import Supervisor
from engine.views import live, overview, watch
from engine.views.live import LiveView
from engine.weights import bus_capacity

PHASE_SECONDS = 10.0


def plan_text(path: Path, overrides: Sequence[str]) -> str:
    """Return the resolved plan of a recipe as text. Raises ConfigError or SpadeError."""
    from engine.running import plan

    config = recipe.load(path, overrides).config
    directory = RunDirectory.of(config)
    text = plan.render(plan.make(config, directory))
    return f"{text}\n\nresolved recipe\n\n{recipe.dump(config)}"


def check(path: Path, overrides: Sequence[str]) -> None:
    """Check all of a recipe that needs no process. Raises ConfigError or SpadeError."""
    config = recipe.load(path, overrides).config
    check_start(config)
    directory = RunDirectory.of(config)
    directory.require_same(config)
    directory.require_space()


def run(
    path: Path,
    overrides: Sequence[str],
    console: Console,
    order: watch.Order,
    *,
    resume: str = "auto",
    salvage: str = "",
) -> None:
    """Run a recipe to its end, or resume it. Raises ConfigError or SpadeError; leaves no child behind.

    ``resume`` "auto" goes on where the run's directory says it stopped, "never" refuses a run that has been
    started; a directory is the checkpoint of another run, at which this one begins. ``salvage`` names a
    damaged run: a new one begins with its newest whole checkpoint, its memory and its archive. ``order``
    carries out the buttons of the live page (``ui.port``).
    """
    config = recipe.load(path, overrides).config
    directory = RunDirectory.of(config)
    damaged = source(salvage, Path(config.run.directory), directory) if salvage else None
    start = _start("never", directory, config) if damaged else _start(resume, directory, config)
    with directory.locked():
        if is_complete(directory, config):
            console.print(
                f"The run {config.run.name} is complete; its report is {directory.report}. "
                "Another one needs another name (run.name=NAME), more of it more run.steps.",
                soft_wrap=True,
            )
            return
        directory.require_space()
        check_start(config)
        resumed = directory.adopt(config)
        view = live.make(config.run, config.ui, console)
        log = telemetry.configure(directory.logs, "supervisor", sink=live.sink(view))
        try:
            view.say(f"{'Resuming' if resumed else 'Starting'} {config.run.name} in {directory.root}")
            if damaged is not None:
                start = damaged.root
                for line in carry_over(damaged, directory):
                    view.say(line)
            prepare = functools.partial(_prepare, config, directory, view, start)
            supervisor = Supervisor(config, directory, view, log, prepare=prepare)
            with view.showing():
                supervise = functools.partial(_supervise, supervisor, config, directory, view, order)
                anyio.run(supervise, backend_options={"use_uvloop": True})
            _say_goodbye(config, directory, console)
        finally:
            telemetry.close()


async def _supervise(
    supervisor: Supervisor, config: Config, directory: RunDirectory, view: LiveView, order: watch.Order
) -> None:
    """Run to the end; with ``ui.port``, serve the live page meanwhile."""
    async with flat_task_group() as tasks:
        if config.ui.port:
            token = os.environ.get("SPADE_WATCH_TOKEN", "")
            await tasks.start(watch.serve, directory, "127.0.0.1", config.ui.port, view.say, order, token)
        await supervisor.run()
        tasks.cancel_scope.cancel()


def is_complete(directory: RunDirectory, config: Config) -> bool:
    """Return whether the run has reached its end and the recipe asks for no more steps."""
    if not directory.database.exists():
        return False
    history.set_aside_if_damaged(directory.database)
    if not directory.database.exists():
        return False
    connection = history.open_for_reading(directory.database)
    try:
        state = standing.read(connection)
    except sqlite3.OperationalError as error:
        # A life that was killed while it made the database left it without some of its tables.
        if "no such table" not in str(error):
            raise
        return False
    finally:
        connection.close()
    ended = state.notes.get("ended")
    return bool(ended and ended.get("complete")) and state.rounds >= config.run.steps


def _start(resume: str, directory: RunDirectory, config: Config) -> Path | None:
    """Return the checkpoint to begin at, None for none. Raises ConfigError when the run may not begin."""
    started = (
        directory.model_file.exists() if resume not in ("auto", "never") else directory.config_file.exists()
    )
    if resume != "auto" and started:
        raise ConfigError(
            f"The run {directory.root.name} was started before, and --resume {resume} begins a new one.",
            where=str(directory.root),
            remedy="Leave --resume out to go on with it, or give the new one a name: run.name=NAME.",
        )
    if resume in ("auto", "never"):
        return None
    checkpoint = Path(resume).resolve()
    if not (checkpoint / "manifest.json").is_file():
        raise ConfigError(
            f"--resume {resume}: that is no checkpoint.",
            remedy="Say auto, never, or a directory under RUN/learner/checkpoints.",
        )
    _require_fitting(checkpoint, config)
    return checkpoint


def _require_fitting(checkpoint: Path, config: Config) -> None:
    """Raise ConfigError when the learner of ``config`` could not take up what ``checkpoint`` holds."""
    source = RunDirectory(checkpoint.parents[2]) if len(checkpoint.parents) > 2 else None
    if source is None or not source.config_file.exists():
        return  # the export that comes next says so
    theirs, ours = source.config().learner, config.learner
    for key, was, now in (
        ("learner.lora.rank", theirs.lora.rank, ours.lora.rank),
        ("learner.lora.targets", list(theirs.lora.targets), list(ours.lora.targets)),
        ("learner.optimizer.kind", theirs.optimizer.kind, ours.optimizer.kind),
    ):
        if was != now:
            raise ConfigError(
                f"--resume {checkpoint}: {key} is {was!r} in that run and {now!r} in this one.",
                remedy="Set it as it was, or begin at its weights alone: spade export, then model.path.",
            )


@asynccontextmanager
async def phase(name: str, say: Callable[[str], None]) -> AsyncIterator[None]:
    """Tell how long a part of the start takes: while it lasts, and at its end."""
    begun = anyio.current_time()

    async def tell() -> None:
        while True:
            await anyio.sleep(PHASE_SECONDS)
            say(f"{name}: {anyio.current_time() - begun:.0f} s")

    say(name)
    async with flat_task_group() as tasks:
        tasks.start_soon(tell)
        yield
        tasks.cancel_scope.cancel()
    say(f"{name}: done in {anyio.current_time() - begun:.1f} s")


async def _prepare(
    config: Config, directory: RunDirectory, view: LiveView, start: Path | None = None
) -> Path:
    await check_external_servers(config)
    model = directory.starting_model()
    async with phase("preparing the model", view.say):
        if model is None and start is not None:
            model = await prepare_restart(start, directory, view.say)
        elif model is None:
            model = await prepare_model(config, directory, view.say)
    async with phase("checking vLLM's flags and the policy", view.say), flat_task_group() as tasks:
        tasks.start_soon(check_policy, config, model)
        await check_flags(config, model)
    bus_capacity.check(config, model)
    capacity.require_fitting(config, capacity.shape_of(config, model))
    directory.keep_starting_model(model)
    return model


def _say_goodbye(config: Config, directory: RunDirectory, console: Console) -> None:
    if not directory.database.exists():
        console.print("Stopped. The same command goes on from here.")
        return
    if config.ui.report:
        from engine.views import report

        console.print(f"Report: {report.write(directory)}", soft_wrap=True)
    console.print(overview.farewell(directory), soft_wrap=True, highlight=False, markup=False)
