"""A classic BPF machine for seccomp programs, after the kernel's documentation; enough to judge our filter.

It knows the instructions that the filter uses and refuses all others, so that a program for a machine that is
not here is judged as it would be there.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import NamedTuple

DATA_SIZE = 64
_MAX_INSNS = 4096
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMPS = {
    0x15: lambda left, right: left == right,
    0x35: lambda left, right: left >= right,
    0x45: lambda left, right: bool(left & right),
}


class Call(NamedTuple):
    """The view that a filter has of a system call: ``struct seccomp_data``."""

    audit: int
    number: int
    arguments: tuple[int, ...] = ()

    def pack(self) -> bytes:
        padded = [argument & (1 << 64) - 1 for argument in (*self.arguments, *[0] * 6)[:6]]
        return struct.pack("<IIQ6Q", self.number & 0xFFFFFFFF, self.audit, 0, *padded)


class Refused(ValueError):
    """The kernel would not take this program."""


@cache
def verify(program: bytes) -> list[tuple[int, int, int, int]]:
    """Return the instructions of ``program``. Raises Refused as the kernel does at installation."""
    insns = list(struct.iter_unpack("=HBBI", program))
    if not 0 < len(insns) <= _MAX_INSNS:
        raise Refused(f"{len(insns)} instructions")
    for at, (code, yes, no, value) in enumerate(insns):
        if code not in (_LOAD, _AND, _RETURN, *_JUMPS):
            raise Refused(f"{at}: instruction {code:#x}")
        if code == _LOAD and (value % 4 or value >= DATA_SIZE):
            raise Refused(f"{at}: load at {value}")
        if code in _JUMPS and at + 1 + max(yes, no) >= len(insns):
            raise Refused(f"{at}: jump out of the program")
    if insns[-1][0] != _RETURN:
        raise Refused("the last instruction does not return")
    return insns


def run(program: bytes, call: Call) -> int:
    """Return the action that ``program`` takes on ``call``."""
    insns, data = verify(program), call.pack()
    accumulator = at = 0
    while True:
        code, yes, no, value = insns[at]
        at += 1
        if code == _RETURN:
            return value
        if code == _LOAD:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif code == _AND:
            accumulator &= value
        else:
            at += yes if _JUMPS[code](accumulator, value) else no
