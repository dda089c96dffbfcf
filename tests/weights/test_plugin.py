"""The leash: a process of vLLM's does not outlive its parent, even when that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

PARENT = """
import multiprocessing, os, sys, time
from engine.weights.plugin import tie_to_parent
def engine(path):
    tie_to_parent(); tie_to_parent()
    open(path + ".tmp", "w").write(str(os.getpid())); os.rename(path + ".tmp", path)
    time.sleep(300)
if __name__ == "__main__":
    multiprocessing.get_context(sys.argv[2]).Process(target=engine, args=(sys.argv[1],)).start()
    time.sleep(300)
"""


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_engine_ends_with_a_killed_parent(tmp_path: Path, method: str) -> None:
    script, marker = tmp_path / "parent.py", tmp_path / "engine"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, str(script), str(marker), method]) as parent:
        wait_for(marker.exists)
        engine = int(marker.read_text())
        parent.kill()
    try:
        wait_for(lambda: not psutil.pid_exists(engine))
    finally:
        if psutil.pid_exists(engine):
            os.kill(engine, signal.SIGKILL)
