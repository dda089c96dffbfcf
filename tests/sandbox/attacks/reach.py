"""Files, secrets, network, other processes (cases 1 to 10)."""

from __future__ import annotations

from attacks import Attack, call, tried

_PARENT = call("getppid")

FILES = {
    "open passwd": Attack(1, "denied", 'return tried(lambda: open("/etc/passwd").read(10))'),
    "open by os": Attack(1, "denied", 'return tried(lambda: os.open("/etc/passwd", os.O_RDONLY))'),
    "environment by proc": Attack(1, "denied", 'return tried(lambda: open("/proc/self/environ").read())'),
    "openat by number": Attack(1, "denied", tried("openat", "-100", 'b"/etc/passwd"', "0", "0")),
    "openat2 by number": Attack(1, "denied", tried("openat2", "-100", 'b"/etc/passwd"', 'b"\\0" * 24', "24")),
    "open with O_PATH": Attack(1, "denied", tried("openat", "-100", 'b"/"', "0o10000000", "0")),
    "open_tree": Attack(1, "killed", tried("open_tree", "-100", 'b"/"', "0")),
    "open by handle": Attack(1, "killed", tried("open_by_handle_at", "-100", 'b"\\0" * 64', "0")),
    "list the root": Attack(1, "denied", 'return tried(lambda: os.listdir("/"))'),
    "scandir of proc": Attack(1, "denied", 'return tried(lambda: list(os.scandir("/proc")))'),
    "maps of itself": Attack(1, "denied", 'return tried(lambda: open("/proc/self/maps").read())'),
    "memory of the zygote": Attack(1, "denied", 'return tried(lambda: open("/proc/1/mem", "rb").read(1))'),
    "root of the zygote": Attack(
        1, "denied", 'return tried(lambda: os.listdir(os.path.join("/proc/1", "root", "etc")))'
    ),
    "descriptor by proc": Attack(1, "denied", 'return tried(lambda: open("/proc/self/fd/3", "rb"))'),
    "stat leaks nothing": Attack(1, "denied", 'return tried(lambda: os.stat("/etc/shadow"))'),
    "statx": Attack(1, "denied", tried("statx", "-100", 'b"/etc"', "0", "0xFFF", 'b"\\0" * 256')),
    "readlink exe": Attack(1, "denied", 'return tried(lambda: os.readlink("/proc/self/exe"))'),
    "io.open_code": Attack(1, "denied", 'import io\nreturn tried(lambda: io.open_code("/etc/hostname"))'),
    "importlib loader": Attack(
        1,
        "denied|error",
        """
        import importlib.machinery
        loader = importlib.machinery.SourceFileLoader("stolen", "/etc/passwd")
        return tried(lambda: loader.get_data("/etc/passwd"))
        """,
    ),
    "dlopen": Attack(1, "denied", 'return tried(lambda: ctypes.CDLL("libsqlite3.so.0"))'),
    "C fopen": Attack(
        1,
        "denied",
        """
        libc.fopen.restype = ctypes.c_void_p
        return "OPEN" if libc.fopen(b"/etc/passwd", b"r") else "denied:NULL"
        """,
    ),
    "C getpwnam": Attack(
        1,
        "denied",
        """
        libc.getpwnam.restype = ctypes.c_void_p
        return "OPEN" if libc.getpwnam(b"root") else "denied:NULL"
        """,
    ),
    "write a temporary file": Attack(2, "denied", 'return tried(lambda: open("/tmp/spade-attack", "w"))'),
    "write here": Attack(2, "denied", 'return tried(lambda: open("attack", "w"))'),
    "mkdir": Attack(2, "denied", 'return tried(lambda: os.mkdir("/tmp/spade-attack-dir"))'),
    "symlink": Attack(2, "denied", 'return tried(lambda: os.symlink("/etc", "/tmp/spade-link"))'),
    "mkfifo": Attack(2, "denied", 'return tried(lambda: os.mkfifo("/tmp/spade-fifo"))'),
    "write shared memory file": Attack(2, "denied", 'return tried(lambda: open("/dev/shm/spade", "wb"))'),
    "tempfile": Attack(
        2, "denied|error", "import tempfile\nreturn tried(lambda: tempfile.TemporaryFile().write(b'x'))"
    ),
    "truncate": Attack(2, "denied", tried("truncate", 'b"/etc/passwd"', "0")),
    "chmod": Attack(2, "denied", 'return tried(lambda: os.chmod("/tmp", 0o777))'),
    "chdir": Attack(2, "denied", 'return tried(lambda: os.chdir("/tmp"))'),
    "fchdir": Attack(2, "denied", tried("fchdir", "3")),
    "core pattern by crash": Attack(2, "crash", "return ctypes.string_at(8)"),
    "environment of C": Attack(
        3,
        "denied",
        """
        libc.getenv.restype = ctypes.c_char_p
        found = [n for n in (b"SPADE_BUS_TOKEN", b"HOME", b"PATH", b"USER") if libc.getenv(n)]
        return f"OPEN {found}" if found or os.environ else "denied:empty"
        """,
    ),
    "environment on the stack": Attack(
        3,
        "denied",
        """
        environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
        found, place = [], 0
        while environ and environ[place]:
            found.append(environ[place])
            place += 1
        leaked = [f for f in found if b"TOKEN" in f or b"HOME" in f or b"PATH=" in f.replace(b"PYTHONPATH=", b"")]
        return f"OPEN {leaked}" if leaked else "denied:nothing"
        """,
    ),
    "objects of the heap": Attack(
        3,
        "denied",
        """
        import gc
        gc.unfreeze()
        words = [o for o in gc.get_objects() if isinstance(o, dict) for o in o.values() if isinstance(o, str)]
        found = [w for w in words if "TOKEN" in w and "=" in w]
        return f"OPEN {found}" if found else "denied:nothing"
        """,
    ),
    "command line": Attack(
        3,
        "denied|harmless",
        "found = sys.argv + sys.orig_argv\nreturn 'harmless' if len(found) < 16 else found",
    ),
}

