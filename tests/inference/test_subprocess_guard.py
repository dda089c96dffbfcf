"""Nothing a guarded command started survives: not its end, not its owner's, not a kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from engine.inference import subprocess_guard

SCRIPT = str(Path(subprocess_guard.__file__))
# A command with a child of its own that leaves its group, as worker processes may do.
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True)
open(sys.argv[1] + ".tmp", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(300 if len(sys.argv) < 3 else float(sys.argv[2]))
"""


def start(*command: str, grace: float = 2.0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", SCRIPT, str(grace), *command], stdin=subprocess.PIPE, start_new_session=True
    )


def family(path: Path, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", FAMILY, str(path), *arguments)


def wait_for(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def pids(path: Path) -> list[int]:
    assert wait_for(path.exists)
    return [int(word) for word in path.read_text().split()]


def gone(*ids: int) -> bool:
    return not any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in ids
    )


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "pids"
    yield path
    if path.exists():
        for pid in pids(path):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_the_exit_status_is_the_commands() -> None:
    for code in (0, 7):
        with start(sys.executable, "-c", f"raise SystemExit({code})") as process:
            assert process.wait(20) == code
    with start(sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)") as process:
        assert process.wait(20) == 128 + signal.SIGKILL


def test_closing_the_pipe_ends_the_whole_family(marker: Path) -> None:
    with start(*family(marker)) as process:
        members = pids(marker)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 128 + signal.SIGTERM
    assert wait_for(lambda: gone(*members))


def test_sigterm_ends_the_whole_family(marker: Path) -> None:
    with start(*family(marker)) as process:
        members = pids(marker)
        process.terminate()
        process.wait(20)
    assert wait_for(lambda: gone(*members))


def test_a_command_that_ends_takes_its_leftovers_with_it(marker: Path) -> None:
    with start(*family(marker, "0.1")) as process:
        members = pids(marker)
        assert process.wait(20) == 0
    assert wait_for(lambda: gone(*members))


def test_a_command_that_ignores_sigterm_is_killed() -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print(1, flush=True); time.sleep(300)"
    )
    process = subprocess.Popen(
        [sys.executable, "-I", SCRIPT, "0.2", sys.executable, "-c", stubborn],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(20) == 128 + signal.SIGKILL


def test_the_owners_kill_ends_the_family(marker: Path) -> None:
    """Kill -9 of the process that started the guardian."""
    owner_code = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-I', {SCRIPT!r}, '2.0', *sys.argv[1:]], stdin=subprocess.PIPE)\n"
        "time.sleep(300)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", owner_code, *family(marker)], start_new_session=True
    ) as owner:
        members = pids(marker)
        guard = psutil.Process(owner.pid).children()[0].pid
        owner.kill()
    assert wait_for(lambda: gone(guard, *members))


def test_the_guardians_kill_ends_the_command(marker: Path) -> None:
    with start(*family(marker)) as process:
        members = pids(marker)
        process.kill()
    assert wait_for(lambda: gone(members[0]))
