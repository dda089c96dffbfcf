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


class Arch(NamedTuple):
    """``audit`` is AUDIT_ARCH_*, ``top`` the last number we know, ``column`` the one in the table."""

    audit: int
    top: int
    column: int


ARCHES = {"x86_64": Arch(0xC000003E, 450, 0), "aarch64": Arch(0xC00000B7, 450, 1)}

# name, x86_64, aarch64; -1 where the architecture has no such call
_TABLE = """
read 0 63|write 1 64|futex 202 98|mmap 9 222|munmap 11 215|mremap 25 216|brk 12 214|mprotect 10 226
madvise 28 233|clock_gettime 228 113|clock_getres 229 114|gettimeofday 96 169|time 201 -1|nanosleep 35 101
clock_nanosleep 230 115|getpid 39 172|gettid 186 178|getppid 110 173|getuid 102 174|geteuid 107 175
getgid 104 176|getegid 108 177|rt_sigaction 13 134|rt_sigprocmask 14 135|rt_sigreturn 15 139
sigaltstack 131 132|exit 60 93|exit_group 231 94|sched_yield 24 124|restart_syscall 219 128|getrusage 98 165
times 100 153|sched_getaffinity 204 123|getcpu 309 168|close 3 57|fstat 5 80|lseek 8 62|getcwd 79 17
getrandom 318 278|prlimit64 302 261|open 2 -1|openat 257 56|openat2 437 437|creat 85 -1|stat 4 -1|lstat 6 -1
newfstatat 262 79|statx 332 291|access 21 -1|faccessat 269 48|faccessat2 439 439|readlink 89 -1
readlinkat 267 78|getdents 78 -1|getdents64 217 61|mkdir 83 -1|mkdirat 258 34|unlink 87 -1|unlinkat 263 35
rename 82 -1|renameat 264 38|renameat2 316 276|rmdir 84 -1|chdir 80 49|socket 41 198|socketpair 53 199
connect 42 203|bind 49 200|clone3 435 435|ptrace 101 117|process_vm_readv 310 270|process_vm_writev 311 271
process_madvise 440 440|kcmp 312 272|pidfd_getfd 438 438|bpf 321 280|userfaultfd 323 282
perf_event_open 298 241|io_uring_setup 425 425|io_uring_enter 426 426|io_uring_register 427 427
add_key 248 217|request_key 249 218|keyctl 250 219|mount 165 40|umount2 166 39|pivot_root 155 41
open_tree 428 428|move_mount 429 429|fsopen 430 430|fsconfig 431 431|fsmount 432 432|fspick 433 433
mount_setattr 442 442|unshare 272 97|setns 308 268|chroot 161 51|init_module 175 105|finit_module 313 273
delete_module 176 106|kexec_load 246 104|kexec_file_load 320 294|reboot 169 142|swapon 167 224|swapoff 168 225
iopl 172 -1|ioperm 173 -1|modify_ldt 154 -1|name_to_handle_at 303 264|open_by_handle_at 304 265
memfd_secret 447 447|vmsplice 278 75|seccomp 317 277|capset 126 91|landlock_create_ruleset 444 444
landlock_restrict_self 446 446|pidfd_open 434 434|close_range 436 436|memfd_create 319 279|fork 57 -1
clone 56 220|execve 59 221|kill 62 129|prctl 157 167|setresuid 117 147|shmget 29 194|sendmsg 46 211
sendto 44 206|pidfd_send_signal 424 424|capget 125 90
"""

_words = str.split

_PLAIN = tuple(
    _words("""
munmap mremap brk futex gettimeofday time nanosleep
getpid gettid getppid getuid geteuid getgid getegid rt_sigaction rt_sigprocmask rt_sigreturn
sigaltstack exit exit_group sched_yield restart_syscall getrusage times getcpu
close fstat lseek getcwd getrandom
""")
)

_HONEST = tuple(
    _words("""
open openat openat2 creat stat lstat newfstatat statx access faccessat faccessat2 readlink
readlinkat getdents getdents64 mkdir mkdirat unlink unlinkat rename renameat renameat2 rmdir chdir
socket socketpair connect bind
""")
)

_HOSTILE = tuple(
    _words("""
ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd bpf userfaultfd
perf_event_open io_uring_setup io_uring_enter io_uring_register add_key request_key keyctl mount
umount2 pivot_root open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr unshare setns
chroot init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff iopl
ioperm modify_ldt name_to_handle_at open_by_handle_at memfd_secret vmsplice
""")
)

