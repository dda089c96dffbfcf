"""``spade envs``: shows, plays and exports the environments that a run designed."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.records.envs import Catalogue
    from engine.run import RunDirectory

app = typer.Typer(name="envs", help="Show, play and export the environments of a run.", no_args_is_help=True)

Run = Annotated[str | None, typer.Option("--run", "-r", help="Run, by name or path; default: the newest.")]
Directory = Annotated[Path, typer.Option(help="Directory of the runs.")]
Identity = Annotated[str, typer.Argument(metavar="ID", help="First characters of its hash or design.")]
Skill = Annotated[str, typer.Option(help="Part of the skill's name.")]
State = Annotated[
    str, typer.Option(help="open, fresh, frontier, mastered, intractable, degenerate, or a flag.")
]
Sort = Annotated[str, typer.Option(help="step, win, regret, regret_low or reward.")]
Reverse = Annotated[bool, typer.Option("--reverse", help="The other way round.")]
Limit = Annotated[int, typer.Option(min=0, help="Largest number of environments; 0 for all.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(
    run: Run = None,
    directory: Directory = Path("runs"),
    skill: Skill = "",
    state: State = "",
    sort: Sort = "step",
    reverse: Reverse = False,
    limit: Limit = 0,
    as_json: AsJson = False,
) -> None:
    """List environments, one per line: skill, state, win rate, regret, title."""
    import msgspec

    from engine.views import envs_view

    with _catalogue(run, directory) as (_, catalogue):
        found = catalogue.select(skill=skill, state=state, sort=sort, reverse=reverse, limit=limit)
        if as_json:
            print(json.dumps(msgspec.to_builtins(found), indent=1), flush=True)
            return
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(envs_view.table(found, width=width), flush=True)
        print(f"{len(found)} of {len(catalogue.entries)} environments", file=sys.stderr, flush=True)


@app.command()
def show(
    identity: Identity, run: Run = None, directory: Directory = Path("runs"), as_json: AsJson = False
) -> None:
    """Show one environment: figures, program, hint, recorded episodes, the most similar programs."""
    import msgspec

    from engine.text import clean
    from engine.views import envs_view

    with _catalogue(run, directory) as (_, catalogue):
        entry = catalogue.find(identity)
        program, plays = catalogue.program(entry), catalogue.plays(entry)
        near = catalogue.neighbours(entry)
    if as_json:
        alike = [{"id": other.id, "title": other.title, "cosine": cosine} for cosine, other in near]
        more = {"source": program.source, "hint": program.hint, "plays": plays, "neighbours": alike}
        print(json.dumps(msgspec.to_builtins(entry) | more, indent=1), flush=True)
        return
    rows = [f"  {cosine:.3f}  {one.id}  step {one.step}  {clean(one.title)}" for cosine, one in near]
    blocks = [
        envs_view.sheet(entry),
        clean(program.source.rstrip("\n")),
        f"hint: {clean(program.hint or 'none')}",
        *map(envs_view.play, plays),
        "\n".join(["most similar programs (cosine of hashed TF-IDF vectors)", *rows]) if rows else "",
    ]
    print("\n\n".join(filter(None, blocks)), flush=True)


@app.command()
def play(
    identity: Identity,
    run: Run = None,
    directory: Directory = Path("runs"),
    seed: Annotated[int, typer.Option(help="Seed of the first episode.")] = 0,
    hint: Annotated[bool, typer.Option("--hint", help="Show the hint first.")] = False,
) -> None:
    """Play an environment by hand, in the run's sandbox. ``:help`` lists the commands."""
    from engine.commands.play import play as play_by_hand
    from engine.commands.sandbox import sandboxed
    from engine.text import clean

    with _catalogue(run, directory) as (found, catalogue):
        program = catalogue.program(catalogue.find(identity))
    if hint:
        print(f"hint: {clean(program.hint or 'none')}", flush=True)
    sys.exit(sandboxed(play_by_hand, program.source, seed, {}, found.config().sandbox))


@app.command()
def export(
    to: Annotated[Path, typer.Option(help="Empty or new directory.", show_default=False)],
    run: Run = None,
    directory: Directory = Path("runs"),
    skill: Skill = "",
    state: State = "",
    sort: Sort = "step",
    limit: Limit = 0,
    as_dataset: Annotated[
        bool, typer.Option("--dataset", help="Write a data set: JSONL, Parquet and a card.")
    ] = False,
) -> None:
    """Write programs as files with a manifest: for a suite or pool (dir:DIR), Gymnasium or OpenEnv."""
    from engine.records.envs import export as write

    with _catalogue(run, directory) as (found, catalogue):
        entries = catalogue.select(skill=skill, state=state, sort=sort, limit=limit)
        if not entries:
            raise ConfigError(
                f"Run {found.root.name} has no such environment.", remedy="`spade envs list` shows all."
            )
        if as_dataset:
            from engine.exports import dataset

            print(f"{dataset.write(catalogue, entries, to, found.root.name)} rows in {to}", flush=True)
            return
        turns = found.config().designer.max_turns
        count = write(catalogue, entries, to, run=found.root.name, max_turns=turns)
    print(f"{count} programs in {to}", flush=True)


@contextmanager
def _catalogue(run: str | None, directory: Path) -> Iterator[tuple[RunDirectory, Catalogue]]:
    from engine.records.envs import Catalogue
    from engine.run import find
    from engine.views.overview import reading

    found = find(run, directory)
    with reading(found) as connection:
        yield found, Catalogue(connection)