NETWORK = {
    "tcp": Attack(4, "denied", tried("socket", "2", "1", "0")),
    "udp": Attack(4, "denied", tried("socket", "2", "2", "0")),
    "tcp over IPv6": Attack(4, "denied", tried("socket", "10", "1", "0")),
    "raw packets": Attack(4, "denied", tried("socket", "17", "3", "0x300")),
    "netlink": Attack(4, "denied", tried("socket", "16", "3", "0")),
    "vsock": Attack(4, "denied", tried("socket", "40", "1", "0")),
    "kernel crypto": Attack(4, "denied", tried("socket", "38", "5", "0")),
    "resolver": Attack(
        4, "denied|error", 'import socket\nreturn tried(lambda: socket.getaddrinfo("localhost", 80))'
    ),
    "connect the channel": Attack(
        4, "denied", tried("connect", "3", 'b"\\2\\0\\0\\x50\\x7f\\0\\0\\1" + b"\\0" * 8', "16")
    ),
    "bind the channel": Attack(4, "denied", tried("bind", "3", 'b"\\1\\0\\0name"', "7")),
    "listen on the channel": Attack(4, "denied", tried("listen", "3", "1")),
    "accept on the channel": Attack(4, "denied", tried("accept", "3", "0", "0")),
    "socketpair": Attack(5, "denied", tried("socketpair", "1", "1", "0", 'b"\\0" * 8')),
    "abstract socket": Attack(5, "denied", tried("socket", "1", "1", "0")),
    "send a descriptor": Attack(5, "denied", tried("sendmsg", "3", 'b"\\0" * 56', "0")),
    "send many": Attack(5, "denied", tried("sendmmsg", "3", 'b"\\0" * 64', "1", "0")),
    "receive a descriptor": Attack(5, "denied", tried("recvmsg", "3", 'b"\\0" * 56', "0x40")),
    "peer of the channel": Attack(
        5, "denied", tried("getsockopt", "3", "1", "17", 'b"\\0" * 16', 'b"\\4\\0\\0\\0"')
    ),
    "buffer of the channel": Attack(
        5, "denied", tried("setsockopt", "3", "1", "8", 'b"\\0\\0\\0\\x7f"', "4")
    ),
    "peek at the channel": Attack(5, "denied", tried("recvfrom", "3", 'b"\\0" * 16', "16", "0x42", "0", "0")),
    "half close": Attack(5, "denied", tried("shutdown", "3", "2")),
    "pipe": Attack(5, "denied", "return tried(os.pipe)"),
    "splice": Attack(5, "denied", tried("splice", "3", "0", "1", "0", "16", "0")),
    "vmsplice": Attack(5, "killed", tried("vmsplice", "1", "0", "0", "0")),
    "message queue": Attack(5, "denied", tried("mq_open", 'b"/spade"', "0o102", "0o600", "0")),
}

