"""``spade bench``: measurements of this machine. Each result states the machine and its load meanwhile."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.shipped import recipe_path

if TYPE_CHECKING:
    import msgspec

app = typer.Typer(name="bench", help="Measure parts of the engine on this machine.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_LOOP = {"use_uvloop": True}


@app.command()
def bus(
    as_json: AsJson = False,
    seconds: Annotated[float, typer.Option(min=0.05, help="Length of a case in seconds.")] = 2.0,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions; the result has median and range.")] = 3,
) -> None:
    """Measure throughput and latency of the bus: the sample stream beside the task queue."""
    import anyio

    from engine.bench import bus as bench

    options = bench.BusOptions(seconds=seconds, repeat=repeat)
    _show(anyio.run(bench.measure, options, _progress, backend_options=_LOOP), as_json)


@app.command()
def sandbox(
    as_json: AsJson = False,
    spawns: Annotated[int, typer.Option(min=10, help="Spawns measured in sequence.")] = 300,
    live: Annotated[int, typer.Option(min=1, help="Live instances whose memory is measured.")] = 500,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each throughput in seconds.")] = 3.0,
) -> None:
    """Measure spawns, steps and memory of the sandbox."""
    from engine.bench.sandbox import SandboxOptions, measure
    from engine.commands.sandbox import sandboxed

    _show(sandboxed(measure, SandboxOptions(spawns=spawns, live=live, seconds=seconds)), as_json)


@app.command()
def rollout(
    as_json: AsJson = False,
    repeat: Annotated[int, typer.Option(min=1, help="Phases of each side; the ratio is a median.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.5, help="Length of a phase, about, in seconds.")] = 8.0,
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent episodes.")] = 64,
    tokens: Annotated[int, typer.Option(min=8, help="Mean length of a reply in tokens.")] = 64,
    turns: Annotated[int, typer.Option(min=2, help="Turns of a multi-turn episode.")] = 6,
) -> None:
    """Measure the share of vLLM's speed that episodes get, beside a bare client (status 1 below target)."""
    import anyio

    from engine.bench import rollout as bench

    options = bench.RolloutOptions(
        repeat=repeat, seconds=seconds, concurrency=concurrency, tokens=tokens, turns=turns
    )
    figures = anyio.run(bench.measure, options, _progress, backend_options=_LOOP)
    _show(figures, as_json)
    if not figures.within_target:
        raise typer.Exit(1)


@app.command()
def weights(
    as_json: AsJson = False,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of each case; results are medians.")] = 3,
    requests: Annotated[int, typer.Option(min=1, help="Requests that stream during an update.")] = 8,
) -> None:
    """Measure a weight update: the time without tokens, the time until it is served, and their limits."""
    import anyio

    from engine.bench import weights as bench

    options = bench.WeightOptions(repeat=repeat, requests=requests)
    _show(anyio.run(bench.measure, options, _progress), as_json)


@app.command()
def loop(
    recipe: Annotated[
        Path, typer.Argument(parser=recipe_path, metavar="RECIPE", help="A recipe: name or TOML file.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides: key=value.")] = None,
    rounds: Annotated[int, typer.Option(min=3, help="Rounds of each mode.")] = 6,
    directory: Annotated[Path, typer.Option(help="Directory of the two runs.")] = Path("runs/bench"),
    as_json: AsJson = False,
) -> None:
    """Measure the whole loop in a short run: samples per second and idle shares, async against sync."""
    from engine.bench import loop as bench

    options = bench.LoopOptions(
        recipe=recipe, rounds=rounds, overrides=tuple(overrides or ()), directory=directory
    )
    _show(bench.measure(options, _progress), as_json)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(figures: msgspec.Struct, as_json: bool) -> None:
    import msgspec

    facts = msgspec.to_builtins(figures)
    print(json.dumps(facts, indent=2) if as_json else "\n".join(_rows(facts, "")), flush=True)


def _rows(facts: dict[str, Any], prefix: str) -> Iterator[str]:
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _rows(value, f"{prefix}{name}.")
        else:
            yield f"{prefix + name:<44} {'-' if value is None else value}"
