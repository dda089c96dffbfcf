"""Files, secrets, network, other processes (cases 1 to 10)."""

from __future__ import annotations

from attacks import call, table, tried

_PARENT = call("getppid")

FILES = table(
    {
        (1, "denied"): {
            "open passwd": 'return tried(lambda: open("/etc/passwd").read(10))',
            "open by os": 'return tried(lambda: os.open("/etc/passwd", os.O_RDONLY))',
            "environment by proc": 'return tried(lambda: open("/proc/self/environ").read())',
            "openat by number": tried("openat", "-100", 'b"/etc/passwd"', "0", "0"),
            "openat2 by number": tried("openat2", "-100", 'b"/etc/passwd"', 'b"\\0" * 24', "24"),
            "open with O_PATH": tried("openat", "-100", 'b"/"', "0o10000000", "0"),
            "list the root": 'return tried(lambda: os.listdir("/"))',
            "scandir of proc": 'return tried(lambda: list(os.scandir("/proc")))',
            "maps of itself": 'return tried(lambda: open("/proc/self/maps").read())',
            "memory of the zygote": 'return tried(lambda: open("/proc/1/mem", "rb").read(1))',
            "root of the zygote": 'return tried(lambda: os.listdir(os.path.join("/proc/1", "root", "etc")))',
            "descriptor by proc": 'return tried(lambda: open("/proc/self/fd/3", "rb"))',
            "stat leaks nothing": 'return tried(lambda: os.stat("/etc/shadow"))',
            "statx": tried("statx", "-100", 'b"/etc"', "0", "0xFFF", 'b"\\0" * 256'),
            "readlink exe": 'return tried(lambda: os.readlink("/proc/self/exe"))',
            "io.open_code": 'import io\nreturn tried(lambda: io.open_code("/etc/hostname"))',
            "dlopen": 'return tried(lambda: ctypes.CDLL("libsqlite3.so.0"))',
            "C fopen": """
        libc.fopen.restype = ctypes.c_void_p
        return "OPEN" if libc.fopen(b"/etc/passwd", b"r") else "denied:NULL"
        """,
            "C getpwnam": """
        libc.getpwnam.restype = ctypes.c_void_p
        return "OPEN" if libc.getpwnam(b"root") else "denied:NULL"
        """,
        },
        (1, "killed"): {
            "open_tree": tried("open_tree", "-100", 'b"/"', "0"),
            "open by handle": tried("open_by_handle_at", "-100", 'b"\\0" * 64', "0"),
        },
        (1, "denied|error"): {
            "importlib loader": """
        import importlib.machinery
        loader = importlib.machinery.SourceFileLoader("stolen", "/etc/passwd")
        return tried(lambda: loader.get_data("/etc/passwd"))
        """,
        },
        (2, "denied"): {
            "write a temporary file": 'return tried(lambda: open("/tmp/spade-attack", "w"))',
            "write here": 'return tried(lambda: open("attack", "w"))',
            "mkdir": 'return tried(lambda: os.mkdir("/tmp/spade-attack-dir"))',
            "symlink": 'return tried(lambda: os.symlink("/etc", "/tmp/spade-link"))',
            "mkfifo": 'return tried(lambda: os.mkfifo("/tmp/spade-fifo"))',
            "write shared memory file": 'return tried(lambda: open("/dev/shm/spade", "wb"))',
            "truncate": tried("truncate", 'b"/etc/passwd"', "0"),
            "chmod": 'return tried(lambda: os.chmod("/tmp", 0o777))',
            "chdir": 'return tried(lambda: os.chdir("/tmp"))',
            "fchdir": tried("fchdir", "3"),
        },
        (2, "denied|error"): {
            "tempfile": "import tempfile\nreturn tried(lambda: tempfile.TemporaryFile().write(b'x'))",
        },
        (2, "crash"): {
            "core pattern by crash": "return ctypes.string_at(8)",
        },
        (3, "denied"): {
            "environment of C": """
        libc.getenv.restype = ctypes.c_char_p
        found = [n for n in (b"SPADE_BUS_TOKEN", b"HOME", b"PATH", b"USER") if libc.getenv(n)]
        return f"OPEN {found}" if found or os.environ else "denied:empty"
        """,
            "environment on the stack": """
        environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
        found, place = [], 0
        while environ and environ[place]:
            found.append(environ[place])
            place += 1
        leaked = [f for f in found if b"TOKEN" in f or b"HOME" in f or b"PATH=" in f.replace(b"PYTHONPATH=", b"")]
        return f"OPEN {leaked}" if leaked else "denied:nothing"
        """,
            "objects of the heap": """
        import gc
        gc.unfreeze()
        words = [o for o in gc.get_objects() if isinstance(o, dict) for o in o.values() if isinstance(o, str)]
        found = [w for w in words if "TOKEN" in w and "=" in w]
        return f"OPEN {found}" if found else "denied:nothing"
        """,
        },
        (3, "denied|harmless"): {
            "command line": "found = sys.argv + sys.orig_argv\nreturn 'harmless' if len(found) < 16 else found",
        },
    }
)

