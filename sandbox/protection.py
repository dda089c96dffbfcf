"""Derive the protection level from walls and canaries; refuse a host below the accepted level. Pure.

========  ==============================================================================
level 4   seccomp, limits, own uid or user namespace, empty root, no network, pid namespace
level 3   seccomp, limits and a second wall around files
level 2   seccomp and limits
level 1   files and network closed by other means than seccomp
level 0   limits only
========  ==============================================================================
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sandbox.errors import SandboxUnavailable
from sandbox.frames import ZygoteReady
from sandbox.settings import SandboxSettings

_BY_FILTER = ("open", "tcp", "udp", "fork", "kill", "shared_memory", "executable_memory", "memfd")
_BY_SECOND = ("open", "listdir", "tcp")
_NAMESPACES = ("mount_ns", "empty_root", "net_ns", "pid_ns")


class ProtectionReport(msgspec.Struct, frozen=True):
    """Protection that a pool observed: ``walls`` were installed, the canaries tried to break them.

    ``base_vm`` is the zygote's address space in bytes; ``reasons`` name what is missing for level 4;
    ``bounds`` are the live instances that each scarce resource allows, ``max_live`` the least of them.
    """

    level: int
    walls: dict[str, str]
    canary: dict[str, str]
    bare: dict[str, str]
    kernel: str
    uid_mode: str
    base_vm: int
    max_live: int
    reasons: tuple[str, ...]
    bounds: dict[str, int] = {}


def report(ready: ZygoteReady, max_live: int, bounds: Mapping[str, int] | None = None) -> ProtectionReport:
    """Return the protection report of one zygote."""
    level, reasons = judge(ready.walls, ready.canary, ready.bare)
    return ProtectionReport(
        level=level,
        walls=ready.walls,
        canary=ready.canary,
        bare=ready.bare,
        kernel=ready.kernel,
        uid_mode=ready.uid_mode,
        base_vm=ready.base_vm,
        max_live=max_live,
        reasons=tuple(reasons),
        bounds=dict(bounds or {}),
    )


def judge(
    walls: Mapping[str, str], canary: Mapping[str, str], bare: Mapping[str, str]
) -> tuple[int, list[str]]:
    """Return (level, reasons); the canaries prove the level, not what is installed."""
    if not _denied(canary, "memory"):
        return 0, [f"memory limit: {canary.get('memory', 'not tried')}"]
    reasons = [
        f"seccomp: {name} {canary.get(name, 'not tried')}" for name in _BY_FILTER if not _denied(canary, name)
    ]
    if canary.get("trace") != "killed":
        reasons.append(f"seccomp: ptrace {canary.get('trace', 'not tried')}")
    if reasons:
        closed = all(_denied(canary, name) for name in ("open", "tcp"))
        return (1 if closed else 0), reasons
    files = [
        f"second wall: {name} {bare.get(name, 'not tried')}" for name in _BY_SECOND if not _denied(bare, name)
    ]
    if not _denied(bare, "open"):
        return 2, files
    reasons = files + [
        f"{name}: {walls.get(name, 'not tried')}" for name in _NAMESPACES if walls.get(name) != "on"
    ]
    if "on" not in (walls.get("own_uid"), walls.get("user_ns")):
        reasons.append("no uid apart from the engine's")
    return (3 if reasons else 4), reasons


def require(found: ProtectionReport, settings: SandboxSettings) -> None:
    """Raise SandboxUnavailable when ``found`` is below the level that ``settings`` accept."""
    if settings.allow_unsafe or found.level >= max(1, settings.min_level):
        return
    raise SandboxUnavailable(
        f"generated programs can only be confined at level {found.level} here, "
        f"level {max(1, settings.min_level)} is required: {'; '.join(found.reasons) or 'no reason known'}. "
        "Run where seccomp is allowed, lower sandbox.min_level, or set sandbox.allow_unsafe.",
        found,
    )


_SECCOMP = (
    "Allow seccomp filters: a kernel with CONFIG_SECCOMP_FILTER on x86_64 or aarch64, and no outer filter "
    "that refuses seccomp(2)."
)
_LANDLOCK = (
    "Use Linux 5.13 or newer with Landlock switched on (`lsm=landlock,...` on the kernel's command line)."
)
_USERNS = (
    "Allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0), or run as root with CAP_SYS_ADMIN."
)
_NAMESPACE = (
    "Allow namespaces and mounts: in a container add CAP_SYS_ADMIN and a seccomp and AppArmor profile that "
    "permits unshare, mount and pivot_root, or run as another user where user namespaces are allowed."
)
_UID = "Keep CAP_SETUID and CAP_SETGID, so that each instance gets a uid of its own."


def advice(found: ProtectionReport) -> tuple[str, ...]:
    """Return the changes of the host that give a higher level; none at level 4."""
    walls = found.walls
    if found.level >= 4:
        return ()
    if found.level < 2:
        return (_SECCOMP,)
    advised = []
    if found.level == 2 and walls.get("landlock") != "on":
        advised.append(_LANDLOCK)
    if walls.get("user_ns", "n/a") not in ("on", "n/a"):
        advised.append(_USERNS)
    elif any(walls.get(name) != "on" for name in _NAMESPACES):
        advised.append(_NAMESPACE)
    if walls.get("own_uid", "n/a") not in ("on", "n/a"):
        advised.append(_UID)
    return tuple(advised)


def _denied(results: Mapping[str, str], name: str) -> bool:
    return results.get(name, "").startswith("denied")
