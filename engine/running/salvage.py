"""Salvage: begins a new run with the whole parts of a damaged one (``spade run --salvage``).

A power failure may take the tail of a stream; the damaged run can then not go on. Its checkpoints, memory and
archive are files of their own. The new run has streams, rounds and versions of its own, so that no number
stands for two policies.
"""

from __future__ import annotations

import shutil
import sqlite3
import zlib
from pathlib import Path

import msgspec

from engine.errors import ConfigError
from engine.files import replace
from engine.records import history
from engine.records.archive import FOLDER
from engine.run import RunDirectory, find

MEMORY = "designer.memory"


def source(name: str, directory: Path, new: RunDirectory) -> RunDirectory:
    """Return the run to salvage, by name below ``directory`` or by path. Raises ConfigError."""
    old = find(name, directory)
    if old.root == new.root:
        raise ConfigError(
            f"--salvage {name} begins a new run, and the recipe names the damaged one.",
            remedy="Give the new one a name: run.name=NAME.",
        )
    if (holder := old.holder()) is not None:
        raise ConfigError(
            f"The run {old.root.name} is running (process {holder.get('pid')}): there is nothing to salvage.",
            remedy="Stop it first, or resume it after it ended: spade run RECIPE.",
        )
    if not any((old.root / "learner" / "checkpoints").glob("*/manifest.json")):
        raise ConfigError(
            f"The run {old.root.name} has no checkpoint to begin at.",
            where=str(old.root),
            remedy="Start again from the recipe: spade run RECIPE run.name=NAME.",
        )
    return old


def carry_over(old: RunDirectory, new: RunDirectory) -> list[str]:
    """Copy archive and memory of ``old`` into ``new``; return lines about what was kept and what is lost."""
    programs = old.root / FOLDER
    if programs.is_dir():
        shutil.copytree(programs, new.root / FOLDER, dirs_exist_ok=True)
    remembered = _copy_memory(old.root / MEMORY, new.root / MEMORY, run=new.root.name)
    count = sum(1 for _ in programs.glob("*.py")) if programs.is_dir() else 0
    return [
        f"Kept: weights, optimiser, random numbers, accepted designs; {count} archived programs; "
        + ("the designer's memory" if remembered else "no memory of the designer (none was whole)"),
        f"Lost: all batches after that checkpoint ({_trained(old)}), samples and designs under way, the "
        "windows of the curriculum; rounds and versions begin at 0",
    ]


def _copy_memory(old: Path, new: Path, *, run: str) -> bool:
    """Write the memory as one that knows nothing of the new run's stream; False when it is not whole."""
    try:
        snapshot = dict(msgspec.msgpack.decode(zlib.decompress(old.read_bytes())))
    except (OSError, zlib.error, msgspec.DecodeError, TypeError, ValueError):
        return False
    snapshot |= {"run": run, "position": 0, "key": "", "through": 0, "missed": 0}
    replace(new, zlib.compress(msgspec.msgpack.encode(snapshot), 1), durable=True)
    return True


def _trained(old: RunDirectory) -> str:
    try:
        return f"the run had trained round {history.last_trained(old.database)}"
    except sqlite3.Error:
        return "run.db cannot tell how many"
