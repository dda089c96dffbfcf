"""Programs that attack: each with its case of docs/sandbox.md and what must come of it.

``expect`` names outcomes, of which one must come:

==========  =================================================================
denied      every attempt got an errno or an exception; the program saw no more
harmless    the attempt went through and touched nothing but its own process
error       the program raised, and its instance goes on
killed      the kernel ended it for a system call that only attacks make
timeout     it was killed at a deadline
memory      it ran into its memory limit
crash       its process ended
protocol    it sent what is no reply, and was ended
==========  =================================================================

A body is the inside of ``attack(self, action)`` in the frame of :func:`programs.attack`; a ``whole``
program stands as it is. Bodies return ``denied:...`` or ``harmless...``; the word OPEN in what they return is an
escape.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from scenes import programs

_MISSING = 100_000


WHOLE = 0


class Attack(NamedTuple):
    """``turns`` steps are taken unless the instance ends before."""

    case: int
    expect: str
    body: str
    turns: int = 1
    whole: bool = False

    @property
    def source(self) -> str:
        return self.body if self.whole else programs.attack(self.body)


def table(groups: dict[tuple[int, ...] | tuple[int | str, ...], dict[str, str]]) -> dict[str, Attack]:
    """Attacks by name, of bodies by case, outcome and, where it is not one, the number of turns or WHOLE."""
    return {
        name: Attack(case, expect, body, turns or 1, whole=turns == WHOLE)
        for (case, expect, turns), bodies in (((*key, 1)[:3], bodies) for key, bodies in groups.items())
        for name, body in bodies.items()
    }


def syscalls() -> dict[str, tuple[int, int]]:
    """Numbers of all system calls, for x86_64 and aarch64, by name."""
    path = Path(__file__).parents[2] / "data" / "syscalls.txt"
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: (int(row[1]), int(row[2])) for row in rows}


_TABLE = syscalls()


def number(name: str) -> str:
    """The pair of numbers of a call as Python text; where a machine has no such call, one far beyond all."""
    return repr(tuple(found if found >= 0 else _MISSING for found in _TABLE[name]))


def call(name: str, *arguments: str) -> str:
    """Text that makes a system call by its number."""
    return f"raw({', '.join((number(name), *arguments))})"


def tried(name: str, *arguments: str) -> str:
    """Text of a body that makes one system call and tells what came of it."""
    return f"return tried(lambda: {call(name, *arguments)})"


def every() -> dict[str, Attack]:
    """All attacks by name."""
    from attacks import inside, kernel_calls, reach, replies, resources

    found: dict[str, Attack] = {}
    for group in (
        *(reach.FILES, reach.NETWORK, reach.PROCESSES),
        *(kernel_calls.KILLED, kernel_calls.CODE, kernel_calls.NEWER, kernel_calls.PRIVILEGE),
        *(resources.MEMORY, resources.ENDLESS, resources.EXITS),
        *(replies.FLOODS, replies.FORGERIES, replies.VALUES),
        *(inside.SABOTAGE, inside.NEIGHBOURS),
    ):
        assert not found.keys() & group.keys(), sorted(found.keys() & group.keys())
        found |= group
    return found
