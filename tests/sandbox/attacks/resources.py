"""Memory, time, recursion, exits: what a program can use up (cases 13 to 18)."""

from __future__ import annotations

from attacks import Attack, call, tried

# what touches its memory page by page may run out of time first, where pages are dear
MEMORY = {
    "list of buffers": Attack(16, "memory|timeout", "keep = []\nwhile True: keep.append(bytearray(1 << 20))"),
    "one shot": Attack(16, "denied", "return tried(lambda: bytearray(20 << 30))"),
    "text": Attack(16, "memory|timeout", 'text = "x"\nwhile True: text += text'),
    "numbers": Attack(16, "memory|timeout", "n = 3\nwhile True: n *= n"),
    "dictionary": Attack(16, "memory|timeout", "d = {}\nwhile True: d[len(d)] = [len(d)] * 4096"),
    "numpy ones": Attack(16, "denied", "import numpy\nreturn tried(lambda: numpy.ones(1 << 32))"),
    "numpy broadcast": Attack(
        16,
        "denied|memory",
        "import numpy as np\nbig = np.broadcast_to(np.int8(1), (1 << 20, 1 << 20))\nreturn tried(lambda: big.copy())",
    ),
    "numpy over its edge": Attack(
        16,
        "crash|harmless|denied",
        """
        import numpy as np
        view = np.lib.stride_tricks.as_strided(np.zeros(1), shape=(1 << 40,), strides=(4096,))
        return "harmless" if view[:1 << 24].sum() is None else "harmless"
        """,
    ),
    "shared mapping": Attack(16, "denied", tried("mmap", "0", "1 << 30", "3", "0x21", "-1", "0")),
    "validated shared mapping": Attack(16, "denied", tried("mmap", "0", "1 << 30", "3", "0x23", "-1", "0")),
    "mapping without reserve": Attack(16, "denied", tried("mmap", "0", "1 << 40", "3", "0x4022", "-1", "0")),
    "mapping that grows down": Attack(
        16,
        "denied|harmless",
        "got = " + tried("mmap", "0", "1 << 36", "3", "0x122", "-1", "0")[7:] + "\nreturn got",
    ),
    "locked mapping": Attack(16, "denied", tried("mmap", "0", "1 << 34", "3", "0x2022", "-1", "0")),
    "huge pages": Attack(16, "denied", tried("mmap", "0", "1 << 30", "3", "0x40022", "-1", "0")),
    "mmap of the language": Attack(16, "denied", "import mmap\nreturn tried(lambda: mmap.mmap(-1, 1 << 30))"),
    "memfd": Attack(16, "denied", tried("memfd_create", 'b"x"', "0")),
    "shared segment": Attack(16, "denied", tried("shmget", "0", "1 << 30", "0o1600")),
    "attach a segment": Attack(16, "denied", tried("shmat", "0", "0", "0")),
    "semaphores": Attack(16, "denied", tried("semget", "0", "32000", "0o1600")),
    "System V queue": Attack(16, "denied", tried("msgget", "0", "0o1600")),
    "heap break": Attack(
        16,
        "harmless",
        f"""
        now = {call("brk", "0")}
        return "OPEN" if {call("brk", "now + (1 << 34)")} > now + (1 << 33) else "harmless"
        """,
    ),
    "many mappings": Attack(
        16,
        "harmless|memory|timeout",
        f"""
        made = 0
        try:
            while made < 70000:
                {call("mmap", "0", "4096", "1 + 2 * (made % 2)", "0x22", "-1", "0")}
                made += 1
        except OSError:
            pass
        return "harmless"
        """,
    ),
    "eager pages": Attack(
        16,
        "harmless|memory|timeout",
        f"""
        size = 1 << 26
        try:
            while True: {call("mmap", "0", "size", "3", "0x8022", "-1", "0")}
        except OSError:
            return "harmless"
        """,
    ),
    "caught and caught again": Attack(
        16,
        "memory|harmless|timeout",
        """
        keep = []
        for _ in range(2000):
            try:
                while True: keep.append(bytearray(1 << 22))
            except MemoryError:
                pass
        return "harmless"
        """,
    ),
    "stack of C": Attack(
        16, "crash|harmless|denied", "libc.alloca = None\nreturn tried(lambda: (ctypes.c_char * (1 << 40))())"
    ),
    "zip bomb": Attack(
        16,
        "memory|timeout|error",
        """
        import zlib
        packed = zlib.compress(bytes(1 << 20), 9)
        bomb = b"".join([packed] * 4)
        keep = []
        while True: keep.append(zlib.decompress(bomb))
        """,
    ),
    "format width": Attack(16, "memory|error", 'return f"{1:{10 ** 10}}"'),
    "sequence repeat": Attack(16, "memory|timeout", "return len([0] * (1 << 40))"),
    "hidden in __slots__": Attack(
        16, "memory|timeout", "chain = None\nwhile True: chain = (chain, bytes(100_000))"
    ),
}

