"""The kernel's other doors: privilege, newer calls, code of one's own, foreign tables (cases 11, 12, 24)."""

from __future__ import annotations

import os

from attacks import _TABLE, Attack, call, table, tried
from sandbox import seccomp

_HERE = 0 if os.uname().machine == "x86_64" else 1

# Calls that only an attack makes; arguments are those that would do harm where they have some.
_HOSTILE = {
    "unshare": ("0x10000000",),
    "setns": ("3", "0"),
    "mount": ('b"none"', 'b"/"', 'b"tmpfs"', "0", "0"),
    "umount2": ('b"/"', "2"),
    "pivot_root": ('b"."', 'b"."'),
    "chroot": ('b"/"',),
    "fsopen": ('b"tmpfs"', "0"),
    "fsconfig": ("3", "6", "0", "0", "0"),
    "fsmount": ("3", "0", "0"),
    "fspick": ("-100", 'b"/"', "0"),
    "move_mount": ("3", 'b""', "-100", 'b"/"', "4"),
    "mount_setattr": ("-100", 'b"/"', "0", 'b"\\0" * 32', "32"),
    "bpf": ("0", 'b"\\0" * 128', "128"),
    "userfaultfd": ("1",),
    "perf_event_open": ('b"\\0" * 128', "0", "-1", "-1", "0"),
    "io_uring_setup": ("8", 'b"\\0" * 120'),
    "io_uring_enter": ("3", "1", "0", "0", "0", "0"),
    "io_uring_register": ("3", "0", "0", "0"),
    "keyctl": ("0", "-3", "1"),
    "add_key": ('b"user"', 'b"a"', 'b"b"', "1", "-3"),
    "request_key": ('b"user"', 'b"a"', "0", "-3"),
    "memfd_secret": ("0",),
    "init_module": ("0", "0", "0"),
    "finit_module": ("3", "0", "0"),
    "delete_module": ('b"x"', "0"),
    "kexec_load": ("0", "0", "0", "0"),
    "kexec_file_load": ("3", "3", "0", "0", "0"),
    "reboot": ("0xfee1dead", "672274793", "0x1234567", "0"),
    "swapon": ('b"/x"', "0"),
    "swapoff": ('b"/x"',),
    "iopl": ("3",),
    "ioperm": ("0", "1", "1"),
    "modify_ldt": ("1", 'b"\\0" * 16', "16"),
    "name_to_handle_at": ("-100", 'b"/"', 'b"\\0" * 64', 'b"\\0" * 8', "0"),
}
KILLED = {
    f"hostile {name}": Attack(11, "killed", tried(name, *arguments))
    for name, arguments in _HOSTILE.items()
    if _TABLE[name][_HERE] >= 0
}


def _skipped() -> list[int]:
    """Numbers that a program may use, and those that kill."""
    numbers = seccomp.numbers(os.uname().machine)
    rows = "|".join((seccomp._ALLOWED, seccomp._HOSTILE, seccomp._BY_ARGUMENT)).replace("\n", "|")
    names = [row.split()[0] for row in rows.split("|") if row]
    # the kernel shows no filter the calls of its own probes; to anybody else they are an illegal instruction
    probes = [335, 336] if os.uname().machine == "x86_64" else []
    return sorted([*(numbers[name] for name in names if name in numbers), *probes])


