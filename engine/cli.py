"""The command ``spade``. Each subcommand imports only the modules it needs, so that it starts fast."""

from __future__ import annotations

import collections
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from engine.commands import bench as bench_commands
from engine.commands import bus as bus_commands
from engine.commands import credit as credit_commands
from engine.commands import envs as envs_commands
from engine.commands import eval as eval_commands
from engine.commands import export as export_commands
from engine.commands import launch as launch_commands
from engine.commands import repro as repro_commands
from engine.commands import sandbox as sandbox_commands
from engine.errors import SpadeError
from engine.shipped import recipe_path

app = typer.Typer(
    name="spade",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"spade {version('spade-selfplay')}", flush=True)
        raise typer.Exit


@app.callback()
def spade(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Self-play reinforcement learning in which a model designs the tasks it then learns to solve."""


RecipeArgument = Annotated[
    Path,
    typer.Argument(
        parser=recipe_path,
        metavar="RECIPE",
        help="A recipe that comes with spade, by name, or a TOML file.",
        show_default=False,
    ),
]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides of the recipe, such as run.steps=50.")]
Run = Annotated[str | None, typer.Argument(help="Run, by name or path; default: the newest.")]
RunOption = Annotated[str | None, typer.Option("--run", "-r", help="The same as an option.")]
Directory = Annotated[Path, typer.Option(help="Directory of the runs.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the plan and the resolved recipe; start nothing.")
]


@app.command()
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    steps: Annotated[int | None, typer.Option(help="Rounds to play (run.steps).")] = None,
    dry_run: DryRun = False,
    resume: Annotated[
        str,
        typer.Option(
            help="auto: resume a run that exists; never: new runs only; or a checkpoint to start from."
        ),
    ] = "auto",
    salvage: Annotated[
        str,
        typer.Option(help="A damaged run: begin a new one at its newest whole checkpoint, with its memory."),
    ] = "",
) -> None:
    """Run a recipe, or resume its run."""
    if not dry_run:
        # A signal waits until the supervisor can drain. It is blocked before libraries start threads of their
        # own: one of those would take it, and end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    from engine import malloc
    from engine.running import run_command

    malloc.share_arenas()
    settings = list(overrides or [])
    if steps is not None:
        settings.append(f"run.steps={steps}")
    if dry_run:
        print(run_command.plan_text(recipe, settings), flush=True)
        run_command.check(recipe, settings)
        return
    from rich.console import Console

    from engine.busview.attach import order

    run_command.run(recipe, settings, Console(), order, resume=resume, salvage=salvage)


@app.command()
def recipes(
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of recipes.")] = False,
) -> None:
    """List the recipes that come with spade."""
    from engine import shipped

    if schema:
        import json

        import msgspec

        from engine.config import Config

        print(json.dumps(msgspec.json.schema(Config), indent=2))
        return
    known = shipped.names()
    width = max(map(len, known))
    for name, headline in known.items():
        print(f"{name:<{width}}  {headline}")


@app.command()
def init(directory: Annotated[Path, typer.Argument(help="New directory.", show_default=False)]) -> None:
    """Copy the recipes that come with spade to a directory of your own, to edit them there."""
    from engine import shipped

    shipped.copy_to(directory)
    print(f"The recipes are in {directory}. Start one: spade run {directory / 'nano.toml'}")


@app.command()
def warmstart(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Build, unpack or check the starting model of a recipe, and print its directory."""
    from engine import recipe as recipe_files
    from engine.running.preflight import MODEL_MARK, resolve_with_progress
    from engine.running.role_host import die_with_parent

    die_with_parent()
    config = recipe_files.load(recipe, overrides or []).config
    path = resolve_with_progress(config, recipe.parent, lambda text: print(text, flush=True))
    print(f"{MODEL_MARK}{path}", flush=True)


@app.command()
def status(
    run: Run = None,
    run_option: RunOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Status 1 for a run that stopped early or has a silent role.")
    ] = False,
    as_metrics: Annotated[bool, typer.Option("--metrics", help="Print a text file for Prometheus.")] = False,
    directory: Directory = Path("runs"),
) -> None:
    """Show the progress of a run, during the run and after it."""
    from engine.views import overview

    shown = overview.read(run or run_option, directory)
    if as_metrics:
        from engine.views.watch import metrics

        print(metrics(shown.facts["run"], shown.state), end="")
    else:
        print(shown.json() if as_json else shown.text())
    if check and not shown.healthy:
        raise typer.Exit(1)


@app.command("ls")
def list_runs(directory: Directory = Path("runs")) -> None:
    """List the runs: state, rounds, time of the last event."""
    from engine.views import overview

    print(overview.listing(directory))


@app.command()
def stop(run: Run = None, directory: Directory = Path("runs")) -> None:
    """Stop a run of this host as Ctrl-C does: it finishes the work in hand; the same command continues it."""
    from engine.run import find

    found = find(run, directory)
    print(f"{found.root.name}: process {found.stop()} finishes the work in hand and stops.")


@app.command()
def pause(run: Run = None, directory: Directory = Path("runs")) -> None:
    """Let a run finish the rounds under way and begin no new ones, until `spade resume`."""
    _order(run, directory, "pause")


@app.command()
def resume(run: Run = None, directory: Directory = Path("runs")) -> None:
    """Let a paused run go on."""
    _order(run, directory, "resume")