_BY_ARGUMENT = tuple(
    _words("""
read write mmap mprotect madvise clock_gettime clock_nanosleep clock_getres prlimit64 sched_getaffinity
""")
)

_MADVICE = (0, 1, 2, 3, 4, 8, 14, 15)
# the kernel's own clocks; negative numbers are CPU clocks of processes, of others too, and of devices
_CLOCKS = 12
_X32 = 0x40000000
_PROT_EXEC, _MAP_TYPE, _MAP_PRIVATE = 4, 3, 2

_LOAD, _JA, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x05, 0x15, 0x35, 0x45, 0x54, 0x06


def numbers(machine: str) -> dict[str, int]:
    """Return the system-call numbers of ``machine`` (``platform.machine()``) by name.

    Raises KeyError for an architecture without a table.
    """
    column = ARCHES[machine].column
    rows = (row.split() for line in _TABLE.strip().splitlines() for row in line.split("|"))
    return {row[0]: int(row[1 + column]) for row in rows if int(row[1 + column]) >= 0}


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
    """Allow when the accumulator is one of ``values``, refuse with EPERM otherwise."""
    known = list(values)
    tests = [_jump(_JEQ, value, len(known) - i, 0) for i, value in enumerate(known)]
    return [*tests, _ret(refuse(errno.EPERM)), _ret(ALLOW)]


def _conditions() -> dict[str, list[Insn]]:
    """Bodies, by call, that look at arguments; each ends in a return on every path."""
    denied, allowed = _ret(refuse(errno.EACCES)), _ret(ALLOW)
    # these could count or watch other processes: allowed about the caller itself only
    clock = [_load(_low(0)), _jump(_JGE, _CLOCKS, 0, 1), _ret(refuse(errno.EPERM)), allowed]
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
            _ret(refuse(errno.EPERM)),
            allowed,
        ],
    }


def _header(arch: Arch) -> list[Insn]:
    head = [_load(4), _jump(_JEQ, arch.audit, 1, 0), _ret(KILL_PROCESS), _load(0)]
    if arch.column == 0:
        head += [_jump(_JGE, _X32, 0, 1), _ret(KILL_PROCESS)]
    return head


def policy(machine: str) -> bytes:
    """Return the filter for an instance as raw ``sock_filter`` records (8 bytes each).

    Calls whose arguments count come first. The rest is a search tree over numbers, because at each
    installation, which means at each spawn, the kernel runs the filter for every number once.
    """
    arch, table, conditions = ARCHES[machine], numbers(machine), _conditions()
    insns = _header(arch)
    for name in _BY_ARGUMENT:
        body = conditions[name]
        insns += [_jump(_JEQ, table[name], 0, len(body)), *body]
    return assemble([*insns, *_tree(_ranges(_actions(table), arch.top))])


def _actions(table: dict[str, int]) -> dict[int, int]:
    """Return the filter action of each named call by number; all others are refused with EPERM."""
    named = dict.fromkeys(_PLAIN, ALLOW)
    named |= dict.fromkeys(_HONEST, refuse(errno.EACCES))
    named |= dict.fromkeys(_HOSTILE, KILL_PROCESS)
    # glibc falls back from clone3 to clone only on ENOSYS
    named["clone3"] = refuse(errno.ENOSYS)
    return {table[name]: action for name, action in named.items() if name in table}


def _ranges(actions: dict[int, int], top: int) -> list[tuple[int, int]]:
    """Return (first number, action) of each run of numbers with one action; beyond ``top`` is ENOSYS."""
    found: list[tuple[int, int]] = []
    for number in range(top + 1):
        action = actions.get(number, refuse(errno.EPERM))
        if not found or found[-1][1] != action:
            found.append((number, action))
    return [*found, (top + 1, refuse(errno.ENOSYS))]


def _tree(ranges: list[tuple[int, int]]) -> list[Insn]:
    """Search ``ranges`` for the accumulator by halves."""
    if len(ranges) == 1:
        return [_ret(ranges[0][1])]
    middle = len(ranges) // 2
    below, above = _tree(ranges[:middle]), _tree(ranges[middle:])
    # a conditional jump reaches no farther than 255 instructions
    if len(below) > 255:
        return [_jump(_JGE, ranges[middle][0], 0, 1), (_JA, 0, 0, len(below)), *below, *above]
    return [_jump(_JGE, ranges[middle][0], len(below), 0), *below, *above]


def assemble(insns: Iterable[Insn]) -> bytes:
    """Pack instructions (code, jump true, jump false, k)."""
    return b"".join(struct.pack("=HBBI", *insn) for insn in insns)
