"""Keeps one child command and everything it starts from outliving the process that asked for it.

Run as a script: ``python -I subprocess_guard.py GRACE_SECONDS COMMAND...`` with a pipe as standard input. The
guardian ends the command when that pipe closes (its owner ended, in whatever way) and on SIGTERM. When the
command ends, the guardian ends all processes that it left. It adopts orphaned descendants (Linux child
subreaper), so none escapes by losing its parent. The command itself is killed with the guardian (parent-death
signal). This file imports nothing of spade.

Exit status: the command's, or 128 + signal number when a signal ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_SET_PDEATHSIG = 1
_SET_CHILD_SUBREAPER = 36
_POLL_MILLISECONDS = 1000
_REAP_SECONDS = 5.0


class _Stop(Exception):
    """SIGTERM or SIGINT reached the guardian itself."""


def _raise_stop(_signal: int, _frame: object) -> None:
    raise _Stop


def main(arguments: list[str]) -> int:
    """Run the command, return its exit status."""
    grace, command = float(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    owner = os.getppid()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _raise_stop)
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
    )
    try:
        with contextlib.suppress(_Stop):
            _watch(child, owner)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        _end(child, grace)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _watch(child: subprocess.Popen[bytes], owner: int) -> None:
    """Return when the child has ended or the owner is gone."""
    ended = os.pidfd_open(child.pid)
    try:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.register(0, select.POLLIN | select.POLLHUP)
        while True:
            for descriptor, _ in poll.poll(_POLL_MILLISECONDS):
                if descriptor == ended or not os.read(0, 4096):
                    return
            if os.getppid() != owner:
                return
    finally:
        os.close(ended)


def _end(child: subprocess.Popen[bytes], grace: float) -> None:
    """Ask the child to end, then kill its group and every descendant that is left, and reap them."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    deadline = time.monotonic() + _REAP_SECONDS
    while time.monotonic() < deadline:
        for pid in _descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            time.sleep(0.01)


def _descendants() -> list[int]:
    """Return the ids of the guardian's direct children; orphans become direct children by adoption."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(word) for word in text.split()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
