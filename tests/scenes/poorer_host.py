"""Start a command on a poorer host: ``python poorer_host.py FEATURE... -- COMMAND...``.

Features: ``nobody`` (uid 65534, no capability but reading files), ``no-userns``, ``no-landlock``,
``no-seccomp`` (ENOSYS), ``false-seccomp`` (says yes and does nothing), ``no-caps`` (root without any).
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

from sandbox import kernel, seccomp

_DAC_READ_SEARCH = 2
_PR_SET_SECCOMP = 22
_PR_SET_KEEPCAPS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 8, 47, 2

DENIED, MISSING = seccomp.refuse(errno.EPERM), seccomp.refuse(errno.ENOSYS)
FILTERS = {
    "no-userns": {"unshare": DENIED, "mount": DENIED, "pivot_root": DENIED, "clone3": MISSING},
    "no-landlock": {"landlock_create_ruleset": MISSING, "landlock_restrict_self": MISSING},
    "no-seccomp": {"seccomp": MISSING},
    "false-seccomp": {"seccomp": seccomp.refuse(0)},
}


def _capabilities(permitted: int) -> None:
    header = struct.pack("Ii", 0x20080522, 0)
    kernel.syscall("capset", header, struct.pack("6I", permitted, permitted, permitted, 0, 0, 0))


def _become_nobody() -> None:
    """Drop to nobody; only the right to read files stays, for interpreters in private directories."""
    kernel.prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    _capabilities(1 << _DAC_READ_SEARCH)
    kernel.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _DAC_READ_SEARCH)


def _filter(actions: dict[str, int]) -> bytes:
    """A filter that takes ``actions`` by call name and allows all the rest."""
    numbers = seccomp.numbers(kernel.MACHINE)
    insns = [(0x20, 0, 0, 0)]
    for name, action in actions.items():
        if name in numbers:
            insns += [(0x15, 0, 1, numbers[name]), (0x06, 0, 0, action)]
    return seccomp.assemble([*insns, (0x06, 0, 0, seccomp.ALLOW)])


def main() -> None:
    split = sys.argv.index("--")
    features, command = sys.argv[1:split], sys.argv[split + 1 :]
    if "no-caps" in features:
        kernel.drop_bounding()
        _capabilities(0)
    if "nobody" in features:
        _become_nobody()
    actions: dict[str, int] = {}
    for feature in features:
        actions |= FILTERS.get(feature, {})
    if actions:
        program = _filter(actions)
        kernel.no_new_privileges()
        records = ctypes.create_string_buffer(program, len(program))
        head = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(records))
        descriptor = ctypes.create_string_buffer(head, len(head))
        # by prctl, because seccomp(2) itself may be among what is taken away
        kernel.prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(descriptor))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
