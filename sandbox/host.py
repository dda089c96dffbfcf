"""What this host gives: cores, memory, how many instances may live, a process's state. Linux files."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_INSTANCE_BYTES = 3 << 20
_INSTANCE_COMMIT = 64 << 20
_RESERVED_FILES = 256
_RESERVED_PIDS = 64


def cores() -> int:
    """Number of CPUs this process may run on."""
    return len(os.sched_getaffinity(0))


def memory() -> dict[str, int]:
    """Return /proc/meminfo in bytes by name."""
    rows = (line.split() for line in _read("/proc/meminfo").splitlines())
    return {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) > 2}


def available_share() -> float:
    """Available memory as a share of the total; 1 where the host does not tell."""
    known = memory()
    return known["MemAvailable"] / known["MemTotal"] if {"MemAvailable", "MemTotal"} <= known.keys() else 1.0


def max_live() -> int:
    """How many instances this host carries: memory, descriptors, processes (reference spec sandbox 6.7)."""
    known = memory()
    bounds = [known.get("MemAvailable", 1 << 40) // 2 // _INSTANCE_BYTES]
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY:
        bounds.append((files - _RESERVED_FILES) // 2)
    if _read("/proc/sys/vm/overcommit_memory") == "2" and "CommitLimit" in known:
        bounds.append((known["CommitLimit"] - known["Committed_AS"]) // _INSTANCE_COMMIT)
    bounds += [(room - _RESERVED_PIDS) // 2 for room in _pid_rooms()]
    return max(1, min(bounds))


def _pid_rooms() -> list[int]:
    """Free process ids of the kernel and of the control groups we are in."""
    rooms = [int(_read("/proc/sys/kernel/pid_max") or 32768)]
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "pids"):
            continue
        group = Path("/sys/fs/cgroup") / controllers / path.lstrip("/")
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


def sleeping(pid: int) -> bool:
    """Whether process ``pid`` waits for something other than a CPU; True when it cannot be seen."""
    text = _read(f"/proc/{pid}/stat")
    return text.rpartition(")")[2].split()[:1] not in (["R"], ["D"])


def resident(pid: int) -> int:
    """Resident bytes of process ``pid``, 0 when it cannot be seen."""
    fields = _read(f"/proc/{pid}/statm").split()
    return int(fields[1]) * resource.getpagesize() if len(fields) > 1 else 0
