"""What this host gives: cores, memory, how many instances may live, a process's state. Linux files."""

from __future__ import annotations

import os
import resource
import select
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
_INSTANCE_PAGES = 768  # what an instance copies of its zygote
_INSTANCE_MOST = 24 << 20  # all of the zygote: with large pages nearly every one of them is copied
_INSTANCE_COMMIT = 64 << 20
_RESERVED_FILES = 256
_FILES = 1 << 16
_RESERVED_PIDS = 64


def cores() -> int:
    """Number of CPUs this process may run on."""
    return len(os.sched_getaffinity(0))


def memory() -> dict[str, int]:
    """Return /proc/meminfo in bytes by name."""
    rows = (line.split() for line in _read("/proc/meminfo").splitlines())
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) > 2}


def available_share() -> float:
    """Available memory as a share of what we may use: the host's, or the tightest control group's.

    1 where the host does not tell.
    """
    known, shares = memory(), [1.0]
    if {"MemAvailable", "MemTotal"} <= known.keys():
        shares.append(known["MemAvailable"] / known["MemTotal"])
    shares += [free / limit for limit, free in _memory_groups()]
    return min(shares)


def raise_file_limit() -> None:
    """Lift our soft limit on open files towards the hard one: an instance takes two descriptors.

    Not beyond what any pool needs, because some programs close all descriptors up to the limit they inherit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def instance_bytes() -> int:
    """Memory that a small program takes beyond what it shares: 3 MiB with pages of 4 KiB."""
    return min(_INSTANCE_MOST, _INSTANCE_PAGES * resource.getpagesize())


def bounds() -> dict[str, int]:
    """How many instances each scarce thing of this host carries, by name (reference spec sandbox 6.7)."""
    known = memory()
    found = {"memory": known.get("MemAvailable", 1 << 40) // 2 // instance_bytes()}
    groups = [free // 2 // instance_bytes() for _, free in _memory_groups()]
    if groups:
        found["memory of the control group"] = min(groups)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY:
        found["open files"] = (files - _RESERVED_FILES) // 2
    if _read("/proc/sys/vm/overcommit_memory") == "2" and "CommitLimit" in known:
        found["committed memory"] = (known["CommitLimit"] - known["Committed_AS"]) // _INSTANCE_COMMIT
    found["processes"] = min((room - _RESERVED_PIDS) // 2 for room in _pid_rooms())
    return found


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since it started, 0 if it does not tell."""
    rows = (line.split() for line in _read("/proc/vmstat").splitlines())
    return next((int(row[1]) for row in rows if row[0] == "oom_kill"), 0)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the directories of the control groups we are in, each with the ones above it."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = _GROUPS / controllers
        group = top / path.lstrip("/")
        yield group
        # inside a container the path may be the host's: what is mounted at the top is ours then
        yield from (above for above in group.parents if above.is_relative_to(top))


def _memory_groups() -> list[tuple[int, int]]:
    """Return (limit, free) in bytes of each control group that limits memory; page cache counts as free."""
    found = []
    for group in _groups("memory"):
        limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
        used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
        if not limit.isdigit() or not used.isdigit() or not 0 < int(limit) < _UNLIMITED:
            continue
        rows = (line.split() for line in _read(group / "memory.stat").splitlines())
        stat = {row[0]: int(row[1]) for row in rows if len(row) == 2}
        cache = stat.get("file", stat.get("cache", 0)) - stat.get("shmem", 0)
        found.append((int(limit), max(0, int(limit) - int(used) + cache)))
    return found


def _pid_rooms() -> list[int]:
    """Free process ids of the kernel and of the control groups we are in."""
    rooms = [int(_read("/proc/sys/kernel/pid_max") or 32768)]
    for group in _groups("pids"):
        limit, current = _read(group / "pids.max"), _read(group / "pids.current")
        if limit.isdigit() and current.isdigit():
            rooms.append(int(limit) - int(current))
    return rooms


def _read(path: str | Path) -> str:
    """The text of a small file, empty where it cannot be read."""
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def pid_of(pidfd: int) -> int:
    """Return the process id behind ``pidfd`` in our namespace, 0 when it is gone or hidden."""
    for line in _read(f"/proc/self/fdinfo/{pidfd}").splitlines():
        if line.startswith("Pid:"):
            return max(0, int(line.split()[1]))
    return 0


def ended(pidfd: int) -> bool:
    """Whether the process behind ``pidfd`` has ended, reaped or not."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def sleeping(pid: int) -> bool:
    """Whether process ``pid`` waits for something other than a CPU; True when it cannot be seen."""
    text = _read(f"/proc/{pid}/stat")
    return text.rpartition(")")[2].split()[:1] not in (["R"], ["D"])


def resident(pid: int) -> int:
    """Resident bytes of process ``pid``, 0 when it cannot be seen."""
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * resource.getpagesize() if len(fields) > 1 else 0
