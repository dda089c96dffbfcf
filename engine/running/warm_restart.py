"""Warm restarts of a role in a process of its own: its modules are imported once, and it runs in forks.

Importing the trainer takes most of a learner's start. So the process imports the modules and then forks; the
role works in the fork. When a signal ends the fork (kill -9, out of memory), the next fork has all modules at
once, and takes over the leases of the dead one without waiting for them to expire.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import sys
from typing import Any, NamedTuple

from engine.running.role_host import die_with_parent

FORKS = 4
"""After so many forks that a signal ended, the process ends, too: its supervisor counts one crash."""
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Life(NamedTuple):
    """The name of this fork's life, and that of the one before it, which has ended (empty: there is none)."""

    own: str = ""
    ended: str = ""


def live(role: type[Any]) -> Life:
    """Import what ``role`` needs and return in a fork; in this process where the role does not allow forks.

    The first process never returns: it forwards signals, and ends as its last fork ended.
    """
    preload = getattr(role, "preload", None)
    if preload is None or "RANK" in os.environ or not preload():
        return Life()
    gc.collect()
    gc.freeze()  # the collector would write to shared pages
    life, status, forks = Life(secrets.token_hex(6)), _in_fork(), 1
    while status is not None:
        if status >= 0 or forks == FORKS:
            sys.exit(status if status >= 0 else 128 - status)
        life = Life(secrets.token_hex(6), life.own)
        status, forks = _in_fork(), forks + 1
    return life


def _in_fork() -> int | None:
    """Return None in a fork, and in its parent the fork's exit status, negative for a signal of another's."""
    stopped = False
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    fork = os.fork()
    if fork == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
        die_with_parent(always=True)
        return None

    def forward(number: int, _frame: object) -> None:
        nonlocal stopped
        stopped = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(fork, number)

    for number in _STOPS:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)
    _, ended = os.waitpid(fork, 0)
    for number in _STOPS:
        signal.signal(number, signal.SIG_DFL)
    status = os.waitstatus_to_exitcode(ended)
    return 128 - status if stopped and status < 0 else status
