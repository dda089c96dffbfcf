"""The system-call allow-list as a BPF program. Pure; x86_64 and aarch64.

A program gets an errno for the calls that an honest but clumsy program may try (open, socket, fork, threads),
and is killed for those that only an attack makes (ptrace, bpf, mount, a foreign architecture).
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable
from typing import NamedTuple

KILL_PROCESS = 0x80000000
ALLOW = 0x7FFF0000
_ERRNO = 0x00050000


def refuse(number: int) -> int:
    """Return the filter action that makes a call fail with errno ``number``."""
    return _ERRNO | number


_DENIED = refuse(errno.EACCES)


class Arch(NamedTuple):
    """``audit`` is AUDIT_ARCH_*, ``top`` the last number we know, ``column`` the one in the table."""

    audit: int
    top: int
    column: int


ARCHES = {"x86_64": Arch(0xC000003E, 450, 0), "aarch64": Arch(0xC00000B7, 450, 1)}

# Rows of name, number on x86_64, number on aarch64; -1 where the architecture has no such call.
_ALLOWED = """
munmap 11 215|mremap 25 216|brk 12 214|futex 202 98|gettimeofday 96 169|time 201 -1|nanosleep 35 101
getpid 39 172|gettid 186 178|getppid 110 173|getuid 102 174|geteuid 107 175|getgid 104 176
getegid 108 177|rt_sigaction 13 134|rt_sigprocmask 14 135|rt_sigreturn 15 139|sigaltstack 131 132
exit 60 93|exit_group 231 94|sched_yield 24 124|restart_syscall 219 128|getrusage 98 165|times 100 153
getcpu 309 168|close 3 57|fstat 5 80|lseek 8 62|getcwd 79 17|getrandom 318 278
"""
# Allowed for some arguments only, see _conditions.
_BY_ARGUMENT = """
read 0 63|write 1 64|mmap 9 222|mprotect 10 226|madvise 28 233|clock_gettime 228 113
clock_nanosleep 230 115|clock_getres 229 114|prlimit64 302 261|sched_getaffinity 204 123
"""
# Only an attack makes these.
_HOSTILE = """
ptrace 101 117|process_vm_readv 310 270|process_vm_writev 311 271|process_madvise 440 440|kcmp 312 272
pidfd_getfd 438 438|bpf 321 280|userfaultfd 323 282|perf_event_open 298 241|io_uring_setup 425 425
io_uring_enter 426 426|io_uring_register 427 427|add_key 248 217|request_key 249 218|keyctl 250 219
mount 165 40|umount2 166 39|pivot_root 155 41|open_tree 428 428|move_mount 429 429|fsopen 430 430
fsconfig 431 431|fsmount 432 432|fspick 433 433|mount_setattr 442 442|unshare 272 97|setns 308 268
chroot 161 51|init_module 175 105|finit_module 313 273|delete_module 176 106|kexec_load 246 104
kexec_file_load 320 294|reboot 169 142|swapon 167 224|swapoff 168 225|iopl 172 -1|ioperm 173 -1
modify_ldt 154 -1|name_to_handle_at 303 264|open_by_handle_at 304 265|memfd_secret 447 447
vmsplice 278 75
"""
# Refused like everything else; the zygote makes them, by name.
_OWN = """
clone3 435 435|seccomp 317 277|capset 126 91|capget 125 90|landlock_create_ruleset 444 444
landlock_restrict_self 446 446|close_range 436 436|memfd_create 319 279
"""

_MADVICE = (0, 1, 2, 3, 4, 8, 14, 15)
# the kernel's own clocks; negative numbers are CPU clocks of processes, of others too, and of devices
_CLOCKS = 12
_X32 = 0x40000000
_PROT_EXEC, _MAP_TYPE, _MAP_PRIVATE = 4, 3, 2

_LOAD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06


def numbers(machine: str) -> dict[str, int]:
    """Return the system-call numbers of ``machine`` (``platform.machine()``) by name.

    Raises KeyError for an architecture without a table.
    """
    return {
        name: number
        for rows in (_ALLOWED, _BY_ARGUMENT, _HOSTILE, _OWN)
        for name, number in _numbers(rows, machine).items()
    }


def _numbers(rows: str, machine: str) -> dict[str, int]:
    column = ARCHES[machine].column
    table = (row.split() for line in rows.strip().splitlines() for row in line.split("|"))
    return {row[0]: int(row[1 + column]) for row in table if int(row[1 + column]) >= 0}


Insn = tuple[int, int, int, int]


def _load(offset: int) -> Insn:
    return (_LOAD, 0, 0, offset)


def _jump(code: int, value: int, yes: int, no: int) -> Insn:
    return (code, yes, no, value)


def _ret(action: int) -> Insn:
    return (_RET, 0, 0, action)


def _low(argument: int) -> int:
    """Offset of the low half of an argument in seccomp_data (little endian)."""
    return 16 + 8 * argument


def _any_of(values: Iterable[int]) -> list[Insn]:
    """Allow when the accumulator is one of ``values``, refuse it otherwise."""
    known = list(values)
    tests = [_jump(_JEQ, value, len(known) - i, 0) for i, value in enumerate(known)]
    return [*tests, _ret(_DENIED), _ret(ALLOW)]


def _conditions() -> dict[str, list[Insn]]:
    """Bodies, by call, that look at arguments; each ends in a return on every path."""
    denied, allowed = _ret(_DENIED), _ret(ALLOW)
    # these could count or watch other processes: allowed about the caller itself only
    clock = [_load(_low(0)), _jump(_JGE, _CLOCKS, 0, 1), _ret(_DENIED), allowed]
    return {
        **dict.fromkeys(("clock_gettime", "clock_nanosleep", "clock_getres"), clock),
        "sched_getaffinity": [_load(_low(0)), *_any_of([0])],
        "read": [_load(_low(0)), *_any_of([3])],
        "write": [_load(_low(0)), *_any_of([1, 2, 3])],
        # MAP_SHARED is refused because RLIMIT_DATA does not count it: an instance could take gigabytes
        "mmap": [
            _load(_low(2)),
            _jump(_JSET, _PROT_EXEC, 3, 0),
            _load(_low(3)),
            (_AND, 0, 0, _MAP_TYPE),
            _jump(_JEQ, _MAP_PRIVATE, 1, 0),
            denied,
            allowed,
        ],
        "mprotect": [_load(_low(2)), _jump(_JSET, _PROT_EXEC, 0, 1), denied, allowed],
        "madvise": [_load(_low(2)), *_any_of(_MADVICE)],
        "prlimit64": [
            _load(_low(0)),
            _jump(_JEQ, 0, 0, 4),
            _load(_low(2)),
            _jump(_JEQ, 0, 0, 2),
            _load(_low(2) + 4),
            _jump(_JEQ, 0, 1, 0),
            _ret(_DENIED),
            allowed,
        ],
    }


def policy(machine: str) -> bytes:
    """Return the filter for an instance as raw ``sock_filter`` records (8 bytes each)."""
    arch, conditions = ARCHES[machine], _conditions()
    insns = [_load(4), _jump(_JEQ, arch.audit, 1, 0), _ret(KILL_PROCESS), _load(0)]
    if arch.column == 0:
        insns += [_jump(_JGE, _X32, 0, 1), _ret(KILL_PROCESS)]
    for name, number in _numbers(_BY_ARGUMENT, machine).items():
        insns += [_jump(_JEQ, number, 0, len(conditions[name])), *conditions[name]]
    # glibc falls back from clone3 to clone only on ENOSYS
    actions = {numbers(machine)["clone3"]: refuse(errno.ENOSYS)}
    actions |= dict.fromkeys(_numbers(_ALLOWED, machine).values(), ALLOW)
    actions |= dict.fromkeys(_numbers(_HOSTILE, machine).values(), KILL_PROCESS)
    for number, action in actions.items():
        insns += [_jump(_JEQ, number, 0, 1), _ret(action)]
    newer = _ret(refuse(errno.ENOSYS))
    return assemble([*insns, _jump(_JGE, arch.top + 1, 0, 1), newer, _ret(_DENIED)])


def assemble(insns: Iterable[Insn]) -> bytes:
    """Pack instructions (code, jump true, jump false, k)."""
    return b"".join(struct.pack("=HBBI", *insn) for insn in insns)
