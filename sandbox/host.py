"""Facts about this host and its processes: cores, memory, how many instances may live. Linux files."""

from __future__ import annotations

import os
import resource
import select
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_INSTANCE_PAGES = 1024  # what an instance copies of its zygote
_INSTANCE_MOST = 24 << 20  # all of the zygote: with large pages nearly every one of them is copied
_RESERVED_FILES = 256
_FILES = 1 << 16
_RESERVED_PIDS = 64
_PF_EXITING = 4


def cores() -> int:
    """Return the number of CPUs this process may run on."""
    return len(os.sched_getaffinity(0))


def memory_shortage(share: float) -> int:
    """Return the bytes missing until ``share`` of our memory is available; negative where more is free.

    Our memory is the host's and that of every control group we are in.
    """
    return max((int(share * limit) - free for limit, free in _memory()), default=-1)


def memory_available() -> int:
    """Return the memory in bytes that is available to us; 1 TiB where the host does not tell."""
    return min((free for _, free in _memory()), default=1 << 40)


def raise_file_limit() -> None:
    """Lift our soft limit on open files towards the hard one: an instance takes two descriptors.

    Not beyond what any pool needs, because some programs close all descriptors up to the limit they inherit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def instance_bytes() -> int:
    """Return the memory of a small program beyond what it shares: 4 MiB with pages of 4 KiB."""
    return min(_INSTANCE_MOST, _INSTANCE_PAGES * resource.getpagesize())


def bounds() -> dict[str, int]:
    """Return how many instances each scarce resource of this host carries, by name."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # free process ids of the kernel and of the control groups we are in
    pids = [int(_read("/proc/sys/kernel/pid_max") or 32768)]
    pids += [limit - used for _, limit, used in _limits("pids")]
    found = {
        "memory": memory_available() // 2 // instance_bytes(),
        "processes": (min(pids) - _RESERVED_PIDS) // 2,
    }
    if files != resource.RLIM_INFINITY:
        found["open files"] = (files - _RESERVED_FILES) // 2
    return found


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory since it started, 0 if unknown."""
    return _table("/proc/vmstat").get("oom_kill", 0)


def _memory() -> Iterator[tuple[int, int]]:
    """Yield (limit, available) in bytes of the host and of the control groups that limit our memory."""
    known = _table("/proc/meminfo")
    if {"MemAvailable:", "MemTotal:"} <= known.keys():
        yield known["MemTotal:"] << 10, known["MemAvailable:"] << 10
    for group, limit, used in _limits("memory"):
        stat = _table(group / "memory.stat")
        # the kernel gives page cache back when memory is needed
        yield limit, max(0, limit - used + stat.get("file", 0) - stat.get("shmem", 0))


def _limits(controller: str) -> Iterator[tuple[Path, int, int]]:
    """Yield (directory, limit, use) of the limited control groups (version 2) that we are in."""
    _, _, path = _read("/proc/self/cgroup").rpartition("0::")
    own = _GROUPS / path.lstrip("/")
    # inside a container the path may be the host's: its own group is mounted at the top then
    for group in (one for one in (own, *own.parents) if one.is_relative_to(_GROUPS)):
        limit, used = _read(group / f"{controller}.max"), _read(group / f"{controller}.current")
        if limit.isdigit() and used.isdigit():
            yield group, int(limit), int(used)


def _table(path: str | Path) -> dict[str, int]:
    """Return the numbers of a file of ``name number`` lines."""
    rows = (line.split() for line in _read(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _read(path: str | Path) -> str:
    """Return the text of a small file, "" where it cannot be read."""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def pid_of(pidfd: int) -> int:
    """Return the process id behind ``pidfd`` in our namespace, 0 when it is gone or hidden."""
    rows = (row.partition(":") for row in _read(f"/proc/self/fdinfo/{pidfd}").splitlines())
    return next((max(0, int(value)) for name, _, value in rows if name == "Pid"), 0)


def exiting(pidfd: int, pid: int) -> bool:
    """Return true when the process ``pid`` behind ``pidfd`` has ended or is on its way out.

    The kernel closes the descriptors of a dying process before it reports the end.
    """
    if pidfd < 0:
        return False
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    flags = _stat(pid)[6:7]
    return bool(poll.poll(0)) or bool(flags and int(flags[0]) & _PF_EXITING)


def sleeping(pid: int) -> bool:
    """Return true when process ``pid`` waits for something other than a CPU, or cannot be seen."""
    return _stat(pid)[:1] not in (["R"], ["D"])


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat behind the command's name, none when it cannot be seen."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def resident(pid: int) -> int:
    """Return the resident bytes of process ``pid``, 0 when it cannot be seen."""
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * resource.getpagesize() if len(fields) > 1 else 0