CODE = table(
    {
        (12, "denied"): {
            "executable memory": tried("mmap", "0", "4096", "5", "0x22", "-1", "0"),
            "memory made executable": f"p = {call('mmap', '0', '4096', '3', '0x22', '-1', '0')}\nreturn tried(lambda: {call('mprotect', 'p', '4096', '5')})",
            "memory made writable and executable": f"p = {call('mmap', '0', '4096', '3', '0x22', '-1', '0')}\nreturn tried(lambda: {call('mprotect', 'p', '4096', '7')})",
            "executable by key": f"p = {call('mmap', '0', '4096', '3', '0x22', '-1', '0')}\n"
            f"return tried(lambda: {call('pkey_mprotect', 'p', '4096', '7', '-1')})",
            "reading implies executing": tried("personality", "0x0400000"),
            "callback": "return tried(lambda: ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)())",
            "null page": tried("mmap", "0", "4096", "3", "0x32", "-1", "0"),
            "remap pages": tried("remap_file_pages", "0", "4096", "0", "0", "0"),
        },
        (12, "denied|crash"): {
            "code of libc made writable and back": f"""
        p = ctypes.cast(libc.getpid, ctypes.c_void_p).value & ~4095
        {call("mprotect", "p", "4096", "3")}
        ctypes.memset(p, 0xC3, 16)
        return tried(lambda: {call("mprotect", "p", "4096", "5")})
        """,
        },
        (12, "crash"): {
            "jump into data": """
        code = ctypes.create_string_buffer(b"\\xc3" * 64)
        return f"OPEN {ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(code))()}"
        """,
        },
        (12, "denied|harmless|crash"): {
            "mapping moved": f"""
        p = ctypes.cast(libc.getpid, ctypes.c_void_p).value & ~4095
        to = {call("mmap", "0", "4096", "3", "0x22", "-1", "0")}
        got = tried(lambda: {call("mremap", "p", "0", "4096", "3", "to")})
        return got if got.startswith("denied") else "harmless"
        """,
        },
    }
)
if _HERE == 0:
    CODE |= table(
        {
            (12, "killed"): {
                "x32 table": "return tried(lambda: raw((0x40000000 | 39, 0)))",
                "x32 execve": "return tried(lambda: raw((0x40000000 | 520, 0), 0, 0, 0))",
                "32 bit gate": """
            # no code of one's own is needed: the two bytes of int 0x80 lie somewhere in libc
            start = ctypes.cast(libc.getpid, ctypes.c_void_p).value & ~4095
            for page in range(start, start + (1 << 20), 4096):
                place = ctypes.string_at(page, 4096).find(b"\\xcd\\x80")
                if place >= 0:
                    return f"OPEN {ctypes.CFUNCTYPE(ctypes.c_int)(page + place)()}"
            # none is there: what remains of the attack is another call that kills
            raw((101, 0), 0, 0, 0, 0)
            """,
            },
            (12, "killed|denied"): {
                "call number -1": "return tried(lambda: raw((-1, 0)))",
            },
            (12, "denied|harmless"): {
                "number with a high half": "return tried(lambda: raw(((1 << 32) | 2, 0), b'/etc/passwd', 0))",
            },
            (12, "crash|harmless|killed"): {
                "vsyscall page": """
            ask = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p)(0xFFFFFFFFFF600400)
            return "harmless" if ask(None) else "harmless: no time"
            """,
            },
            (12, "crash|denied"): {
                "return probe": "return tried(lambda: raw((335, 0)))",
                "entry probe": "return tried(lambda: raw((336, 0)))",
            },
            (12, "denied"): {
                "segment base": tried("arch_prctl", "0x1002", "0"),
                "cpuid trap": tried("arch_prctl", "0x1012", "0"),
            },
        }
    )

NEWER = {
    name: Attack(12, "denied", f"return tried(lambda: raw(({number}, {number}), 0, 0, 0, 0, 0, 0))")
    for name, number in {
        "cachestat": 451,
        "fchmodat2": 452,
        "map_shadow_stack": 453,
        "futex_wake": 454,
        "futex_wait": 455,
        "futex_requeue": 456,
        "statmount": 457,
        "listmount": 458,
        "lsm_get_self_attr": 459,
        "lsm_set_self_attr": 460,
        "mseal": 462,
        "setxattrat": 463,
        "open_tree_attr": 467,
        "a call of the future": 999,
    }.items()
} | {
    "every number refused or gone": Attack(
        12,
        "denied",
        """
        # those that kill or that a program needs are attacks, or no attacks, of their own
        skip = SKIPPED
        seen = {}
        for number in range(1100):
            if number not in skip:
                seen[number] = tried(lambda: raw((number, number), 3, 0, 0, 0, 0, 0))
        opened = {n: got for n, got in seen.items() if got[7:] not in ("EPERM", "EACCES", "ENOSYS")}
        return f"OPEN {opened}" if opened or len(seen) < 900 else "denied:all"
        """.replace("SKIPPED", repr(_skipped())),
    ),
}

