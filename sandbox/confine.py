"""The walls: first around the zygote, then around each child that it forks.

Each wall is tried and recorded, never inferred. A child that cannot take a wall which its zygote reported
as ``on`` ends with :data:`UNCONFINED` before any program runs.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from sandbox import kernel, seccomp

UNCONFINED = 99
NOFILE = 8
_UID_BASE = 1_000_000_000
_UID_BLOCK = 8192
_NOBODY = 65534
_getppid = os.getppid  # the zygote replaces os.getppid for programs
_NAMESPACES = {
    "net_ns": kernel.CLONE_NEWNET,
    "ipc_ns": kernel.CLONE_NEWIPC,
    "uts_ns": kernel.CLONE_NEWUTS,
    "cgroup_ns": kernel.CLONE_NEWCGROUP,
    "mount_ns": kernel.CLONE_NEWNS,
}


@dataclass
class ChildLimits:
    """Resource limits of a child. ``memory`` and ``address_space`` in bytes, ``cpu`` in seconds."""

    memory: int
    cpu: int
    nice: int
    address_space: int = 0


@dataclass
class Walls:
    """The walls that could be taken. ``state`` maps a wall to ``on``, ``failed:ERRNO`` or ``n/a``.

    ``uid_base`` is the first of the ``uid_count`` uids given to children, 0 where they share the zygote's.
    """

    state: dict[str, str] = field(default_factory=dict)
    uid_base: int = 0
    uid_count: int = 0
    uid_mode: str = "shared"
    ruleset: int = -1
    program: bytes = b""
    null: int = -1

    def stands(self, name: str) -> bool:
        return self.state.get(name) == "on"

    def attempt(self, name: str, action: Callable[[], object]) -> bool:
        """Do ``action`` and record the outcome under ``name``."""
        try:
            action()
        except (OSError, ValueError) as error:
            code = errno.errorcode.get(getattr(error, "errno", 0) or 0, type(error).__name__)
            self.state[name] = f"failed:{code}"
            return False
        self.state[name] = "on"
        return True


def enter_user_namespace(walls: Walls) -> None:
    """Become root of a user namespace with a single id, where we are not root."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        walls.state["user_ns"] = "n/a"
        return
    if walls.attempt("user_ns", lambda: kernel.unshare(kernel.CLONE_NEWUSER)):
        walls.attempt("user_ns", lambda: kernel.map_own_user(uid, gid))
        walls.uid_mode = "user namespace"


def enter_namespaces(walls: Walls) -> None:
    """Leave the host's network, IPC, names, control groups and mounts, each if possible."""
    for name, flag in _NAMESPACES.items():
        walls.attempt(name, lambda flag=flag: kernel.unshare(flag))  # type: ignore[misc]


def choose_uids(walls: Walls, index: int, seed: int) -> None:
    """Pick a block of uids for the children of zygote ``index`` of the pool ``seed``, as root.

    An own uid for each instance separates signals, ptrace and process counts of siblings.
    """
    if os.geteuid() != 0 or walls.stands("user_ns"):
        walls.state["own_uid"] = "n/a"
        return
    held = kernel.held_capabilities()
    if not held >> kernel.CAP_SETUID & held >> kernel.CAP_SETGID & 1:
        walls.state["own_uid"] = "failed:EPERM"
        return
    block = _UID_BLOCK * (seed % 4096 * 32 + index % 32)
    for first, count, mode in (
        (_UID_BASE + block, _UID_BLOCK, "own"),
        (40_000 + index * 512 % 16_384, 512, "own"),
        (_NOBODY, 1, "nobody"),
    ):
        if kernel.mappable_ids(first, count):
            walls.uid_base, walls.uid_count, walls.uid_mode = first, count, mode
            walls.state["own_uid"] = "on"
            return
    walls.state["own_uid"] = "failed:EINVAL"


def close_root(walls: Walls) -> None:
    """Swap the root for an empty one; keeps a descriptor of /dev/null."""
    walls.null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    if walls.stands("mount_ns"):
        walls.attempt("empty_root", kernel.empty_root)


def prepare_filters(walls: Walls) -> None:
    """Make the Landlock ruleset and the seccomp program once, for all children."""

    def ruleset() -> None:
        walls.ruleset = kernel.landlock_ruleset()

    walls.attempt("landlock", ruleset)
    if kernel.MACHINE not in seccomp.ARCHES:
        walls.state["seccomp"] = "failed:ENOSYS"
        return
    walls.program = seccomp.policy(kernel.MACHINE)
    walls.attempt("seccomp", kernel.require_seccomp)


def trim_privileges(walls: Walls) -> None:
    """Drop the zygote's capabilities other than those to place and kill children."""
    walls.attempt("bounding_set", kernel.drop_bounding)
    kept = [kernel.CAP_KILL, kernel.CAP_SETGID, kernel.CAP_SETUID, kernel.CAP_SYS_RESOURCE]
    held = kernel.held_capabilities()
    walls.attempt("capabilities", lambda: kernel.keep_capabilities(c for c in kept if held >> c & 1))
    kernel.undumpable()


def prefer_as_victim(walls: Walls) -> None:
    """Make the out-of-memory killer choose generated programs before the engine."""

    def write() -> None:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("700")

    walls.attempt("oom_score", write)


def confine(
    walls: Walls, limits: ChildLimits, channel: int, slot: int, parent: int, *, filtered: bool = True
) -> None:
    """Take all walls in this child; ``channel`` becomes descriptor 3. Raises OSError when one fails.

    ``filtered`` False leaves out seccomp, for the canary that proves the other walls.
    """
    for standard in (0, 1, 2):
        os.dup2(walls.null, standard)
    if channel != 3:
        os.dup2(channel, 3, inheritable=False)
    _limit_resources(limits)
    if limits.nice:
        os.nice(limits.nice)
    own = walls.stands("own_uid")
    if own:
        uid = walls.uid_base + (slot if walls.uid_mode == "own" else 0)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        kernel.limit(resource.RLIMIT_NPROC, 0)
    kernel.keep_capabilities(())
    # a change of uid clears the death signal and sets dumpable again, so these come after it
    kernel.die_with_parent(signal.SIGKILL)
    if _getppid() != parent:
        raise OSError(errno.ESRCH, "the zygote is gone")
    kernel.undumpable()
    kernel.no_new_privileges()
    if walls.stands("landlock"):
        kernel.landlock_restrict(walls.ruleset)
    kernel.close_from(4)
    kernel.limit(resource.RLIMIT_NOFILE, NOFILE)
    if filtered and walls.stands("seccomp"):
        kernel.install_filter(walls.program)


def _limit_resources(limits: ChildLimits) -> None:
    for name in ("CORE", "FSIZE", "MEMLOCK", "MSGQUEUE", "RTPRIO", "NICE"):
        if hasattr(resource, f"RLIMIT_{name}"):
            kernel.limit(getattr(resource, f"RLIMIT_{name}"), 0)
    kernel.limit(resource.RLIMIT_STACK, 8 << 20)
    # the address space that the zygote has already is not the program's
    kernel.limit(resource.RLIMIT_AS, limits.address_space + limits.memory)
    kernel.limit(resource.RLIMIT_DATA, limits.address_space + limits.memory)
    kernel.limit(resource.RLIMIT_CPU, limits.cpu, limits.cpu + 1)