ENDLESS = {
    "loop": Attack(13, "timeout", "while True: pass"),
    "loop with all signals ignored": Attack(
        13,
        "timeout",
        """
        import signal
        for number in range(1, 64):
            if number not in (9, 19, 32, 33):
                signal.signal(number, signal.SIG_IGN)
        while True: pass
        """,
    ),
    "loop with all signals blocked": Attack(
        13,
        "timeout",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
    ),
    "loop that catches everything": Attack(
        13,
        "timeout",
        """
        while True:
            try:
                while True: pass
            except BaseException:
                continue
        """,
    ),
    "sleep of C": Attack(14, "timeout", "return libc.sleep(10 ** 6)"),
    "sleep without end": Attack(
        14, "timeout", f"while True: {call('nanosleep', '(ctypes.c_long * 2)(3600, 0)', '0')}"
    ),
    "yield without end": Attack(14, "timeout", f"while True: {call('sched_yield')}"),
    "futex": Attack(
        14,
        "timeout",
        f"word = ctypes.c_int(0)\nreturn {call('futex', 'ctypes.byref(word)', '0', '0', '0', '0', '0')}",
    ),
    "lock twice": Attack(
        14, "timeout", "import threading\nlock = threading.Lock()\nlock.acquire()\nreturn lock.acquire()"
    ),
    "empty queue": Attack(14, "timeout", "import queue\nreturn queue.Queue().get()"),
    "naps between work": Attack(
        14,
        "timeout",
        f"""
        while True:
            sum(range(1000))
            {call("nanosleep", "(ctypes.c_long * 2)(0, 1000000)", "0")}
        """,
    ),
    "read a request that never comes": Attack(14, "timeout", "return os.read(3, 1)"),
    "big power": Attack(15, "timeout", "return 3 ** (10 ** 8) * 3 ** (10 ** 8)"),
    "regular expression": Attack(15, "timeout", 'import re\nreturn re.match("(a+)+$", "a" * 64 + "b")'),
    "factorial": Attack(15, "timeout|memory", "import math\nreturn math.factorial(10 ** 8)"),
    "digits": Attack(15, "timeout|error", "sys.set_int_max_str_digits(0)\nreturn str(7 ** (10 ** 7))"),
    "sum of a range": Attack(15, "timeout", "return sum(range(10 ** 12))"),
    "endless iterator": Attack(15, "timeout", "import itertools\nreturn max(itertools.count())"),
    "numpy product": Attack(
        15, "timeout|memory", "import numpy as np\na = np.ones((3000, 3000))\nwhile True: a = a @ a / 3000"
    ),
    "decimal": Attack(
        15,
        "timeout|memory|error",
        "import decimal\ndecimal.getcontext().prec = 10 ** 7\nreturn decimal.Decimal(2).ln()",
    ),
    "difflib": Attack(
        15,
        "timeout",
        "import difflib\na = 'ab' * 20000\nreturn difflib.SequenceMatcher(None, a, a[::-1], False).ratio()",
    ),
    "C string search": Attack(
        15,
        "timeout|harmless",
        "for _ in range(10 ** 6): ('a' * 100_000).find('a' * 50_000 + 'b')\nreturn 'harmless'",
    ),
    "exception text that loops": Attack(
        13, "timeout", "class Slow(Exception):\n    def __str__(self):\n        while True: pass\nraise Slow"
    ),
    "comparison that loops": Attack(
        13,
        "timeout",
        "class Slow:\n    def __eq__(self, other):\n        while True: pass\nreturn Slow() in [1]",
    ),
    "hash collisions": Attack(
        13,
        "timeout",
        "class Bad:\n    __hash__ = lambda self: 1\n    __eq__ = lambda self, o: False\nd = {Bad(): i for i in range(10 ** 5)}\nreturn len(d)",
    ),
    "import hook that loops": Attack(
        13,
        "timeout",
        """
        class Finder:
            def find_spec(self, *a):
                while True: pass
        sys.meta_path.insert(0, Finder())
        import not_there
        """,
    ),
    "codec that loops": Attack(
        13,
        "timeout",
        "import codecs\ndef search(name):\n    while True: pass\ncodecs.register(search)\nreturn ''.encode('spade')",
    ),
    "finaliser that loops": Attack(
        13,
        "timeout",
        "class Slow:\n    def __del__(self):\n        while True: pass\nSlow()\nreturn 'harmless'",
    ),
    "collection that loops": Attack(
        13,
        "timeout",
        """
        import gc
        def loop(phase, info):
            while True: pass
        gc.callbacks.append(loop)
        gc.collect()
        return "harmless"
        """,
    ),
    "audit hook that loops": Attack(
        13,
        "timeout",
        "def hook(*a):\n    while True: pass\nsys.addaudithook(hook)\ncompile('1', 'x', 'eval')\nreturn 'harmless'",
    ),
}

