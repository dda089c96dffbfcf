"""The filter's decisions on both architectures, read by a BPF machine of the tests' own."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest
import sandbox_bpf
from hypothesis import given
from hypothesis import strategies as st

from sandbox import seccomp
from sandbox.seccomp import ALLOW, ARCHES, KILL_PROCESS, assemble, numbers, policy, refuse

MACHINES = sorted(ARCHES)
PROGRAMS = {machine: policy(machine) for machine in MACHINES}
HIGH = (1, 0xFFFFFFFF)
DENIED, MISSING = refuse(errno.EACCES), refuse(errno.ENOSYS)
# AUDIT_ARCH_* of the kernel: ELF machine, 64 bit, little endian
AUDIT = {"x86_64": 62 | 0xC0000000, "aarch64": 183 | 0xC0000000}
FOREIGN = {
    "i386": 3 | 0x40000000,
    "arm": 40 | 0x40000000,
    "riscv64": 243 | 0xC0000000,
    "ppc64": 21 | 0x80000000,
}

_words = str.split
ALLOWED = frozenset(
    _words("""
    munmap mremap brk futex gettimeofday time nanosleep getpid
    gettid getppid getuid geteuid getgid getegid rt_sigaction rt_sigprocmask rt_sigreturn sigaltstack exit
    exit_group sched_yield restart_syscall getrusage times getcpu close fstat lseek getcwd
    getrandom
    """)
)
# what each of these is asked here is granted: see the parametrised cases for what is not
BY_ARGUMENT = {
    "read": (3,),
    "write": (3,),
    "mmap": (0, 4096, 3, 0x22),
    "mprotect": (0, 4096, 3),
    "madvise": (0, 4096, 4),
    "prlimit64": (0, 7, 0, 1),
    "clock_gettime": (1,),
    "clock_getres": (7,),
    "clock_nanosleep": (1,),
    "sched_getaffinity": (0, 128),
}
HOSTILE = frozenset(
    _words("""
    ptrace process_vm_readv process_vm_writev process_madvise kcmp pidfd_getfd bpf userfaultfd
    perf_event_open io_uring_setup io_uring_enter io_uring_register add_key request_key keyctl mount umount2
    pivot_root open_tree move_mount fsopen fsconfig fsmount fspick mount_setattr unshare setns chroot
    init_module finit_module delete_module kexec_load kexec_file_load reboot swapon swapoff iopl ioperm
    modify_ldt name_to_handle_at open_by_handle_at memfd_secret vmsplice
    """)
)


def kernel_table(machine: str) -> dict[str, int]:
    """All system calls of the kernel's own headers, by name (data/syscalls.txt: name, x86_64, aarch64)."""
    column = {"x86_64": 1, "aarch64": 2}[machine]
    path = Path(__file__).parent.parent / "data" / "syscalls.txt"
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[column]) for row in rows if int(row[column]) >= 0}


TABLES = {machine: kernel_table(machine) for machine in MACHINES}


def decide(machine: str, number: int, *arguments: int, audit: int | None = None) -> int:
    """Run the filter of ``machine`` as the kernel would."""
    call = sandbox_bpf.Call(AUDIT[machine] if audit is None else audit, number, arguments)
    return sandbox_bpf.run(PROGRAMS[machine], call)


def expected(name: str) -> int:
    """Return the policy's action for ``name``, asked in the way that is granted if any is."""
    if name in ALLOWED or name in BY_ARGUMENT:
        return ALLOW
    if name in HOSTILE:
        return KILL_PROCESS
    if name == "clone3":
        return MISSING
    return DENIED


def named(machine: str, name: str, *arguments: int) -> int:
    return decide(machine, TABLES[machine][name], *arguments)


