"""The filter's decisions, read by an interpreter of its own, on both architectures."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox.seccomp import ALLOW, ARCHES, KILL_PROCESS, numbers, policy, refuse

MACHINES = sorted(ARCHES)
PROGRAMS = {machine: policy(machine) for machine in MACHINES}
DENIED, FORBIDDEN, MISSING = refuse(errno.EACCES), refuse(errno.EPERM), refuse(errno.ENOSYS)


def decide(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """Run the filter of ``machine`` as the kernel would."""
    padded = [a & (1 << 64) - 1 for a in (*arguments, 0, 0, 0, 0, 0, 0)[:6]]
    audit = ARCHES[machine].audit if audit is None else audit
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, audit, 0, *padded)
    insns = list(struct.iter_unpack("=HBBI", PROGRAMS[machine]))
    accumulator, at = 0, 0
    while True:
        code, yes, no, value = insns[at]
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif code == 0x54:
            accumulator &= value
        elif code == 0x06:
            return value
        else:
            taken = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}
            at += yes if taken[code] else no


def named(machine: str, name: str, *arguments: int) -> int:
    return decide(machine, numbers(machine)[name], *arguments)


@pytest.mark.parametrize("machine", MACHINES)
class TestPolicy:
    @pytest.mark.parametrize(
        ("name", "arguments", "action"),
        [
            ("read", (3,), ALLOW),
            ("read", (0,), FORBIDDEN),
            ("write", (1,), ALLOW),
            ("write", (2,), ALLOW),
            ("write", (3,), ALLOW),
            ("write", (4,), FORBIDDEN),
            ("mmap", (0, 4096, 3, 0x22), ALLOW),
            ("mmap", (0, 4096, 5, 0x22), DENIED),
            ("mmap", (0, 4096, 3, 0x21), DENIED),
            ("mmap", (0, 4096, 3, 0x23), DENIED),
            ("mprotect", (0, 4096, 3), ALLOW),
            ("mprotect", (0, 4096, 7), DENIED),
            ("madvise", (0, 4096, 4), ALLOW),
            ("madvise", (0, 4096, 100), FORBIDDEN),
            ("prlimit64", (0, 7, 0, 1), ALLOW),
            ("prlimit64", (0, 7, 1, 0), FORBIDDEN),
            ("prlimit64", (0, 7, 1 << 32, 0), FORBIDDEN),
            ("openat", (), DENIED),
            ("socket", (), DENIED),
            ("clone3", (), MISSING),
            ("clone", (), FORBIDDEN),
            ("execve", (), FORBIDDEN),
            ("kill", (), FORBIDDEN),
            ("prctl", (), FORBIDDEN),
            ("seccomp", (), FORBIDDEN),
            ("memfd_create", (), FORBIDDEN),
            ("ptrace", (), KILL_PROCESS),
            ("unshare", (), KILL_PROCESS),
            ("bpf", (), KILL_PROCESS),
            ("mount", (), KILL_PROCESS),
            ("exit_group", (), ALLOW),
            ("futex", (), ALLOW),
            ("getrandom", (), ALLOW),
        ],
    )
    def test_action(self, machine: str, name: str, arguments: tuple[int, ...], action: int) -> None:
        assert named(machine, name, *arguments) == action

    def test_foreign_architecture_is_killed(self, machine: str) -> None:
        assert decide(machine, 0, audit=0x40000003) == KILL_PROCESS

    def test_numbers_beyond_the_table_do_not_exist(self, machine: str) -> None:
        assert decide(machine, ARCHES[machine].top + 1) == MISSING

    def test_few_calls_are_allowed(self, machine: str) -> None:
        allowed = [n for n in range(ARCHES[machine].top + 1) if decide(machine, n, 3, 0, 0, 2) == ALLOW]
        assert 35 <= len(allowed) <= 44


def test_x32_calls_are_killed() -> None:
    assert decide("x86_64", 0x40000000 | 39) == KILL_PROCESS


@given(
    st.sampled_from(MACHINES),
    st.integers(0, (1 << 32) - 1),
    st.lists(st.integers(0, (1 << 64) - 1), max_size=6),
)
def test_every_call_is_decided(machine: str, number: int, arguments: list[int]) -> None:
    assert decide(machine, number, *arguments) in {ALLOW, KILL_PROCESS, DENIED, FORBIDDEN, MISSING}


def test_unknown_architectures_have_no_policy() -> None:
    with pytest.raises(KeyError):
        policy("m68k")
