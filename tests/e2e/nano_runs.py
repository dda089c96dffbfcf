"""Whole nano runs as commands: started, watched, ended, and what they left on the bus."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import anyio
import psutil
from anyio import to_thread

from bus import connect, serve
from bus.messages import BatchTrained, Message, PolicyPublished
from engine.lineage import Lineage, Version

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "nano.toml"
START_SECONDS = 400.0
GONE_SECONDS = 10.0


def command(directory: Path, *settings: str) -> list[str]:
    """A run with the nano recipe, under ``directory``/nano."""
    return [
        *(sys.executable, "-m", "engine.cli", "run", str(RECIPE), f"run.directory={directory}"),
        *("run.name=nano", "ui.live=off", *settings),
    ]


def spawn(
    words: Sequence[str], directory: Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process of its own session; what it says goes to ``directory``/out.txt."""
    with (directory / "out.txt").open("ab") as out:
        return subprocess.Popen(
            words, cwd=ROOT, stdout=out, stderr=out, start_new_session=True, env=environment
        )


def start(directory: Path, *settings: str, packages: Path | None = None) -> subprocess.Popen[bytes]:
    """Start a nano run; ``packages`` is a directory of packages that are installed for it."""
    environment = {**os.environ, "PYTHONPATH": str(packages)} if packages else None
    return spawn(command(directory, *settings), directory, environment)


def status(directory: Path) -> dict[str, Any]:
    """Return the status of the run, {} before it has one."""
    done = subprocess.run(
        [sys.executable, "-m", "engine.cli", "status", "nano", "--json", "--directory", str(directory)],
        cwd=ROOT,
        capture_output=True,
        timeout=30,
        check=False,
    )
    return json.loads(done.stdout) if done.returncode == 0 else {}


def output(directory: Path) -> str:
    return (directory / "out.txt").read_text()[-4000:]


async def ended(child: subprocess.Popen[bytes]) -> int:
    with anyio.fail_after(START_SECONDS):
        return await to_thread.run_sync(child.wait, abandon_on_cancel=True)


def ours(directory: Path) -> list[str]:
    """Command lines of living processes that mention the run directory."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or [])
        if str(directory) in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(line)
    return found


async def nothing_left(directory: Path) -> None:
    with anyio.move_on_after(GONE_SECONDS):
        while ours(directory):  # noqa: ASYNC110 - the process table has no event to await
            await anyio.sleep(0.1)
    assert ours(directory) == []


async def facts(directory: Path) -> list[tuple[int, Message]]:
    """All facts of a run that rests, with their sequence, read from the stream itself."""
    async with (
        serve(directory / "nano" / "bus", run="nano") as server,
        connect(server.url, run="nano", role="test", instance="0", token=server.token) as bus,
    ):
        return [(record.sequence, record.message) async for record in bus.replay("EVENT")]


def lineage(policies: Iterable[PolicyPublished]) -> Lineage:
    """The tree of the published versions: each fence left its predecessor at the first step it published."""
    tree = Lineage()
    for version in sorted({Version.unpack(one.version) for one in policies}):
        if version.fence > tree.forks[-1][0]:
            tree = tree.fork(version.fence, version.step)
    return tree


def surviving(messages: Iterable[Message]) -> list[BatchTrained]:
    """Return the batches on the path to the newest weights, in the order of rounds.

    A learner that resumes announces its last batch again under its new fence: the same step and round.
    """
    found = list(messages)
    tree = lineage(one for one in found if isinstance(one, PolicyPublished))
    kept = {
        (one.round, one.step): one
        for one in found
        if isinstance(one, BatchTrained) and tree.survives(Version.unpack(one.version))
    }
    return sorted(kept.values(), key=lambda one: one.round)


def trained_twice(batches: Iterable[BatchTrained]) -> list[str]:
    counts = Counter(sample for one in batches for sample in one.trained)
    return [sample for sample, count in counts.items() if count > 1]
