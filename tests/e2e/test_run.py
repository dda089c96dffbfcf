"""The main job end to end: interrupted, killed, resumed; nothing lost, nothing trained twice (I7, I8)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from anyio import to_thread

from bus import connect, serve
from bus.messages import BatchTrained, PolicyPublished
from engine.lineage import Lineage, Version

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "configs" / "nano.toml"
STEPS = 6
START_SECONDS = 400.0
GONE_SECONDS = 10.0


def command(directory: Path, *settings: str) -> list[str]:
    return [
        *(sys.executable, "-m", "engine.cli", "run", str(RECIPE), f"run.directory={directory}"),
        *("run.name=nano", f"run.steps={STEPS}", "curriculum.environments=12", "ui.live=off"),
        *('evaluator.suites=[{name="mid", source="seeds:mid", episodes=24}]', *settings),
    ]


def start(directory: Path, *settings: str) -> subprocess.Popen[bytes]:
    with (directory / "out.txt").open("ab") as out:
        return subprocess.Popen(
            command(directory, *settings), cwd=ROOT, stdout=out, stderr=out, start_new_session=True
        )


def environments(directory: Path) -> list[dict[str, Any]]:
    """What `spade envs list` knows."""
    command = [sys.executable, "-m", "engine.cli", "envs", "list", "--json", "--directory", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def status(directory: Path) -> dict[str, Any]:
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


async def until(
    child: subprocess.Popen[bytes], directory: Path, reached: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Poll the status until it is as wanted. Fails when the run ends first."""
    with anyio.fail_after(START_SECONDS):
        while True:
            facts = await to_thread.run_sync(status, directory)
            if facts and reached(facts):
                return facts
            assert child.poll() is None, output(directory)
            await anyio.sleep(0.3)


async def ended(child: subprocess.Popen[bytes]) -> int:
    with anyio.fail_after(START_SECONDS):
        return await to_thread.run_sync(child.wait)


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


async def learner_facts(directory: Path) -> tuple[list[BatchTrained], list[PolicyPublished], Lineage]:
    """What the learner published in the whole run, read from the streams themselves."""
    async with (
        serve(directory / "nano" / "bus", run="nano") as server,
        connect(server.url, run="nano", role="test", instance="0", token=server.token) as bus,
    ):
        found = [record.message async for record in bus.replay("EVENT", tails=["event.learner.>"])]
    batches = [one for one in found if isinstance(one, BatchTrained)]
    policies = [one for one in found if isinstance(one, PolicyPublished)]
    lineage = Lineage()
    for version in sorted({Version.unpack(one.version) for one in policies}):
        if version.fence > lineage.forks[-1][0]:
            lineage = lineage.fork(version.fence, version.step)
    return batches, policies, lineage


async def test_interrupt_kill_and_resume(tmp_path: Path) -> None:
    first = start(tmp_path)
    await until(first, tmp_path, lambda facts: facts["step"] >= 1)
    os.kill(first.pid, signal.SIGINT)
    assert await ended(first) in (0, 130), output(tmp_path)
    await nothing_left(tmp_path)
    before = status(tmp_path)
    assert before["state"] == "stopped"

    second = start(tmp_path)
    await until(second, tmp_path, lambda facts: facts["step"] >= before["step"] + 2)
    os.killpg(second.pid, signal.SIGKILL)
    await ended(second)
    await nothing_left(tmp_path)

    third = start(tmp_path)
    assert await ended(third) == 0, output(tmp_path)
    await nothing_left(tmp_path)

    facts = status(tmp_path)
    assert facts["state"] == "complete"
    assert facts["version_published"] == facts["step"] >= STEPS
    assert set(facts["versions_serving"]) == {facts["step"]}
    assert facts["agent_samples_trained"] > 0
    assert facts["designer_samples_trained"] > 0
    assert facts["max_staleness_seen"] <= 8
    page = (tmp_path / "nano" / "report.html").read_text()
    assert "of their programs), coloured by step" in page
    assert len(environments(tmp_path)) == facts["environments_accepted"]

    batches, policies, lineage = await learner_facts(tmp_path)
    surviving = {one.key: one for one in batches if lineage.survives(Version.unpack(one.version))}
    counts = Counter(sample for one in surviving.values() for sample in one.trained)
    assert counts
    assert [sample for sample, count in counts.items() if count > 1] == []
    rounds = Counter(one.round for one in surviving.values())
    assert sorted(rounds) == list(range(STEPS + 1))
    assert max(rounds.values()) == 1
    weights: dict[int, set[str]] = {}
    for one in policies:
        weights.setdefault(one.version, set()).add(one.sha256)
    assert all(len(digests) == 1 for digests in weights.values())
