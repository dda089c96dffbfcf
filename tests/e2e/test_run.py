"""The main job end to end: interrupted, killed, resumed; nothing lost, nothing trained twice (I7, I8).

The role of ``docs/roles.md``, from a package of its own, takes part: its facts and its queue are as durable.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import to_thread
from nano_runs import (
    ROOT,
    START_SECONDS,
    ended,
    nothing_left,
    output,
    start,
    status,
    surviving,
    trained_twice,
)
from nano_runs import facts as facts_of
from scenes import plugins
from scenes.brokers import free_ports

from bus.messages import EpisodeFinished, Message, PolicyPublished, RoundSummary
from engine.training.time_shares import PREFIX

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 6
COUNTER = ROOT / "docs" / "examples" / "counter"
SETTINGS = (
    'run.roles=["designer", "agent", "scorer", "learner", "server", "evaluator", "counter"]',
    "plugins.counter.least=0.9",
    f"run.steps={STEPS}",
    "curriculum.environments=8",
    "learner.designer.scope=global",
    'evaluator.suites=[{name="mid", source="seeds:mid", episodes=12}]',
    'run.trackers=["tensorboard", "trackio"]',
)
TRACKED = {
    *("round/plain", "round/hinted", "round/difficulty", "round/valid", "scores/regret", "held_out/mid"),
    *("learner/loss", "learner/entropy", "learner/grad_norm", "plays/tokens_per_second"),
}


def environments(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of `spade envs list`."""
    command = [sys.executable, "-m", "engine.cli", "envs", "list", "--json", "--directory", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


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


def live_page(port: int) -> dict[str, Any]:
    """Return the status that the live page of the run tells."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status?token=secret", timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def tracked(directory: Path) -> tuple[set[str], set[str]]:
    """Return the names of the figures that TensorBoard and trackio got."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    boards = EventMultiplexer().AddRunsFromDirectory(str(directory / "nano" / "tensorboard")).Reload()
    with sqlite3.connect(directory / "trackio" / "spade.db") as found:
        rows = [json.loads(metrics) for (metrics,) in found.execute("SELECT metrics FROM metrics")]
    return {name for tags in boards.Runs().values() for name in tags["scalars"]}, set().union(*rows)


def counts(messages: Sequence[Message]) -> dict[int, set[int]]:
    """Return the counts that the counter's facts give for each round."""
    found: dict[int, set[int]] = {}
    for message in messages:
        if type(message).__name__ == "Counted":
            found.setdefault(message.round, set()).add(message.won)  # type: ignore[attr-defined]
    return found


async def test_interrupt_kill_and_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def launched() -> subprocess.Popen[bytes]:
        child = start(tmp_path, *SETTINGS, f"ui.port={port}", packages=packages)
        request.addfinalizer(child.kill)
        return child

    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("SPADE_WATCH_TOKEN", "secret")
    (port,) = free_ports(1)
    packages = plugins.install_example(tmp_path / "packages", COUNTER)
    monkeypatch.syspath_prepend(str(packages))
    importlib.import_module("counter")  # so that this process can read its facts
    first = launched()
    await until(first, tmp_path, lambda facts: facts["step"] >= 1)
    assert (await to_thread.run_sync(live_page, port))["step"] >= 1
    os.kill(first.pid, signal.SIGINT)
    assert await ended(first) in (0, 130), output(tmp_path)
    await nothing_left(tmp_path)
    before = status(tmp_path)
    assert before["state"] == "stopped"

    second = launched()
    await until(second, tmp_path, lambda facts: facts["step"] >= before["step"] + 2)
    os.killpg(second.pid, signal.SIGKILL)
    await ended(second)
    await nothing_left(tmp_path)

    third = launched()
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
    assert "Vendi score" in page
    assert "Shares of the time of a round" in page
    assert len(environments(tmp_path)) == facts["environments_accepted"]
    for figures in tracked(tmp_path):
        assert figures >= TRACKED

    messages = [message for _, message in await facts_of(tmp_path)]
    batches = surviving(messages)
    assert sum(len(one.trained) for one in batches) > 0
    assert trained_twice(batches) == []
    assert [one.round for one in batches] == list(range(STEPS + 1))
    times = [[share for name, share in one.metrics.items() if name.startswith(PREFIX)] for one in batches]
    told = [sum(shares) for shares in times if shares]  # one that is announced again after a stop has none
    assert told == pytest.approx([1.0] * len(told))
    assert len(told) >= STEPS // 2
    weights: dict[int, set[str]] = {}
    for one in messages:
        if isinstance(one, PolicyPublished):
            weights.setdefault(one.version, set()).add(one.sha256)
    assert all(len(digests) == 1 for digests in weights.values())

    won, expected = 0, {}
    for one in messages:
        if isinstance(one, EpisodeFinished):
            won += one.returned >= 0.9
        elif isinstance(one, RoundSummary):
            expected[one.round] = {won}
    assert counts(messages) == expected
    assert len(expected) >= STEPS