EXITS = {
    "exit": Attack(18, "crash", "os._exit(7)"),
    "exit as if unconfined": Attack(18, "crash", "os._exit(99)"),
    "exit group": Attack(18, "crash", call("exit_group", "0")),
    "exit of the thread": Attack(18, "crash", call("exit", "0")),
    "SystemExit": Attack(18, "error", "sys.exit(3)"),
    "KeyboardInterrupt": Attack(18, "error", "raise KeyboardInterrupt"),
    "GeneratorExit": Attack(18, "error", "raise GeneratorExit"),
    "abort": Attack(18, "crash", "os.abort()"),
    "null": Attack(18, "crash", "return ctypes.string_at(0)"),
    "wild write": Attack(18, "crash", "return ctypes.memset(4096, 1, 8)"),
    "broken interpreter": Attack(18, "crash", "return ctypes.memset(id(type(None)), 255, 400) and None"),
    "faulthandler": Attack(
        18, "crash|harmless", "import faulthandler\nfaulthandler._sigsegv()\nreturn 'harmless'"
    ),
    "divide in C": Attack(
        18,
        "harmless|crash|error",
        "import numpy as np\nreturn 'harmless' if np.int64(-2 ** 63) // -1 is not None else ''",
    ),
    "handler that exits": Attack(
        18,
        "timeout|crash",
        "import signal\nsignal.signal(signal.SIGXCPU, lambda *a: os._exit(0))\nwhile True: pass",
    ),
    "atexit": Attack(18, "harmless", "import atexit\natexit.register(os._exit, 5)\nreturn 'harmless'"),
    "exit in a finaliser": Attack(
        18, "crash", "class Last:\n    __del__ = lambda self: os._exit(3)\nLast()\nreturn 'harmless'"
    ),
    "exit in a weak reference": Attack(
        18,
        "crash",
        "import weakref\nclass Last: pass\none = Last()\nref = weakref.ref(one, lambda _: os._exit(4))\ndel one\nreturn 'harmless'",
    ),
    "exit at load": Attack(18, "crash", "import os\nos._exit(5)", whole=True),
    "exit in the constructor": Attack(
        18,
        "crash",
        "import os\nclass XEnv:\n def __init__(self): os._exit(1)\n def reset(self, seed): return 'x'\n def step(self, a): pass",
        whole=True,
    ),
    "exit in reset": Attack(
        18,
        "crash",
        "import os\nclass XEnv:\n def reset(self, seed): os._exit(1)\n def step(self, a): pass",
        whole=True,
    ),
    "endless load": Attack(13, "timeout", "while True: pass", whole=True),
    "endless class": Attack(13, "timeout", "class XEnv:\n while True: pass", whole=True),
    "memory at load": Attack(
        16, "memory|timeout", "x = []\nwhile True: x.append(bytearray(1 << 22))", whole=True
    ),
    "memory error at load": Attack(16, "memory", "raise MemoryError", whole=True),
    "recursion": Attack(17, "error", "return self.attack(action)"),
    "recursion without a limit": Attack(
        17,
        "crash|memory|timeout|error",
        "sys.setrecursionlimit(10 ** 9)\nf = lambda n: f(n + 1)\nreturn f(0)",
    ),
    "recursion in C": Attack(
        17,
        "crash|error",
        "sys.setrecursionlimit(10 ** 6)\nclass Nested:\n    __repr__ = lambda self: repr(self)\nreturn repr(Nested())",
    ),
    "nested parentheses": Attack(17, "error|crash", "x = " + "(" * 5000 + ")" * 5000, whole=True),
    "nested signs": Attack(17, "error|crash|memory", "x = " + "-" * 60000 + "1", whole=True),
    "nested blocks": Attack(
        17, "error", "".join(" " * i + "if 1:\n" for i in range(120)) + " " * 120 + "x = 1", whole=True
    ),
    "nested lists by json": Attack(17, "error", "import json\nreturn json.loads('[' * 100_000)"),
    "nested pickle": Attack(
        17,
        "error|crash|harmless",
        "import pickle\nx = []\nfor _ in range(10 ** 5): x = [x]\nreturn 'harmless' if pickle.dumps(x) else ''",
    ),
    "deep destruction": Attack(
        17, "harmless|crash", "x = None\nfor _ in range(200_000): x = (x,)\ndel x\nreturn 'harmless'"
    ),
    "compiler": Attack(17, "error|crash|memory|timeout", "return eval('+'.join(['1'] * 200_000))"),
    "constants folded": Attack(
        17,
        "error|memory|timeout|crash",
        "x = ((((((1 << 9999) << 9999) << 9999) ** 99) ** 99) ** 99)",
        whole=True,
    ),
}
