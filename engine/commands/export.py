"""``spade export``: a run's checkpoint as a plain Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engine import models
from engine.errors import ConfigError, SpadeError

if TYPE_CHECKING:
    from engine.run import RunDirectory

_TYPES = ("float32", "bfloat16", "float16")


def export(
    run: Annotated[str, typer.Argument(help="Run, by name or path, or the directory of a checkpoint.")],
    to: Annotated[Path, typer.Argument(help="Folder to write, empty or new.")],
    checkpoint: Annotated[str, typer.Option(help="last, best, or a step.")] = "last",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16; default: that of the run's servers.")
    ] = "",
    directory: Annotated[Path, typer.Option(help="Directory of the runs.")] = Path("runs"),
    restart: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Write a checkpoint as a Hugging Face folder: weights, configuration, tokenizer, chat template."""
    from engine.run import RunDirectory, find

    place = Path(run)
    single = (place / "manifest.json").is_file()
    if single and len(place.resolve().parents) < 3:
        raise _apart(place)
    found = RunDirectory(place.resolve().parents[2]) if single else find(run, directory)
    base = found.starting_model() if found.config_file.exists() else None
    if base is None:
        raise _apart(place) if single else ConfigError("The run has not started yet.", where=str(found.root))
    config = found.config()
    kind = dtype or ("float32" if config.model.dtype == "float32" else "bfloat16")
    if kind not in _TYPES:
        raise ConfigError(f"There is no --dtype {dtype!r}.", remedy=f"Use {', '.join(_TYPES)}.")

    from engine.running.preflight import MODEL_MARK
    from engine.training import checkpoint as checkpoints
    from engine.training import export as exports

    chosen = (
        exports.load(place) if single else exports.choose(found.root / "learner" / "checkpoints", checkpoint)
    )
    if restart is None:
        card = _card(found, chosen.path.name)
        exports.export(chosen, base, to, lora=config.learner.lora, dtype=kind, card=card)  # type: ignore[arg-type]
        print(to)
        return
    # For `spade run --resume CHECKPOINT`: with adapters a run starts from the base weights and the adapters.
    if not config.learner.lora.rank:
        exports.export(chosen, base, to, lora=config.learner.lora, dtype="float32")
        base = to
    checkpoints.restart(chosen.path, restart)
    print(f"Starting from {chosen.path}", flush=True)
    print(f"{MODEL_MARK}{base.resolve()}", flush=True)


def _card(run: RunDirectory, checkpoint: str) -> str:
    """Return the model card: what made the weights, and the held-out results that the run's database has."""
    from engine.views import overview

    source = run.config().model.path
    lines = ["---", "library_name: transformers", "tags: [reinforcement-learning, self-play, spade]"]
    if source.startswith(models.HUB):
        lines.append(f"base_model: {source.removeprefix(models.HUB)}")
    lines += [
        "---",
        "",
        f"# {run.root.name}",
        "",
        f"Checkpoint `{checkpoint}` of a self-play run ([SPADE](https://arxiv.org/abs/2608.19197)) from "
        f"`{source}`. One model designed tasks, played them with and without a hint, and learned from both.",
    ]
    try:
        state = overview.read(str(run.root), run.root.parent).state
    except SpadeError:
        return "\n".join([*lines, ""])
    start = state.notes.get("started") or {}
    versions = (start.get("machine") or {}).get("versions", {})
    lines += [
        "",
        f"- command: `{' '.join(start.get('command') or ['spade', 'run'])}`",
        f"- {state.rounds} rounds, {state.step} optimiser steps, {state.episodes_finished:,} episodes, "
        f"{state.environments_accepted:,} environments",
        f"- {', '.join(f'{name} {version}' for name, version in sorted(versions.items()))}",
        "",
        "| held-out suite | step | win rate (95 % interval) | episodes |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {one.suite} | {one.step} | {one.win:.3f} ± {1.96 * one.stderr:.3f} | {one.episodes} |"
        for one in state.evaluations
    ]
    return "\n".join([*lines, ""])


def _apart(place: Path) -> ConfigError:
    return ConfigError(
        "The checkpoint is not in the directory of its run.",
        where=str(place),
        remedy="Its run's recipe and starting model are needed: name RUN/learner/checkpoints/NAME.",
    )
