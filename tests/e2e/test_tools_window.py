"""A tools run, killed in the middle of a window: designs wait eight rounds, none is lost or trained twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest
from nano_runs import ROOT, ended, facts, nothing_left, output, spawn, status, surviving, trained_twice

from bus.messages import EnvironmentReady

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(3600)]
DELAY = 8
SETTINGS = (
    *("curriculum.schedule=epoch", "curriculum.environments=6", "curriculum.plays_per_round=2"),
    *("curriculum.hinted_plays=2", f"curriculum.rounds_per_window={DELAY}", f"curriculum.delay={DELAY}"),
    *("learner.designer.scope=global", "learner.designer.max_staleness=12", "learner.checkpoint_every=3"),
    *("run.steps=10", "evaluator.suites=[]", "ui.report=false"),
)


def start(directory: Path) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "engine.cli", "run", str(ROOT / "configs" / "nano-tools.toml")]
    words += [f"run.directory={directory}", "run.name=nano", "ui.live=off", *SETTINGS]
    return spawn(words, directory)


async def test_delayed_designs_outlive_a_kill_in_mid_window(tmp_path: Path) -> None:
    run = start(tmp_path)
    with anyio.fail_after(1800):
        while status(tmp_path).get("rounds", 0) < DELAY // 2:
            assert run.poll() is None, output(tmp_path)
            await anyio.sleep(1)
    os.killpg(run.pid, signal.SIGKILL)
    await ended(run)
    await nothing_left(tmp_path)
    assert await ended(start(tmp_path)) == 0, output(tmp_path)
    found = [message for _, message in await facts(tmp_path)]
    ready = [one for one in found if isinstance(one, EnvironmentReady) and one.cohort == 0]
    assert len({one.design for one in ready}) == len(ready) > 0
    batches = surviving(found)
    assert trained_twice(batches) == []
    (batch,) = (one for one in batches if one.round == DELAY)
    due = {one.sample for one in ready}
    assert due <= set(batch.trained), "every design of the window, in the batch that its delay names"
    assert not due & {sample for one in batches for sample, _ in one.dropped}
