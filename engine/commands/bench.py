"""``spade bench``: measurements that anybody can repeat. Each says how busy the machine was."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="bench", help="Measure parts of the engine on this machine.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep subcommands by name even while there is only one."""


@app.command()
def bus(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    seconds: Annotated[float, typer.Option(min=0.05, help="Length of a case.")] = 2.0,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; medians and ranges are over them.")] = 5,
    pin: Annotated[bool, typer.Option("--pin/--no-pin", help="Tie producer and consumer to a core.")] = True,
    paths: Annotated[
        str | None, typer.Option(help="Our paths beside the sample stream, with commas; default: all.")
    ] = None,
    peers: Annotated[
        str | None, typer.Option(help="Other transports to measure, with commas; default: all there are.")
    ] = None,
) -> None:
    """Measure the bus from a producer process to a consumer's acknowledgement, beside other transports."""
    import sys

    import anyio
    import msgspec
    from rich.console import Console

    from engine.bench import bus as bench
    from engine.bench.bus_table import show

    def names(text: str | None) -> tuple[str, ...] | None:
        return None if text is None else tuple(filter(None, map(str.strip, text.split(","))))

    settings = bench.Settings(seconds=seconds, repeat=repeat, pin=pin, paths=names(paths), peers=names(peers))
    report = anyio.run(
        bench.measure,
        settings,
        lambda text: print(text, file=sys.stderr, flush=True),
        backend_options={"use_uvloop": True},
    )
    if as_json:
        print(msgspec.json.encode(report).decode())
    else:
        show(report, Console())


@app.command()
def weights(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of each case; medians are told.")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="Requests that stream meanwhile.")] = 8,
    layers: Annotated[int, typer.Option(min=0, help="Layers of the 4B model that are simulated.")] = 2,
) -> None:
    """Measure how new weights reach a server: the standstill, the seconds, the bytes; and the limits."""
    import sys

    import anyio
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from engine.bench import weights as bench

    work = bench.Work(repeat=repeat, requests=requests, layers=layers)
    figures = anyio.run(bench.measure, work, lambda text: print(text, file=sys.stderr, flush=True))
    if as_json:
        print(msgspec.json.encode(figures).decode())
        return
    table = Table(title="New weights", show_header=False)
    for name, value in bench.summary(figures):
        table.add_row(name, str(value))
    Console().print(table)


@app.command()
def rollout(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    repeat: Annotated[int, typer.Option(min=1, help="Phases of each side; the median ratio is told.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of a phase, about.")] = 8.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Conversations at a time.")] = 64,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a reply.")] = 64,
    turns: Annotated[int, typer.Option(min=2, help="Turns of a multi-turn play.")] = 6,
    crowd: Annotated[int, typer.Option(min=1, help="Plays at once against a simulated server.")] = 1000,
    model: Annotated[str, typer.Option(help="Model path as in a recipe; default: random weights.")] = "",
) -> None:
    """Measure how much of vLLM's speed the engine passes on to plays, and its loop with a thousand of them.
    Status 1 when a target is missed.
    """
    import sys

    import anyio
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from engine.bench import rollout as bench

    work = bench.Work(
        repeat=repeat, seconds=seconds, concurrency=concurrency, tokens=tokens, turns=turns, crowd=crowd
    )
    figures = anyio.run(
        bench.measure,
        work,
        lambda text: print(text, file=sys.stderr, flush=True),
        model,
        backend_options={"use_uvloop": True},
    )
    if as_json:
        print(msgspec.json.encode(figures).decode())
    else:
        table = Table(title="Rollouts", show_header=False)
        for name, value in bench.summary(figures):
            table.add_row(name, str(value))
        Console().print(table)
    if not figures.within_target:
        raise typer.Exit(1)