def _order(run: str | None, directory: Path, command: Literal["pause", "resume"]) -> None:
    from functools import partial

    import anyio

    from engine.busview.attach import order
    from engine.run import find
    from engine.telemetry import quiet_bus
    from engine.views.watch import ORDERS

    found = find(run, directory)
    with quiet_bus():
        anyio.run(partial(order, found, command))
    print(f"{found.root.name}: {ORDERS[command]}")


@app.command()
def logs(
    run: Run = None,
    name: Annotated[str, typer.Argument(help="Log file; without one, list them.")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="Last lines to print.")] = 40,
    directory: Directory = Path("runs"),
) -> None:
    """List the log files of a run, or print the last lines of one."""
    from engine.errors import ConfigError
    from engine.run import find
    from engine.text import clean

    found = {path.name: path for path in sorted(find(run, directory).logs.glob("*")) if path.is_file()}
    if name and name not in found:
        raise ConfigError(f"There is no log {name!r}.", remedy=f"Logs: {', '.join(found) or 'none yet'}.")
    if not name:
        print("\n".join(f"{path.stat().st_size:>10,}  {path}" for path in found.values()))
        return
    with found[name].open(encoding="utf-8", errors="replace") as stream:
        print(clean("".join(collections.deque(stream, lines))), end="")


@app.command()
def report(
    run: Run = None,
    beside: Annotated[str | None, typer.Argument(help="Another run, laid over it as dashed lines.")] = None,
    run_option: RunOption = None,
    directory: Directory = Path("runs"),
) -> None:
    """Write report.html of a run: curves, environments, transcripts."""
    from engine.run import find
    from engine.views import report as reports

    found = find(run or run_option, directory)
    print(reports.write(found, find(beside, directory) if beside else None))


@app.command()
def watch(
    run: Run = None,
    directory: Directory = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 0,
    token: Annotated[str, typer.Option(envvar="SPADE_WATCH_TOKEN", help="Default: drawn at random.")] = "",
) -> None:
    """Serve the live page of a run: curves, roles, environments, logs, metrics for Prometheus."""
    from functools import partial

    import anyio

    from engine.busview.attach import order
    from engine.run import find
    from engine.views import watch as live_page

    say = partial(print, flush=True)
    page = partial(live_page.serve, find(run, directory), host, port, say, order, token)
    try:
        anyio.run(page)
    except KeyboardInterrupt:
        print("The page is closed; the run goes on.")


@app.command()
def role(
    name: Annotated[str, typer.Argument(help="Role, as in the entry-point group spade.roles.")],
    connect: Annotated[str, typer.Option(help="URL of the run's bus.", show_default=False)],
    run: Annotated[
        str, typer.Option(envvar="SPADE_RUN", help="Run; needed when the bus carries several.")
    ] = "",
    token: Annotated[str, typer.Option(envvar="SPADE_BUS_TOKEN", help="Token of the bus.")] = "",
    credentials: Annotated[
        str,
        typer.Option(envvar="SPADE_BUS_CREDENTIALS", help="Key file of the role, or a directory of keys."),
    ] = "",
    ca: Annotated[str, typer.Option(envvar="SPADE_BUS_CA", help="Certificates to trust with TLS.")] = "",
    instance: Annotated[
        str, typer.Option(help="Name of this instance; default: role, host and process.")
    ] = "",
    directory: Annotated[Path | None, typer.Option(help="Working directory.")] = None,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for a run that has not begun.")] = 0.0,
) -> None:
    """Run one role as a process, on the run's host or another, until the run drains or a signal arrives."""
    import anyio

    from engine import malloc
    from engine.running import role_host, warm_restart

    malloc.share_arenas()
    role_host.die_with_parent()
    os.environ.pop("SPADE_BUS_TOKEN", None)
    life = warm_restart.live(role_host.require(name, connect))

    async def work() -> None:
        await role_host.serve_role(
            name,
            url=connect,
            run=run or await role_host.only_run(connect, token, role=name, credentials=credentials, ca=ca),
            secret=token,
            credentials=credentials,
            ca=ca,
            instance=instance or role_host.instance_name(name),
            directory=directory,
            life=life,
            wait=wait,
        )

    anyio.run(work, backend_options={"use_uvloop": True})


app.command()(export_commands.export)
app.command()(credit_commands.credit)
app.command()(repro_commands.repro)
app.command()(launch_commands.launch)
app.command()(launch_commands.workers)
for group in (envs_commands, eval_commands, bus_commands, sandbox_commands, bench_commands):
    app.add_typer(group.app)


def main() -> None:
    """Run the command; report every error in one paragraph, with status 2 for bad input and 1 otherwise."""
    try:
        app()
    except SpadeError as error:
        _fail(error)
    except Exception as error:
        if os.environ.get("SPADE_TRACE"):
            raise
        _fail(_explained(error))


def _explained(error: Exception) -> SpadeError:
    try:
        from engine.faults import explain
    except ImportError as missing:
        return SpadeError(
            f"The installation is broken: {missing}", remedy="Run `make setup`, or install spade again."
        )
    return explain(error, Path.cwd())


def _fail(error: SpadeError) -> None:
    what = error.what.strip()
    if error.where and error.where not in what:
        what = f"{what.rstrip('.')} ({error.where})"
    stop = "" if what.endswith((".", ":", "\n")) or "\n" in what else "."
    print(f"spade: {what}{stop} {error.remedy.lstrip(' ')}".rstrip(), file=sys.stderr, flush=True)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