PRIVILEGE = table(
    {
        (24, "denied"): {
            "setuid": "return tried(lambda: os.setuid(0))",
            "setresuid by number": tried("setresuid", "0", "0", "0"),
            "setgroups": tried("setgroups", "1", 'b"\\0" * 4'),
            "file system uid": tried("setfsuid", "0"),
            "capabilities": tried("capset", "b'\\x22\\x05\\x08\\x20\\0\\0\\0\\0'", "b'\\xff' * 24"),
            "undo no_new_privs": tried("prctl", "38", "0", "0", "0", "0"),
            "dumpable": tried("prctl", "4", "1", "0", "0", "0"),
            "keep capabilities": tried("prctl", "8", "1", "0", "0", "0"),
            "let anybody trace": tried("prctl", "0x59616d61", "-1", "0", "0", "0"),
            "another name": tried("prctl", "15", 'b"zygote"', "0", "0", "0"),
            "speculation": tried("prctl", "53", "0", "2", "0", "0"),
            "second filter": tried("seccomp", "1", "0", "b'\\0' * 16"),
            "filter by prctl": tried("prctl", "22", "2", "b'\\0' * 16", "0", "0"),
            "filter with a listener": tried("seccomp", "1", "8", "b'\\0' * 16"),
            "new ruleset": tried("landlock_create_ruleset", "b'\\0' * 8", "8", "0"),
            "own ruleset": tried("landlock_restrict_self", "3", "0"),
            "raise limits": "import resource\nreturn tried(lambda: resource.setrlimit(resource.RLIMIT_AS, (-1, -1)))",
            "lower limits of the zygote": tried("prlimit64", call("getppid"), "7", "b'\\0' * 16", "0"),
            "setrlimit by number": tried("setrlimit", "0", "b'\\xff' * 16"),
            "nice": "return tried(lambda: os.nice(-10))",
            "priority": tried("setpriority", "0", "0", "-20"),
            "io priority": tried("ioprio_set", "1", "0", "0x2000"),
            "real time": tried("sched_setscheduler", "0", "1", "b'\\x63\\0\\0\\0'"),
            "deadline scheduling": tried("sched_setattr", "0", "b'\\x30' + b'\\0' * 47", "0"),
            "affinity": "return tried(lambda: os.sched_setaffinity(0, {0}))",
            "duplicate": "return tried(lambda: os.dup(3))",
            "duplicate onto": "return tried(lambda: os.dup2(3, 7))",
            "inheritable": "return tried(lambda: os.set_inheritable(3, True))",
            "ioctl": tried("ioctl", "3", "0x5412", "b'x'"),
            "set the clock": tried("clock_settime", "0", "b'\\0' * 16"),
            "adjust the clock": tried("adjtimex", "b'\\0' * 208"),
            "host name": tried("sethostname", 'b"x"', "1"),
            "system log": tried("syslog", "3", "0", "0"),
            "accounting": tried("acct", "0"),
            "quota": tried("quotactl", "0x800001", "0", "0", "0"),
            "hang up": tried("vhangup"),
            "restartable sequence": tried("rseq", "0", "32", "0", "0x53053053"),
            "robust list of the zygote": tried(
                "get_robust_list", call("getppid"), "b'\\0' * 8", "b'\\0' * 8"
            ),
            "memory policy": tried("mbind", "0", "4096", "2", "0", "0", "0"),
            "move the zygote's pages": tried("migrate_pages", call("getppid"), "0", "0", "0"),
            "lock memory": tried("mlockall", "3"),
            "barrier on all CPUs": tried("membarrier", "1", "0", "0"),
        },
    }
)