PROCESSES = {
    "system": Attack(
        6, "denied", 'return tried(lambda: os.system("true")) if not os.system("true") else "denied:x"'
    ),
    "execve": Attack(6, "denied", 'return tried(lambda: os.execv("/bin/true", ["true"]))'),
    "execveat": Attack(6, "denied", tried("execveat", "3", 'b""', "0", "0", "0x1000")),
    "posix_spawn": Attack(6, "denied", 'return tried(lambda: os.posix_spawn("/bin/true", ["true"], {}))'),
    "subprocess": Attack(
        6, "denied|error", 'import subprocess\nreturn tried(lambda: subprocess.run(["/bin/true"]))'
    ),
    "C popen": Attack(
        6,
        "denied",
        """
        libc.popen.restype = ctypes.c_void_p
        return "OPEN" if libc.popen(b"id", b"r") else "denied:NULL"
        """,
    ),
    "fork": Attack(7, "denied", "return tried(os.fork)"),
    "vfork": Attack(7, "denied", tried("vfork")),
    "clone": Attack(7, "denied", tried("clone", "17", "0", "0", "0", "0")),
    "clone of the memory": Attack(7, "denied", tried("clone", "0x4111", "0", "0", "0", "0")),
    "clone3": Attack(7, "denied", tried("clone3", 'b"\\0" * 88', "88")),
    "clone3 into a cgroup": Attack(7, "denied", tried("clone3", 'b"\\0\\0\\0\\0\\2" + b"\\0" * 83', "88")),
    "fork bomb": Attack(7, "denied", "return sorted({tried(os.fork) for _ in range(300)})[0]"),
    "forkpty": Attack(7, "denied|error", "return tried(os.forkpty)"),
    "multiprocessing": Attack(
        7, "denied|error", "import multiprocessing\nreturn tried(multiprocessing.Process(target=print).start)"
    ),
    "threads": Attack(
        8,
        "denied",
        """
        import threading
        failed = 0
        for _ in range(500):
            try:
                threading.Thread(target=print).start()
            except RuntimeError:
                failed += 1
        return "denied:RuntimeError" if failed == 500 else f"OPEN {500 - failed} threads"
        """,
    ),
    "low level thread": Attack(
        8,
        "denied",
        """
        import _thread
        try:
            _thread.start_new_thread(print, ())
        except RuntimeError:
            return "denied:RuntimeError"
        return "OPEN"
        """,
    ),
    "C thread": Attack(
        8,
        "denied",
        """
        handle = ctypes.c_ulong()
        got = libc.pthread_create(ctypes.byref(handle), None, libc.getpid, None)
        return f"denied:{got}" if got else "OPEN"
        """,
    ),
    "ptrace the zygote": Attack(9, "killed", tried("ptrace", "16", _PARENT, "0", "0")),
    "be traced": Attack(9, "killed", tried("ptrace", "0", "0", "0", "0")),
    "read the zygote": Attack(9, "killed", tried("process_vm_readv", _PARENT, "0", "0", "0", "0", "0")),
    "write the zygote": Attack(9, "killed", tried("process_vm_writev", _PARENT, "0", "0", "0", "0", "0")),
    "steal a descriptor": Attack(9, "killed", tried("pidfd_getfd", "3", "3", "0")),
    "advise another": Attack(9, "killed", tried("process_madvise", "3", "0", "0", "4", "0")),
    "compare with another": Attack(9, "killed", tried("kcmp", _PARENT, "2", "0", "0", "0")),
    "pidfd of the zygote": Attack(9, "denied", tried("pidfd_open", _PARENT, "0")),
    "release another's memory": Attack(9, "denied", tried("process_mrelease", "3", "0")),
    "kill the zygote": Attack(10, "denied", tried("kill", _PARENT, "9")),
    "kill everybody": Attack(10, "denied", tried("kill", "-1", "9")),
    "kill the group": Attack(10, "denied", tried("kill", "0", "9")),
    "kill neighbours": Attack(
        10,
        "denied",
        """
        me = raw((39, 172))
        others = [pid for pid in range(max(2, me - 40), me + 40) if pid != me]
        return sorted({tried(lambda: raw((62, 129), pid, 9)) for pid in others})[-1]
        """,
    ),
    "stop itself": Attack(10, "denied", tried("kill", call("getpid"), "19")),
    "tgkill itself": Attack(10, "denied", tried("tgkill", call("getpid"), call("gettid"), "9")),
    "tkill": Attack(10, "denied", tried("tkill", call("gettid"), "19")),
    "raise": Attack(10, "denied|harmless", "import signal\nreturn tried(lambda: signal.raise_signal(9))"),
    "queue a signal": Attack(10, "denied", tried("rt_sigqueueinfo", _PARENT, "9", 'b"\\0" * 128')),
    "signal by pidfd": Attack(10, "denied", tried("pidfd_send_signal", "3", "9", "0", "0")),
    "alarm": Attack(10, "denied", tried("alarm", "1")),
    "interval timer": Attack(10, "denied", tried("setitimer", "0", 'b"\\1" + b"\\0" * 31', "0")),
    "timer with signal": Attack(10, "denied", tried("timer_create", "0", "0", 'b"\\0" * 8')),
    "signal of the channel": Attack(10, "denied", tried("fcntl", "3", "8", _PARENT)),
    "death of the parent": Attack(10, "denied", tried("prctl", "1", "0", "0", "0", "0")),
    "wait for a sibling": Attack(10, "denied", tried("wait4", "-1", "0", "1", "0")),
    "new session": Attack(10, "denied", "return tried(os.setsid)"),
}
