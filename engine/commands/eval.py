"""``spade eval``: judge a model, a checkpoint or an endpoint on held-out suites; list, compare, tabulate."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from engine.errors import ConfigError

if TYPE_CHECKING:
    from engine.evals.records import Summary
    from engine.evals.target import Target

PARTIAL = 3
_PRESETS = ("paper", "smoke")


class _SuitesFirst(TyperGroup):
    """A group whose arguments, where they begin with no command, are those of ``run``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="eval",
    cls=_SuitesFirst,
    no_args_is_help=True,
    help="Judge a model on held-out suites: spade eval SUITE... with --model, --run or --endpoint.",
)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Runs = Annotated[Path, typer.Option(help="Directory of the runs.")]


@app.command()
def run(
    suites: Annotated[
        list[str], typer.Argument(help="Suites, as in `spade eval list`: NAME or NAME:ARGUMENT.")
    ],
    model: Annotated[str, typer.Option(help="Model folder, package:NAME or hub:OWNER/NAME.")] = "",
    run: Annotated[str, typer.Option(help="Run, by name or path; RUN@STEP, RUN@best, RUN@start.")] = "",
    endpoint: Annotated[str, typer.Option(help="OpenAI-compatible endpoint, up to /v1.")] = "",
    name: Annotated[str, typer.Option(help="Model's name at the endpoint.")] = "",
    key_env: Annotated[str, typer.Option(help="Variable that holds the endpoint's key.")] = "",
    user_endpoint: Annotated[
        str, typer.Option(help="Endpoint that plays the simulated users; default: the judged model does.")
    ] = "",
    user_name: Annotated[str, typer.Option(help="Model's name there.")] = "",
    user_key_env: Annotated[str, typer.Option(help="Variable that holds the key for it.")] = "",
    preset: Annotated[str, typer.Option(help="Sampling settings: paper or smoke.")] = "paper",
    limit: Annotated[
        int, typer.Option(help="Items of each suite at most; default: the preset's.", min=0)
    ] = 0,
    samples: Annotated[int, typer.Option(help="Samples of each item; default: the preset's.", min=0)] = 0,
    max_tokens: Annotated[int, typer.Option(help="Longest reply; default: the preset's.", min=0)] = 0,
    temperature: Annotated[float, typer.Option(help="Default: the preset's.")] = -1.0,
    thinking: Annotated[str, typer.Option(help="Thinking switch of the chat template: off, on, unset.")] = "",
    context: Annotated[int, typer.Option(min=0, help="Context length of --model, in tokens.")] = 0,
    concurrency: Annotated[int, typer.Option(min=0, help="Samples that are played at a time.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of suites that draw their items.")] = 17,
    corpus: Annotated[
        list[str] | None, typer.Option(help="Training texts for the contamination guard (SCHEME:ARGUMENT).")
    ] = None,
    baselines: Annotated[bool, typer.Option(help="Play the null and the random agent, too.")] = True,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the results; default: a new one in evals/.")
    ] = None,
    directory: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Play suites and print the figures. Status 3: partial, some suites or samples have no result."""
    from engine.config import EndpointConfig
    from engine.evals import target as targets

    if sum(map(bool, (model, run, endpoint))) != 1:
        raise ConfigError(
            "Name one model to judge.", remedy="Use --model DIR, --run RUN[@STEP] or --endpoint URL."
        )
    if context and not model:
        raise ConfigError("--context is for --model: others have one of their own.", remedy="Leave it out.")
    if thinking and endpoint:
        raise ConfigError(
            "--thinking is for --model and --run.", remedy="Set it at the endpoint, leave it out."
        )
    if thinking not in ("", "off", "on", "unset"):
        raise ConfigError(f"There is no --thinking {thinking!r}.", remedy="Use off, on or unset.")
    if preset not in _PRESETS:
        raise ConfigError(f"There is no preset {preset!r}.", remedy=f"Presets: {', '.join(_PRESETS)}.")
    if model:
        found = targets.of_model(
            model,
            thinking=thinking or "unset",  # type: ignore[arg-type]
            context=context,
            concurrency=concurrency,
        )
    elif run:
        found = targets.of_run(
            run,
            directory=directory,
            thinking=thinking or None,  # type: ignore[arg-type]
            concurrency=concurrency,
        )
    else:
        if not name:
            raise ConfigError("The endpoint needs the name of a model.", remedy="Use --name MODEL.")
        settings = EndpointConfig(base_url=endpoint, model=name, key_env=key_env)
        found = targets.of_endpoint(settings, concurrency=concurrency)
    if user_endpoint:
        if not user_name:
            raise ConfigError(
                "The user's endpoint needs the name of a model.", remedy="Use --user-name MODEL."
            )
        user = EndpointConfig(base_url=user_endpoint, model=user_name, key_env=user_key_env)
        found = replace(found, user=user, record={**found.record, "user": f"{user_name} at {user_endpoint}"})
    given = {"limit": limit, "samples": samples, "max_tokens": max_tokens, "temperature": temperature}
    summary = _evaluate(found, suites, preset, given, seed, corpus or [], baselines, out)
    if as_json:
        import msgspec

        print(msgspec.json.encode(summary).decode())
    else:
        from engine.evals.tables import summary_table

        print(summary_table(summary))
    raise typer.Exit(PARTIAL if summary.partial else 0)


def _evaluate(
    target: Target,
    names: list[str],
    preset: str,
    given: dict[str, float],
    seed: int,
    corpus: list[str],
    baselines: bool,
    out: Path | None,
) -> Summary:
    from importlib.metadata import version

    import anyio
    import msgspec

    from engine import telemetry
    from engine.evals import suite as suites
    from engine.evals.records import Journal
    from engine.evals.suite import Preset

    session = _session()
    config, parts, missing = target.config, [], {}
    for source in dict.fromkeys(names):
        suite = suites.load(source, config, where="SUITE")
        known = suite.presets.get(preset)
        own = msgspec.structs.replace(config.agent.sampling, temperature=config.evaluator.temperature)
        taken = known or Preset(sampling=own)
        why = suite.available()
        try:
            items = [] if why else suite.items(int(given["limit"]) or taken.items, seed)
        except ConfigError as error:  # such as a hub that cannot be reached
            why = error.what
        if why:
            missing[source] = why
            continue
        sampling = taken.sampling
        if given["max_tokens"]:
            sampling = msgspec.structs.replace(sampling, max_tokens=int(given["max_tokens"]))
        if given["temperature"] >= 0:
            sampling = msgspec.structs.replace(sampling, temperature=given["temperature"])
        parts.append(
            session.Part(
                name=source,
                suite=suite,
                items=items,
                preset=preset if known else "",
                sampling=sampling,
                samples=int(given["samples"]) or taken.samples,
            )
        )
    conditions = {
        **target.record,
        "spade": version("spade-selfplay"),
        "preset": preset,
        "seed": seed,
        "suites": {
            part.name: {
                "version": part.suite.version,
                "items": len(part.items),
                "samples": part.samples,
                "sampling": msgspec.to_builtins(part.sampling),
            }
            for part in parts
        },
    }
    label = "-".join(
        str(target.record.get(key, "")) for key in ("run", "model", "checkpoint") if key in target.record
    )
    place = out or Path("evals") / f"{time.strftime('%Y%m%d-%H%M%S')}-{Path(label).name.replace(':', '-')}"
    sources = session.training_texts(target, corpus)
    journal = Journal(place, conditions)
    _say(f"Results: {place}")
    for source, why in missing.items():
        _say(f"{source} is left out: {why}")
    telemetry.configure(place / "logs", "eval")
    try:
        summary: Summary = anyio.run(
            lambda: session.evaluate(
                target, parts, journal, missing=missing, baselines=baselines, sources=sources, say=_say
            )
        )
    finally:
        telemetry.close()
    return summary


@app.command(name="list")
def list_suites(as_json: AsJson = False) -> None:
    """List the suites that are installed, and what each lacks here."""
    from engine import registry
    from engine.config import Config, ModelConfig, RunConfig
    from engine.errors import SpadeError

    config = Config(run=RunConfig(name="eval"), model=ModelConfig(path=""))
    found = []
    for name, point in registry.registered(registry.SUITES).items():
        row: dict[str, Any] = {
            "name": name,
            "from": point.dist.name if point.dist else "",
            "presets": [],
            "missing": "",
        }
        try:
            suite = registry.load(registry.SUITES, name, where="SUITE")("", config)
            row |= {"version": suite.version, "presets": sorted(suite.presets), "missing": suite.available()}
        except SpadeError as error:
            row["missing"] = f"needs an argument: {error.remedy}"
        found.append(row)
    if as_json:
        import json

        print(json.dumps({"suites": found}))
        return
    for row in found:
        print(f"{row['name']:<22} {row['missing'] or 'ready'}")


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(help="Results of an evaluation.")],
    second: Annotated[Path, typer.Argument(help="Results of the one to compare with it.")],
    as_json: AsJson = False,
) -> None:
    """Compare two evaluations on the items that both have: paired differences with 95 % intervals."""
    from engine.evals.tables import compared

    rows = compared(first, second)
    if as_json:
        import json

        print(json.dumps({"first": str(first), "second": str(second), "suites": rows}))
        return
    for row in rows:
        if row["items"]:
            print(
                f"{row['suite']:<28} {row['difference']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]  "
                f"{row['items']} common items, {row['left_out']} others  {row['note']}".rstrip()
            )
        else:
            print(f"{row['suite']:<28} not compared: {row['note']}")


@app.command()
def table(
    results: Annotated[list[Path], typer.Argument(help="Results of evaluations, in the order of the rows.")],
    select: Annotated[
        str, typer.Option(help="Choose the best row by this suite of a validation split; it is not reported.")
    ] = "",
    html: Annotated[
        Path | None, typer.Option(help="Write the table and a plot of each suite to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print several evaluations as one table, such as those of a run's checkpoints."""
    from engine.evals import tables

    found = tables.across(results, select=select)
    if html is not None:
        html.write_text(tables.page(found), encoding="utf-8")
    if as_json:
        import json

        print(json.dumps(found))
        return
    print(tables.text_table(found))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _session() -> Any:
    """Return the evaluator's session, found by its entry point, because the engine imports no roles."""
    from importlib.metadata import entry_points

    for point in entry_points(group="spade.evaluation", name="session"):
        return point.load()
    raise ConfigError("No evaluator is installed.", remedy="Run `make setup`, or install spade again.")