NETWORK = table(
    {
        (4, "denied"): {
            "tcp": tried("socket", "2", "1", "0"),
            "udp": tried("socket", "2", "2", "0"),
            "tcp over IPv6": tried("socket", "10", "1", "0"),
            "raw packets": tried("socket", "17", "3", "0x300"),
            "netlink": tried("socket", "16", "3", "0"),
            "vsock": tried("socket", "40", "1", "0"),
            "kernel crypto": tried("socket", "38", "5", "0"),
            "connect the channel": tried(
                "connect", "3", 'b"\\2\\0\\0\\x50\\x7f\\0\\0\\1" + b"\\0" * 8', "16"
            ),
            "bind the channel": tried("bind", "3", 'b"\\1\\0\\0name"', "7"),
            "listen on the channel": tried("listen", "3", "1"),
            "accept on the channel": tried("accept", "3", "0", "0"),
        },
        (4, "denied|error"): {
            "resolver": 'import socket\nreturn tried(lambda: socket.getaddrinfo("localhost", 80))',
        },
        (5, "denied"): {
            "socketpair": tried("socketpair", "1", "1", "0", 'b"\\0" * 8'),
            "abstract socket": tried("socket", "1", "1", "0"),
            "send a descriptor": tried("sendmsg", "3", 'b"\\0" * 56', "0"),
            "send many": tried("sendmmsg", "3", 'b"\\0" * 64', "1", "0"),
            "receive a descriptor": tried("recvmsg", "3", 'b"\\0" * 56', "0x40"),
            "peer of the channel": tried("getsockopt", "3", "1", "17", 'b"\\0" * 16', 'b"\\4\\0\\0\\0"'),
            "buffer of the channel": tried("setsockopt", "3", "1", "8", 'b"\\0\\0\\0\\x7f"', "4"),
            "peek at the channel": tried("recvfrom", "3", 'b"\\0" * 16', "16", "0x42", "0", "0"),
            "half close": tried("shutdown", "3", "2"),
            "pipe": "return tried(os.pipe)",
            "splice": tried("splice", "3", "0", "1", "0", "16", "0"),
            "message queue": tried("mq_open", 'b"/spade"', "0o102", "0o600", "0"),
        },
        (5, "killed"): {
            "vmsplice": tried("vmsplice", "1", "0", "0", "0"),
        },
    }
)