@app.command()
def soak(
    seconds: Annotated[float, typer.Option(help="How long the load lasts.")] = 600.0,
    rate: Annotated[float, typer.Option(help="Messages a second.")] = 500.0,
    size: Annotated[int, typer.Option(help="Bytes of a message.")] = 36_000,
    warm_up: Annotated[
        float | None, typer.Option(help="Seconds left out of the slope; default: 150, at most half.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Load the bus steadily and see whether server or clients grow. Status 1 when the target is missed."""
    import msgspec

    from engine.bench import soak as bench

    result = bench.run(seconds, rate, size, warm_up)
    print(msgspec.json.encode(result).decode() if as_json else bench.text(result))
    if not result.within_target:
        raise typer.Exit(1)


@app.command()
def sandbox(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    spawns: Annotated[int, typer.Option(min=10, help="Spawns measured one after another.")] = 300,
    live: Annotated[int, typer.Option(min=1, help="Live instances whose memory is measured.")] = 500,
    seconds: Annotated[float, typer.Option(min=0.1, help="Duration of each throughput.")] = 3.0,
) -> None:
    """Measure spawns, steps, memory and kills of the sandbox, and of other ways to run a program."""
    from engine.bench.sandbox import Work, measure
    from engine.commands.sandbox import figures, sandboxed

    work = Work(spawns=spawns, live=live, seconds=seconds)
    print(figures(sandboxed(measure, work), as_json=as_json))


@app.command()
def sandbox_soak(
    live: Annotated[int, typer.Option(min=1, help="Instances that play at the same time.")] = 1000,
    seconds: Annotated[float, typer.Option(min=1.0, help="Duration.")] = 600.0,
    think: Annotated[float, typer.Option(min=0.0, help="Mean seconds before an action.")] = 2.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Play at random in many live instances: lag, memory, leftovers. Status 1 when the target is missed."""
    import sys

    from engine.bench.sandbox_soak import soak
    from engine.commands.sandbox import figures, sandboxed

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    result = sandboxed(soak, live, seconds, think, say)
    print(figures(result, as_json=as_json))
    if not result.within_target:
        raise typer.Exit(1)


@app.command()
def diversity(
    recipe: Annotated[Path, typer.Argument(help="Recipe file (TOML).", show_default=False)],
    changes: Annotated[list[str], typer.Option("--set", help="Override of the changed arm: key=value.")],
    seed: Annotated[list[int] | None, typer.Option(help="Seeds; default: 0, 1 and 2.")] = None,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of a run; 0 leaves the recipe's.")] = 0,
    both: Annotated[list[str] | None, typer.Option(help="Override of both arms: key=value.")] = None,
    directory: Annotated[Path, typer.Option(help="Where the runs go.")] = Path("runs/diversity"),
    similarity: Annotated[str, typer.Option(help="hashed, minilm, auto, or a model.")] = "hashed",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a recipe as it is and changed, over several seeds, and compare how varied its environments are."""
    import sys

    import msgspec

    from engine.bench import diversity as bench

    settings = bench.Settings(
        recipe=recipe,
        changes=tuple(changes),
        seeds=tuple(seed or (0, 1, 2)),
        rounds=rounds,
        overrides=tuple(both or ()),
        directory=directory,
        similarity=similarity,
    )
    report = bench.measure(settings, lambda line: print(line, file=sys.stderr, flush=True))
    print(msgspec.json.encode(report).decode() if as_json else bench.text(report), flush=True)


@app.command()
def steady(
    run: Annotated[str | None, typer.Argument(help="A run that is running now; default: the newest.")] = None,
    directory: Annotated[Path, typer.Option(help="Where runs are.")] = Path("runs"),
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to watch at most.")] = 7200.0,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 10.0,
    warm_up: Annotated[float, typer.Option(min=0.0, help="Seconds left out of the figures.")] = 900.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Watch a run for hours: memory of each process, cost of a step. Status 1 when memory grows."""
    import sys

    import msgspec

    from engine.bench import steady as bench
    from engine.run import find

    result = bench.watch(
        find(run, directory), seconds, every, warm_up, lambda line: print(line, file=sys.stderr, flush=True)
    )
    print(msgspec.json.encode(result).decode() if as_json else bench.text(result))
    if not result.within_target:
        raise typer.Exit(1)
