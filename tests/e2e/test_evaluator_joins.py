"""An evaluator of another process joins a nano run, evaluates two versions on two suites, and leaves."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import anyio
import pytest
from nano_runs import ROOT, ended, facts, nothing_left, output, spawn, start, surviving

from bus.messages import EvaluationFinished

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS = 6
SUITES = {"own": f"dir:{ROOT}/docs/examples/programs", "validation": "seeds:validation"}
SETTINGS = (
    f"run.steps={STEPS}",
    'run.roles=["designer", "agent", "scorer", "learner", "server"]',
    "evaluator.every=1",
    "evaluator.suites=["
    + ", ".join(f'{{name="{name}", source="{source}", episodes=12}}' for name, source in SUITES.items())
    + "]",
    "curriculum.environments=6",
)


def evaluations(directory: Path) -> dict[str, set[int]]:
    """Return the steps at which the evaluator wrote the samples of each suite."""
    found: dict[str, set[int]] = defaultdict(set)
    for file in (directory / "evaluator" / "evaluations").glob("*.jsonl"):
        suite, _, step = file.stem.rpartition("-")
        assert len(file.read_text().splitlines()) == 12
        found[suite].add(int(step))
    return found


def enough(directory: Path) -> bool:
    found = evaluations(directory)
    return all(len(found[suite]) >= 2 for suite in SUITES)


async def test_an_evaluator_joins_and_leaves(tmp_path: Path) -> None:
    run = start(tmp_path, *SETTINGS)
    address = tmp_path / "nano" / "bus.json"
    with anyio.fail_after(400):
        while not address.exists():
            await anyio.sleep(0.5)
            assert run.poll() is None, output(tmp_path)
    known = json.loads(address.read_text())
    words = [sys.executable, "-m", "engine.cli", "role", "evaluator", "--connect", known["url"]]
    words += ["--directory", str(tmp_path / "evaluator")]
    evaluator = spawn(words, tmp_path, {**os.environ, "SPADE_BUS_TOKEN": known["token"]})
    try:
        with anyio.fail_after(500):
            while not enough(tmp_path):
                await anyio.sleep(0.5)
                assert run.poll() is None or enough(tmp_path), output(tmp_path)
                assert evaluator.poll() is None or enough(tmp_path), output(tmp_path)
        evaluator.send_signal(signal.SIGTERM)
        assert await ended(evaluator) == 0, output(tmp_path)
        assert await ended(run) == 0, output(tmp_path)
    finally:
        for child in (evaluator, run):
            child.kill()
    await nothing_left(tmp_path)
    messages = [message for _, message in await facts(tmp_path)]
    published = [one for one in messages if isinstance(one, EvaluationFinished)]
    versions = {suite: {one.version for one in published if one.suite == suite} for suite in SUITES}
    assert all(len(found) >= 2 for found in versions.values())
    assert len(surviving(messages)) >= STEPS