PROCESSES = table(
    {
        (6, "denied"): {
            "system": 'return tried(lambda: os.system("true")) if not os.system("true") else "denied:x"',
            "execve": 'return tried(lambda: os.execv("/bin/true", ["true"]))',
            "execveat": tried("execveat", "3", 'b""', "0", "0", "0x1000"),
            "posix_spawn": 'return tried(lambda: os.posix_spawn("/bin/true", ["true"], {}))',
            "C popen": """
        libc.popen.restype = ctypes.c_void_p
        return "OPEN" if libc.popen(b"id", b"r") else "denied:NULL"
        """,
        },
        (6, "denied|error"): {
            "subprocess": 'import subprocess\nreturn tried(lambda: subprocess.run(["/bin/true"]))',
        },
        (7, "denied"): {
            "fork": "return tried(os.fork)",
            "vfork": tried("vfork"),
            "clone": tried("clone", "17", "0", "0", "0", "0"),
            "clone of the memory": tried("clone", "0x4111", "0", "0", "0", "0"),
            "clone3": tried("clone3", 'b"\\0" * 88', "88"),
            "clone3 into a cgroup": tried("clone3", 'b"\\0\\0\\0\\0\\2" + b"\\0" * 83', "88"),
            "fork bomb": "return sorted({tried(os.fork) for _ in range(300)})[0]",
        },
        (7, "denied|error"): {
            "forkpty": "return tried(os.forkpty)",
            "multiprocessing": "import multiprocessing\nreturn tried(multiprocessing.Process(target=print).start)",
        },
        (8, "denied"): {
            "threads": """
        import threading
        failed = 0
        for _ in range(500):
            try:
                threading.Thread(target=print).start()
            except RuntimeError:
                failed += 1
        return "denied:RuntimeError" if failed == 500 else f"OPEN {500 - failed} threads"
        """,
            "low level thread": """
        import _thread
        try:
            _thread.start_new_thread(print, ())
        except RuntimeError:
            return "denied:RuntimeError"
        return "OPEN"
        """,
            "C thread": """
        handle = ctypes.c_ulong()
        got = libc.pthread_create(ctypes.byref(handle), None, libc.getpid, None)
        return f"denied:{got}" if got else "OPEN"
        """,
        },
        (9, "killed"): {
            "ptrace the zygote": tried("ptrace", "16", _PARENT, "0", "0"),
            "be traced": tried("ptrace", "0", "0", "0", "0"),
            "read the zygote": tried("process_vm_readv", _PARENT, "0", "0", "0", "0", "0"),
            "write the zygote": tried("process_vm_writev", _PARENT, "0", "0", "0", "0", "0"),
            "steal a descriptor": tried("pidfd_getfd", "3", "3", "0"),
            "advise another": tried("process_madvise", "3", "0", "0", "4", "0"),
            "compare with another": tried("kcmp", _PARENT, "2", "0", "0", "0"),
        },
        (9, "denied"): {
            "pidfd of the zygote": tried("pidfd_open", _PARENT, "0"),
            "release another's memory": tried("process_mrelease", "3", "0"),
        },
        (10, "denied"): {
            "kill the zygote": tried("kill", _PARENT, "9"),
            "kill everybody": tried("kill", "-1", "9"),
            "kill the group": tried("kill", "0", "9"),
            "kill neighbours": """
        me = raw((39, 172))
        others = [pid for pid in range(max(2, me - 40), me + 40) if pid != me]
        return sorted({tried(lambda: raw((62, 129), pid, 9)) for pid in others})[-1]
        """,
            "stop itself": tried("kill", call("getpid"), "19"),
            "tgkill itself": tried("tgkill", call("getpid"), call("gettid"), "9"),
            "tkill": tried("tkill", call("gettid"), "19"),
            "queue a signal": tried("rt_sigqueueinfo", _PARENT, "9", 'b"\\0" * 128'),
            "signal by pidfd": tried("pidfd_send_signal", "3", "9", "0", "0"),
            "alarm": tried("alarm", "1"),
            "interval timer": tried("setitimer", "0", 'b"\\1" + b"\\0" * 31', "0"),
            "timer with signal": tried("timer_create", "0", "0", 'b"\\0" * 8'),
            "signal of the channel": tried("fcntl", "3", "8", _PARENT),
            "death of the parent": tried("prctl", "1", "0", "0", "0", "0"),
            "wait for a sibling": tried("wait4", "-1", "0", "1", "0"),
            "new session": "return tried(os.setsid)",
        },
        (10, "denied|harmless"): {
            "raise": "import signal\nreturn tried(lambda: signal.raise_signal(9))",
        },
    }
)
