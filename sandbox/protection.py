"""Read the walls of a host from what the canaries could not do; refuse a host without a filter. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from sandbox.errors import SandboxUnavailable
from sandbox.frames import ZygoteReady

_BY_FILTER = ("memory", "open", "tcp", "udp", "fork", "kill", "shared_memory", "executable_memory", "memfd")
_BY_SECOND = ("open", "listdir", "tcp")
_NAMESPACES = ("mount_ns", "empty_root", "net_ns", "pid_ns")


class ProtectionReport(msgspec.Struct, frozen=True):
    """Protection that a pool observed: ``walls`` were installed, the canaries tried to break them.

    ``canary`` ran behind all walls, ``bare`` behind all but the filter of system calls. ``holes`` name what
    the first could do all the same: no program may run on such a host. ``missing`` names the walls behind the
    filter that this host does not give.
    """

    walls: dict[str, str]
    canary: dict[str, str]
    bare: dict[str, str]
    kernel: str
    uid_mode: str
    holes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def report(ready: ZygoteReady) -> ProtectionReport:
    """Return the protection report of one zygote: the canaries count, not what is installed."""
    canary, bare, walls = ready.canary, ready.bare, ready.walls
    holes = [f"{name} {canary.get(name, 'not tried')}" for name in _BY_FILTER if not _denied(canary, name)]
    if canary.get("trace") != "killed":
        holes.append(f"ptrace {canary.get('trace', 'not tried')}")
    missing = [
        f"second wall: {name} {bare.get(name, 'not tried')}" for name in _BY_SECOND if not _denied(bare, name)
    ]
    missing += [f"{name}: {walls.get(name, 'not tried')}" for name in _NAMESPACES if walls.get(name) != "on"]
    if "on" not in (walls.get("own_uid"), walls.get("user_ns")):
        missing.append("no uid apart from the engine's")
    return ProtectionReport(**msgspec.structs.asdict(ready), holes=tuple(holes), missing=tuple(missing))


def require(found: ProtectionReport, *, allow_unsafe: bool) -> None:
    """Raise SandboxUnavailable when the filter of system calls has holes, unless that is allowed."""
    if found.holes and not allow_unsafe:
        raise SandboxUnavailable(
            f"generated programs cannot be confined here: {'; '.join(found.holes)}. Run where seccomp is "
            "allowed, or set sandbox.allow_unsafe.",
            found,
        )


_ADVICE = {
    "seccomp": "a kernel with CONFIG_SECCOMP_FILTER on x86_64 or aarch64, and no outer filter against it",
    "landlock": "Linux 5.13 or newer with Landlock switched on (`lsm=landlock,...` on its command line)",
    "user_ns": "user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0), or root with CAP_SYS_ADMIN",
    "mount_ns": "namespaces and mounts: in a container CAP_SYS_ADMIN and profiles of seccomp and AppArmor "
    "that permit unshare, mount and pivot_root",
    "own_uid": "CAP_SETUID and CAP_SETGID, so that each instance gets a uid of its own",
}


def advice(found: ProtectionReport) -> tuple[str, ...]:
    """Return what this host would have to give for the walls that it lacks."""
    lacking = [name for name in _ADVICE if found.walls.get(name, "n/a") not in ("on", "n/a")]
    return tuple(f"{name} needs {_ADVICE[name]}." for name in lacking)


def _denied(results: Mapping[str, str], name: str) -> bool:
    return results.get(name, "").startswith("denied")
