"""A classic BPF machine for seccomp programs, after the kernel's documentation; enough to judge a filter.

It knows every instruction that seccomp takes and refuses what the kernel's verifier refuses, so that a
program for a machine that is not here is judged as it would be there.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import NamedTuple

DATA_SIZE = 64
_MAX_INSNS = 4096
_WORD = 0xFFFFFFFF
_LD, _LDX, _ST, _STX, _ALU, _JMP, _RET, _MISC = range(8)


class Call(NamedTuple):
    """What a filter is shown of a system call: ``struct seccomp_data``."""

    audit: int
    number: int
    arguments: tuple[int, ...] = ()
    pointer: int = 0

    def pack(self) -> bytes:
        padded = [argument & (1 << 64) - 1 for argument in (*self.arguments, *[0] * 6)[:6]]
        return struct.pack("<IIQ6Q", self.number & _WORD, self.audit, self.pointer, *padded)


class Refused(ValueError):
    """The kernel would not take this program."""


@cache
def verify(program: bytes) -> list[tuple[int, int, int, int]]:
    """Return the instructions of ``program``. Raises Refused as the kernel does at installation."""
    insns = list(struct.iter_unpack("=HBBI", program))
    if not 0 < len(insns) <= _MAX_INSNS:
        raise Refused(f"{len(insns)} instructions")
    for at, (code, yes, no, value) in enumerate(insns):
        kind = code & 7
        if kind == _LD and code & 0xE0 == 0x20 and (value % 4 or value >= DATA_SIZE):
            raise Refused(f"{at}: load at {value}")
        if kind == _JMP:
            furthest = value if code & 0xF0 == 0 else max(yes, no)
            if at + 1 + furthest >= len(insns):
                raise Refused(f"{at}: jump out of the program")
        if kind in (_ST, _STX) and value >= 16:
            raise Refused(f"{at}: scratch cell {value}")
    if insns[-1][0] & 7 != _RET:
        raise Refused("the last instruction does not return")
    return insns


def run(program: bytes, call: Call) -> int:
    """Return the action that ``program`` takes on ``call``."""
    insns, data = verify(program), call.pack()
    accumulator = index = at = 0
    cells = [0] * 16
    while True:
        code, yes, no, value = insns[at]
        at += 1
        operand = index if code & 8 else value
        kind = code & 7
        if kind == _RET:
            return accumulator if code & 0x18 == 0x10 else value
        if kind in (_LD, _LDX):
            loaded = _loaded(code & 0xE0, value, data, cells)
            accumulator, index = (loaded, index) if kind == _LD else (accumulator, loaded)
        elif kind in (_ST, _STX):
            cells[value] = accumulator if kind == _ST else index
        elif kind == _ALU:
            accumulator = _alu(code & 0xF0, accumulator, operand) & _WORD
        elif kind == _JMP:
            at += value if code & 0xF0 == 0 else yes if _taken(code & 0xF0, accumulator, operand) else no
        else:
            accumulator, index = (index, index) if code & 0x80 else (accumulator, accumulator)


def _loaded(mode: int, value: int, data: bytes, cells: list[int]) -> int:
    return {
        0x00: lambda: value,
        0x20: lambda: int(struct.unpack_from("<I", data, value)[0]),
        0x60: lambda: cells[value],
        0x80: lambda: DATA_SIZE,
    }[mode]()


def _alu(operation: int, left: int, right: int) -> int:
    return {
        0x00: lambda: left + right,
        0x10: lambda: left - right,
        0x20: lambda: left * right,
        0x30: lambda: left // right if right else 0,
        0x40: lambda: left | right,
        0x50: lambda: left & right,
        0x60: lambda: left << right if right < 32 else 0,
        0x70: lambda: left >> right,
        0x80: lambda: -left,
        0xA0: lambda: left ^ right,
    }[operation]()


def _taken(operation: int, left: int, right: int) -> bool:
    return {0x10: left == right, 0x20: left > right, 0x30: left >= right, 0x40: bool(left & right)}[operation]
