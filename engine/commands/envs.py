"""``spade envs``: looking into the environments that a run wrote, playing them, and taking them along."""

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
    from rich.console import Console

    from engine.records.envs import Catalogue, Entry, Filter
    from engine.run import RunDirectory

app = typer.Typer(
    name="envs",
    help="Look into the environments of a run, play them, take them along.",
    no_args_is_help=True,
)

Run = Annotated[
    str | None, typer.Option("--run", "-r", help="Run, by name or path; the newest when left out.")
]
Directory = Annotated[Path, typer.Option(help="Where runs are.")]
Identity = Annotated[
    str, typer.Argument(metavar="ID", help="Id as `list` shows it, or its beginning.", show_default=False)
]
Skill = Annotated[str, typer.Option(help="A part of the skill's name.")]
State = Annotated[
    str, typer.Option(help="open, fresh, frontier, mastered, intractable, degenerate, or a flag.")
]
Step = Annotated[str, typer.Option(help="Steps they were written for: 7, 10..20, 10.. or ..20.")]
MinRegret = Annotated[float | None, typer.Option(help="Least regret.")]
Sort = Annotated[str, typer.Option(help="step, win, regret, reward, turns, skill or title.")]
Limit = Annotated[int, typer.Option(min=0, help="How many at most; 0 for all.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("list")
def list_(
    run: Run = None,
    directory: Directory = Path("runs"),
    skill: Skill = "",
    state: State = "",
    step: Step = "",
    min_regret: MinRegret = None,
    sort: Sort = "step",
    limit: Limit = 0,
    as_json: Json = False,
) -> None:
    """List environments, one a line: what they are, how often they were won, and their regret."""
    import msgspec

    from engine.views import envs_view

    wanted = _filter(skill, state, step, min_regret)
    with _catalogue(run, directory) as (_, catalogue):
        found = catalogue.select(wanted, sort=sort, limit=limit)
        if as_json:
            print(json.dumps(msgspec.to_builtins(found), indent=1), flush=True)
            return
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(envs_view.table(found, width=width), flush=True)
        print(f"{len(found)} of {len(catalogue.entries)} environments", file=sys.stderr, flush=True)


@app.command()
def show(
    identity: Identity,
    run: Run = None,
    directory: Directory = Path("runs"),
    plays: Annotated[bool, typer.Option(help="Show its best and worst plays.")] = True,
    as_json: Json = False,
) -> None:
    """Show one environment: figures, program, hint, plays that were kept, and what is most like it."""
    from rich.console import Console

    with _catalogue(run, directory) as (_, catalogue):
        entry = catalogue.find(identity)
        if as_json:
            print(json.dumps(_everything(catalogue, entry), indent=1), flush=True)
            return
        _show(Console(), catalogue, entry, plays=plays)


@app.command()
def play(
    identity: Identity,
    run: Run = None,
    directory: Directory = Path("runs"),
    seed: Annotated[int, typer.Option(help="Seed of the first episode.")] = 0,
    hint: Annotated[
        bool, typer.Option("--hint", help="Show the hint first, as the hinted arm has it.")
    ] = False,
) -> None:
    """Play an environment by hand, in the run's sandbox. ``:help`` lists what else can be typed."""
    import msgspec

    from engine.commands.play import play as play_by_hand
    from engine.commands.sandbox import sandboxed
    from engine.views.envs_view import clean
    from sandbox import SandboxSettings

    with _catalogue(run, directory) as (found, catalogue):
        entry = catalogue.find(identity)
        program = catalogue.program(entry)
    if hint:
        print(f"hint: {clean(program.hint or 'none')}", flush=True)
    settings = SandboxSettings(**msgspec.structs.asdict(found.config().sandbox))
    sys.exit(sandboxed(play_by_hand, program.source, seed, {}, settings))


@app.command()
def export(
    to: Annotated[Path, typer.Option(help="Directory, empty or not there yet.", show_default=False)],
    run: Run = None,
    directory: Directory = Path("runs"),
    skill: Skill = "",
    state: State = "",
    step: Step = "",
    min_regret: MinRegret = None,
    sort: Sort = "step",
    limit: Limit = 0,
) -> None:
    """Write programs as files with a manifest: for a suite (dir:DIR), or a pool of environments."""
    from engine.records.envs import export as write

    wanted = _filter(skill, state, step, min_regret)
    with _catalogue(run, directory) as (found, catalogue):
        entries = catalogue.select(wanted, sort=sort, limit=limit)
        if not entries:
            raise ConfigError(
                f"No environment of run {found.root.name} is like that.",
                remedy="`spade envs list` shows all.",
            )
        count = write(
            catalogue, entries, to, run=found.root.name, max_turns=found.config().designer.max_turns
        )
    print(f"{count} programs in {to}", flush=True)


@app.command()
def diff(
    left: Identity,
    right: Identity,
    run: Run = None,
    directory: Directory = Path("runs"),
) -> None:
    """Show in what two environments differ: their figures, their programs, their hints."""
    from engine.records.envs import difference
    from engine.views import envs_view

    with _catalogue(run, directory) as (_, catalogue):
        one, other = catalogue.find(left), catalogue.find(right)
        print(envs_view.beside(one, other), end="\n\n", flush=True)
        lines = difference(catalogue, one, other)
    if not lines:
        print("The programs and hints are the same.", flush=True)
    for line in lines:
        _say_difference(envs_view.clean(line))


@contextmanager
def _catalogue(run: str | None, directory: Path) -> Iterator[tuple[RunDirectory, Catalogue]]:
    from engine.records.envs import Catalogue
    from engine.run import find
    from engine.views.overview import reading

    found = find(run, directory)
    with reading(found) as connection:
        yield found, Catalogue(connection)


def _filter(skill: str, state: str, step: str, min_regret: float | None) -> Filter:
    from engine.records.envs import Filter

    return Filter(skill=skill, state=state, steps=_steps(step), least_regret=min_regret)


def _steps(text: str) -> tuple[int, int] | None:
    """Read ``a``, ``a..b``, ``a..`` or ``..b``. Raises ConfigError."""
    if not text:
        return None
    first, dots, last = text.partition("..")
    try:
        begin = int(first) if first or not dots else 0
        end = (int(last) if last else sys.maxsize) if dots else begin
        if end < begin:
            raise ValueError
    except ValueError as error:
        raise ConfigError(
            f"{text!r} is no range of steps.", remedy="Write 7, 10..20, 10.. or ..20."
        ) from error
    return begin, end


def _everything(catalogue: Catalogue, entry: Entry) -> dict[str, object]:
    import msgspec

    program = catalogue.program(entry)
    near = [
        {"id": other.id, "title": other.title, "cosine": cosine}
        for cosine, other in catalogue.neighbours(entry)
    ]
    return {
        **msgspec.to_builtins(entry),
        "source": program.source,
        "hint": program.hint,
        "plays": catalogue.plays(entry),
        "same_program": [other.design for other in catalogue.twins(entry)],
        "neighbours": near,
    }


def _show(console: Console, catalogue: Catalogue, entry: Entry, *, plays: bool) -> None:
    from rich.syntax import Syntax

    from engine.views import envs_view

    program = catalogue.program(entry)
    blocks = [envs_view.sheet(entry)]
    twins = catalogue.twins(entry)
    if twins:
        steps = ", ".join(str(twin.step) for twin in twins[:20])
        blocks[0] += f"\n  {'written again':<18}{len(twins)} times, for step {steps}"
    _say(console, *blocks)
    source = envs_view.clean(program.source.rstrip("\n"))
    if console.is_terminal:
        console.print(Syntax(source, "python", theme="ansi_dark", background_color="default", word_wrap=True))
    else:
        _say(console, source)
    _say(console, f"\nhint: {envs_view.clean(program.hint or 'none')}")
    if plays:
        _say(console, *(f"\n{envs_view.play(row)}" for row in catalogue.plays(entry)))
    near = catalogue.neighbours(entry)
    if near:
        rows = [
            f"  {cosine:.3f}  {other.id}  step {other.step}  {envs_view.clean(other.title)}"
            for cosine, other in near
        ]
        _say(console, "\nmost alike (cosine of hashed TF-IDF)", *rows)


def _say(console: Console, *blocks: str) -> None:
    for block in blocks:
        console.print(block, markup=False, highlight=False, soft_wrap=True)


def _say_difference(line: str) -> None:
    colour = {"+": "green", "-": "red", "@": "cyan"}.get(line[:1])
    typer.secho(line, fg=colour, bold=line.startswith(("+++", "---")))
