"""Linux system calls that Python does not offer, by ctypes.

prctl, seccomp, Landlock, capabilities, namespaces, an empty root. Functions raise OSError; the caller
records which walls stand. The engine's process uses :func:`cpu_seconds` only, the zygote the rest.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import time
from collections.abc import Iterable

from sandbox import seccomp

MACHINE = os.uname().machine

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_RESOURCE = 5, 6, 7, 24
_LAST_CAP = 63

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 38, 47, 4
_SECCOMP_SET_MODE_FILTER, _SECCOMP_GET_ACTION_AVAIL = 1, 2
_LANDLOCK_VERSION = 1
_CAP_VERSION_3 = 0x20080522
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_REC, _MS_PRIVATE, _MNT_DETACH = 16384, 1 << 18, 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_numbers = seccomp.numbers(MACHINE) if MACHINE in seccomp.ARCHES else {}


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(name: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make system call ``name``; integers travel as longs, bytes and buffers as pointers.

    Raises OSError, with ENOSYS when this architecture has no number for it.
    """
    if name not in _numbers:
        raise OSError(38, f"{name}: no number on {MACHINE}")
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(_libc.syscall(ctypes.c_long(_numbers[name]), *converted), name)


def prctl(option: int, *arguments: int) -> int:
    """Make the system call of that name with up to four more integers."""
    padded = [ctypes.c_ulong(a) for a in (*arguments, 0, 0, 0, 0)[:4]]
    return _checked(_libc.prctl(ctypes.c_int(option), *padded), f"prctl({option})")


def die_with_parent(signal: int = 9) -> None:
    """Have the kernel send ``signal`` when the creating thread ends; a change of uid undoes it."""
    prctl(_PR_SET_PDEATHSIG, signal)


def undumpable() -> None:
    """Deny ptrace and /proc access to processes of the same uid; also stops piped core handlers."""
    prctl(_PR_SET_DUMPABLE, 0)


def no_new_privileges() -> None:
    prctl(_PR_SET_NO_NEW_PRIVS, 1)


def install_filter(program: bytes) -> None:
    """Install a BPF program of raw ``sock_filter`` records; needs no_new_privileges first."""
    records = ctypes.create_string_buffer(program, len(program))
    descriptor = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(records))
    syscall("seccomp", _SECCOMP_SET_MODE_FILTER, 0, descriptor)


def require_seccomp() -> None:
    """Raise OSError where filters cannot kill a process, or cannot be installed at all."""
    syscall("seccomp", _SECCOMP_GET_ACTION_AVAIL, 0, struct.pack("I", seccomp.KILL_PROCESS))


def landlock_ruleset() -> int:
    """Return a descriptor of a ruleset that handles every right known to us and grants none."""
    abi = syscall("landlock_create_ruleset", None, 0, _LANDLOCK_VERSION)
    bits = 13 + (abi >= 2) + (abi >= 3) + (abi >= 5)
    network = 3 if abi >= 4 else 0
    scoped = 3 if abi >= 6 else 0
    attributes = struct.pack("QQQ", (1 << bits) - 1, network, scoped)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    return syscall("landlock_create_ruleset", attributes[:size], size, 0)


def landlock_restrict(ruleset: int) -> None:
    """Put this thread under ``ruleset``; needs no_new_privileges first."""
    syscall("landlock_restrict_self", ruleset, 0)


def keep_capabilities(kept: Iterable[int]) -> None:
    """Reduce permitted and effective to ``kept``; inheritable and ambient become empty."""
    mask = sum(1 << cap for cap in kept)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    header = struct.pack("Ii", _CAP_VERSION_3, 0)
    syscall("capset", header, struct.pack("6I", low, low, 0, high, high, 0))


def held_capabilities() -> int:
    """Return the permitted set as a bit mask."""
    header = struct.pack("Ii", _CAP_VERSION_3, 0)
    data = ctypes.create_string_buffer(24)
    syscall("capget", header, data)
    fields = struct.unpack("6I", data.raw)
    return int(fields[1] | fields[4] << 32)


def drop_bounding() -> None:
    """Empty the bounding and ambient sets (needs CAP_SETPCAP for the former)."""
    prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for cap in range(_LAST_CAP):
        try:
            prctl(_PR_CAPBSET_DROP, cap)
        except OSError as error:
            if error.errno == 22:  # beyond the last capability of this kernel
                return
            raise


def unshare(flags: int) -> None:
    syscall("unshare", flags)


def map_own_user(uid: int, gid: int) -> None:
    """Inside a new user namespace: make ``uid`` and ``gid`` of the outside our 0."""
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def mappable_ids(first: int, count: int) -> bool:
    """Return true when this user namespace has all ids ``first`` .. ``first + count - 1``."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        rows = [tuple(map(int, line.split())) for line in file]
    return any(start <= first and first + count <= start + size for start, _, size in rows)


def empty_root() -> None:
    """In a new mount namespace: replace the root by an empty read-only tmpfs of one page."""
    _mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    place = next(path for path in ("/tmp", "/var", "/usr", "/dev") if os.path.isdir(path)).encode()
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    _mount(b"none", place, b"tmpfs", flags, b"size=4k,nr_inodes=2,mode=555")
    os.chdir(place)
    syscall("pivot_root", b".", b".")
    syscall("umount2", b".", _MNT_DETACH)
    os.chdir("/")
    _mount(b"none", b"/", None, flags | _MS_RDONLY | _MS_REMOUNT, None)


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int, data: bytes | None) -> None:
    syscall("mount", source, target, kind, flags, data)


def limit(which: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit, never above the hard one we were given."""
    ceiling = resource.getrlimit(which)[1]
    top = soft if hard is None else hard
    if ceiling != resource.RLIM_INFINITY:
        soft, top = min(soft, ceiling), min(top, ceiling)
    resource.setrlimit(which, (soft, top))


def close_from(first: int) -> None:
    """Close all descriptors from ``first`` on."""
    try:
        syscall("close_range", first, 0xFFFFFFFF, 0)
    except OSError:
        os.closerange(first, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 16))


def address_space() -> int:
    """Return the size of our address space in bytes."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that process ``pid`` has used. Raises OSError when it is gone."""
    return time.clock_gettime((~pid << 3) | 2)