@pytest.mark.parametrize("machine", MACHINES)
class TestPolicy:
    @pytest.mark.parametrize(
        ("name", "arguments", "action"),
        [
            ("read", (0,), DENIED),
            ("write", (2,), ALLOW),
            ("write", (3,), ALLOW),
            ("write", (4,), DENIED),
            ("mmap", (0, 4096, 5, 0x22), DENIED),
            ("mmap", (0, 4096, 3, 0x21), DENIED),
            ("mmap", (0, 4096, 3, 0x23), DENIED),
            ("mprotect", (0, 4096, 7), DENIED),
            ("madvise", (0, 4096, 100), DENIED),
            ("prlimit64", (0, 7, 1, 0), DENIED),
            ("prlimit64", (0, 7, 1 << 32, 0), DENIED),
            ("prlimit64", (1, 7, 0, 1), DENIED),
            ("clock_gettime", (11,), ALLOW),
            *(
                (name, ((~1 << 3) | 2,), DENIED)
                for name in ("clock_gettime", "clock_getres", "clock_nanosleep")
            ),
            ("sched_getaffinity", (1, 128), DENIED),
            # glibc asks clone3 first and clone after ENOSYS; both end in an exception, not in a kill
            ("clone3", (), MISSING),
            ("clone", (0x3D0F00,), DENIED),
            # the filter reads low halves where the kernel does; where it takes a long, the high half counts
            *(("mmap", (0, 4096, 4 | high << 32, 0x22), DENIED) for high in HIGH),
            *(("mmap", (0, 4096, 3, 0x21 | high << 32), DENIED) for high in HIGH),
            *(("read", (0 | high << 32,), DENIED) for high in HIGH),
            *(("prlimit64", (0, 7, high << 32), DENIED) for high in HIGH),
        ],
    )
    def test_action(self, machine: str, name: str, arguments: tuple[int, ...], action: int) -> None:
        assert named(machine, name, *arguments) == action

    def test_every_call_of_the_kernel(self, machine: str) -> None:
        """The whole table, by the numbers of the kernel's headers and not by those of the filter."""
        found = {
            name: decide(machine, number, *BY_ARGUMENT.get(name, ()))
            for name, number in TABLES[machine].items()
        }
        assert found == {name: expected(name) for name in TABLES[machine]}

    def test_numbers_are_the_kernels(self, machine: str) -> None:
        assert numbers(machine).items() <= TABLES[machine].items()
        assert ARCHES[machine].audit == AUDIT[machine]
        assert ARCHES[machine].top == max(TABLES[machine].values())

    def test_numbers_without_a_call_are_forbidden(self, machine: str) -> None:
        free = set(range(ARCHES[machine].top)) - set(TABLES[machine].values())
        assert {decide(machine, number, 3, 0, 0, 0) for number in free} == {DENIED}

    def test_foreign_architectures_are_killed(self, machine: str) -> None:
        others = [*FOREIGN.values(), *(audit for name, audit in AUDIT.items() if name != machine), 0]
        for audit in others:
            for number in (0, 63, 64, 93, 231, ARCHES[machine].top + 1):
                assert decide(machine, number, 3, audit=audit) == KILL_PROCESS

    def test_the_kernel_takes_the_program(self, machine: str) -> None:
        assert len(sandbox_bpf.verify(PROGRAMS[machine])) < 400

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
    assert decide(machine, number, *arguments) in {ALLOW, KILL_PROCESS, DENIED, MISSING}


def test_aarch64_has_no_legacy_calls() -> None:
    legacy = _words(
        "open creat stat lstat access readlink getdents mkdir unlink rename rmdir fork vfork time"
    )
    assert not set(legacy) & TABLES["aarch64"].keys()
    assert not set(legacy) & numbers("aarch64").keys()
    # x86's numbers mean other calls there
    assert decide("aarch64", TABLES["x86_64"]["execve"]) == DENIED
    assert decide("aarch64", TABLES["x86_64"]["read"]) == DENIED


@pytest.mark.parametrize("machine", MACHINES)
def test_calls_of_our_own_have_numbers(machine: str) -> None:
    """What the zygote and the canary ask of the kernel by name exists on every machine."""
    root = Path(seccomp.__file__).parent
    sources = [root.joinpath(f"{name}.py").read_text() for name in ("kernel", "canary", "confine")]
    ours = {name for source in sources for name in re.findall(r'syscall\("(\w+)"', source)}
    assert {"seccomp", "pivot_root", "landlock_restrict_self", "ptrace"} <= ours
    assert ours <= numbers(machine).keys()


@pytest.mark.parametrize(
    "insns",
    [
        [],
        [(0x20, 0, 0, 0)],
        [(0x20, 0, 0, 2), (0x06, 0, 0, 0)],
        [(0x20, 0, 0, 64), (0x06, 0, 0, 0)],
        [(0x15, 1, 0, 0), (0x06, 0, 0, 0)],
        [(0x02, 0, 0, 16), (0x06, 0, 0, 0)],
    ],
)
def test_the_machine_refuses_bad_programs(insns: list[tuple[int, int, int, int]]) -> None:
    with pytest.raises(sandbox_bpf.Refused):
        sandbox_bpf.verify(assemble(insns))


def test_the_machine_sees_a_wrong_filter() -> None:
    allows_all = assemble([(0x20, 0, 0, 0), (0x06, 0, 0, ALLOW)])
    assert sandbox_bpf.run(allows_all, sandbox_bpf.Call(AUDIT["x86_64"], 101)) == ALLOW


def test_unknown_architectures_have_no_policy() -> None:
    with pytest.raises(KeyError):
        policy("m68k")
