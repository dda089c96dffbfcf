"""Forbidden things that a confined child tries, so that walls are proved. Stdlib only; runs in a child.

Each attempt is harmless where it succeeds. Results are ``denied:ERRNO`` or ``open``.
"""

from __future__ import annotations

import errno
import mmap
import os
import socket
from collections.abc import Callable

from sandbox import kernel

_PTRACE_TRACEME = 0
_BARRED = (errno.EACCES, errno.EPERM, errno.ENETUNREACH, errno.ENOSYS, errno.ENOENT, errno.ENOMEM)


def run(parent: int, budget: int) -> dict[str, str]:
    """Make all attempts and return the results by name.

    ``parent`` is the zygote's pid, ``budget`` the memory limit in bytes.
    """
    attempts: dict[str, Callable[[], None]] = {
        "open": lambda: os.close(os.open("/etc/passwd", os.O_RDONLY)),
        "listdir": lambda: _nonempty(os.listdir("/")),
        "tcp": lambda: _connect(socket.SOCK_STREAM),
        "udp": lambda: _connect(socket.SOCK_DGRAM),
        "fork": _fork,
        "kill": lambda: os.kill(parent, 0),
        "shared_memory": lambda: mmap.mmap(-1, 4096, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS).close(),
        "executable_memory": lambda: mmap.mmap(
            -1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ | mmap.PROT_EXEC
        ).close(),
        "memfd": lambda: os.close(kernel.syscall("memfd_create", b"canary", 0)),
        "memory": lambda: mmap.mmap(-1, 2 * budget, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close(),
    }
    return {name: _outcome(attempt) for name, attempt in attempts.items()}


def trace() -> None:
    """Ask to be traced, for which the filter kills this process. Returns when it does not."""
    try:
        kernel.syscall("ptrace", _PTRACE_TRACEME, 0, 0, 0)
    except OSError:
        return


def _outcome(attempt: Callable[[], None]) -> str:
    try:
        attempt()
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, str(error.errno))
        return f"denied:{name}" if error.errno in _BARRED else f"open:{name}"
    except MemoryError:
        return "denied:ENOMEM"
    return "open"


def _nonempty(names: list[str]) -> None:
    if not names:
        raise FileNotFoundError(errno.ENOENT, "empty root")


def _connect(kind: socket.SocketKind) -> None:
    with socket.socket(socket.AF_INET, kind) as probe:
        probe.setblocking(False)
        probe.connect(("127.0.0.1", 9))
        probe.send(b"")


def _fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
