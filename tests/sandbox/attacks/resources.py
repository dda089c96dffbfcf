"""Memory, time, recursion, exits: what a program can use up (cases 13 to 18)."""

from __future__ import annotations

from attacks import WHOLE, call, table, tried

# what touches its memory page by page may run out of time first, where pages are dear
MEMORY = table(
    {
        (16, "memory|timeout"): {
            "list of buffers": "keep = []\nwhile True: keep.append(bytearray(1 << 20))",
            "text": 'text = "x"\nwhile True: text += text',
            "numbers": "n = 3\nwhile True: n *= n",
            "dictionary": "d = {}\nwhile True: d[len(d)] = [len(d)] * 4096",
            "sequence repeat": "return len([0] * (1 << 40))",
            "hidden in __slots__": "chain = None\nwhile True: chain = (chain, bytes(100_000))",
        },
        (16, "denied"): {
            "one shot": "return tried(lambda: bytearray(20 << 30))",
            "numpy ones": "import numpy\nreturn tried(lambda: numpy.ones(1 << 32))",
            "shared mapping": tried("mmap", "0", "1 << 30", "3", "0x21", "-1", "0"),
            "validated shared mapping": tried("mmap", "0", "1 << 30", "3", "0x23", "-1", "0"),
            "mapping without reserve": tried("mmap", "0", "1 << 40", "3", "0x4022", "-1", "0"),
            "locked mapping": tried("mmap", "0", "1 << 34", "3", "0x2022", "-1", "0"),
            "huge pages": tried("mmap", "0", "1 << 30", "3", "0x40022", "-1", "0"),
            "mmap of the language": "import mmap\nreturn tried(lambda: mmap.mmap(-1, 1 << 30))",
            "memfd": tried("memfd_create", 'b"x"', "0"),
            "shared segment": tried("shmget", "0", "1 << 30", "0o1600"),
            "attach a segment": tried("shmat", "0", "0", "0"),
            "semaphores": tried("semget", "0", "32000", "0o1600"),
            "System V queue": tried("msgget", "0", "0o1600"),
        },
        (16, "denied|memory"): {
            "numpy broadcast": "import numpy as np\nbig = np.broadcast_to(np.int8(1), (1 << 20, 1 << 20))\nreturn tried(lambda: big.copy())",
        },
        (16, "crash|harmless|denied"): {
            "numpy over its edge": """
        import numpy as np
        view = np.lib.stride_tricks.as_strided(np.zeros(1), shape=(1 << 40,), strides=(4096,))
        return "harmless" if view[:1 << 24].sum() is None else "harmless"
        """,
            "stack of C": "libc.alloca = None\nreturn tried(lambda: (ctypes.c_char * (1 << 40))())",
        },
        (16, "denied|harmless"): {
            "mapping that grows down": "got = "
            + tried("mmap", "0", "1 << 36", "3", "0x122", "-1", "0")[7:]
            + "\nreturn got",
        },
        (16, "harmless"): {
            "heap break": f"""
        now = {call("brk", "0")}
        return "OPEN" if {call("brk", "now + (1 << 34)")} > now + (1 << 33) else "harmless"
        """,
        },
        (16, "harmless|memory|timeout"): {
            "many mappings": f"""
        made = 0
        try:
            while made < 70000:
                {call("mmap", "0", "4096", "1 + 2 * (made % 2)", "0x22", "-1", "0")}
                made += 1
        except OSError:
            pass
        return "harmless"
        """,
            "eager pages": f"""
        size = 1 << 26
        try:
            while True: {call("mmap", "0", "size", "3", "0x8022", "-1", "0")}
        except OSError:
            return "harmless"
        """,
        },
        (16, "memory|harmless|timeout"): {
            "caught and caught again": """
        keep = []
        for _ in range(2000):
            try:
                while True: keep.append(bytearray(1 << 22))
            except MemoryError:
                pass
        return "harmless"
        """,
        },
        (16, "memory|timeout|error"): {
            "zip bomb": """
        import zlib
        packed = zlib.compress(bytes(1 << 20), 9)
        bomb = b"".join([packed] * 4)
        keep = []
        while True: keep.append(zlib.decompress(bomb))
        """,
        },
        (16, "memory|error"): {
            "format width": 'return f"{1:{10 ** 10}}"',
        },
    }
)

ENDLESS = table(
    {
        (13, "timeout"): {
            "loop": "while True: pass",
            "loop with all signals ignored": """
        import signal
        for number in range(1, 64):
            if number not in (9, 19, 32, 33):
                signal.signal(number, signal.SIG_IGN)
        while True: pass
        """,
            "loop with all signals blocked": "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: pass",
            "loop that catches everything": """
        while True:
            try:
                while True: pass
            except BaseException:
                continue
        """,
            "exception text that loops": "class Slow(Exception):\n    def __str__(self):\n        while True: pass\nraise Slow",
            "comparison that loops": "class Slow:\n    def __eq__(self, other):\n        while True: pass\nreturn Slow() in [1]",
            "hash collisions": "class Bad:\n    __hash__ = lambda self: 1\n    __eq__ = lambda self, o: False\nd = {Bad(): i for i in range(10 ** 5)}\nreturn len(d)",
            "import hook that loops": """
        class Finder:
            def find_spec(self, *a):
                while True: pass
        sys.meta_path.insert(0, Finder())
        import not_there
        """,
            "codec that loops": "import codecs\ndef search(name):\n    while True: pass\ncodecs.register(search)\nreturn ''.encode('spade')",
            "finaliser that loops": "class Slow:\n    def __del__(self):\n        while True: pass\nSlow()\nreturn 'harmless'",
            "collection that loops": """
        import gc
        def loop(phase, info):
            while True: pass
        gc.callbacks.append(loop)
        gc.collect()
        return "harmless"
        """,
            "audit hook that loops": "def hook(*a):\n    while True: pass\nsys.addaudithook(hook)\ncompile('1', 'x', 'eval')\nreturn 'harmless'",
        },
        (14, "timeout"): {
            "sleep of C": "return libc.sleep(10 ** 6)",
            "sleep without end": f"while True: {call('nanosleep', '(ctypes.c_long * 2)(3600, 0)', '0')}",
            "yield without end": f"while True: {call('sched_yield')}",
            "futex": f"word = ctypes.c_int(0)\nreturn {call('futex', 'ctypes.byref(word)', '0', '0', '0', '0', '0')}",
            "lock twice": "import threading\nlock = threading.Lock()\nlock.acquire()\nreturn lock.acquire()",
            "empty queue": "import queue\nreturn queue.Queue().get()",
            "naps between work": f"""
        while True:
            sum(range(1000))
            {call("nanosleep", "(ctypes.c_long * 2)(0, 1000000)", "0")}
        """,
            "read a request that never comes": "return os.read(3, 1)",
        },
        (15, "timeout"): {
            "big power": "return 3 ** (10 ** 8) * 3 ** (10 ** 8)",
            "regular expression": 'import re\nreturn re.match("(a+)+$", "a" * 64 + "b")',
            "sum of a range": "return sum(range(10 ** 12))",
            "endless iterator": "import itertools\nreturn max(itertools.count())",
            "difflib": "import difflib\na = 'ab' * 20000\nreturn difflib.SequenceMatcher(None, a, a[::-1], False).ratio()",
        },
        (15, "timeout|memory"): {
            "factorial": "import math\nreturn math.factorial(10 ** 8)",
            "numpy product": "import numpy as np\na = np.ones((3000, 3000))\nwhile True: a = a @ a / 3000",
        },
        (15, "timeout|error"): {
            "digits": "sys.set_int_max_str_digits(0)\nreturn str(7 ** (10 ** 7))",
        },
        (15, "timeout|memory|error"): {
            "decimal": "import decimal\ndecimal.getcontext().prec = 10 ** 7\nreturn decimal.Decimal(2).ln()",
        },
        (15, "timeout|harmless"): {
            "C string search": "for _ in range(10 ** 6): ('a' * 100_000).find('a' * 50_000 + 'b')\nreturn 'harmless'",
        },
    }
)

EXITS = table(
    {
        (18, "crash"): {
            "exit": "os._exit(7)",
            "exit as if unconfined": "os._exit(99)",
            "exit group": call("exit_group", "0"),
            "exit of the thread": call("exit", "0"),
            "abort": "os.abort()",
            "null": "return ctypes.string_at(0)",
            "wild write": "return ctypes.memset(4096, 1, 8)",
            "broken interpreter": "return ctypes.memset(id(type(None)), 255, 400) and None",
            "exit in a finaliser": "class Last:\n    __del__ = lambda self: os._exit(3)\nLast()\nreturn 'harmless'",
            "exit in a weak reference": "import weakref\nclass Last: pass\none = Last()\nref = weakref.ref(one, lambda _: os._exit(4))\ndel one\nreturn 'harmless'",
        },
        (18, "error"): {
            "SystemExit": "sys.exit(3)",
            "KeyboardInterrupt": "raise KeyboardInterrupt",
            "GeneratorExit": "raise GeneratorExit",
        },
        (18, "crash|harmless"): {
            "faulthandler": "import faulthandler\nfaulthandler._sigsegv()\nreturn 'harmless'",
        },
        (18, "harmless|crash|error"): {
            "divide in C": "import numpy as np\nreturn 'harmless' if np.int64(-2 ** 63) // -1 is not None else ''",
        },
        (18, "timeout|crash"): {
            "handler that exits": "import signal\nsignal.signal(signal.SIGXCPU, lambda *a: os._exit(0))\nwhile True: pass",
        },
        (18, "harmless"): {
            "atexit": "import atexit\natexit.register(os._exit, 5)\nreturn 'harmless'",
        },
        (18, "crash", WHOLE): {
            "exit at load": "import os\nos._exit(5)",
            "exit in the constructor": "import os\nclass XEnv:\n def __init__(self): os._exit(1)\n def reset(self, seed): return 'x'\n def step(self, a): pass",
            "exit in reset": "import os\nclass XEnv:\n def reset(self, seed): os._exit(1)\n def step(self, a): pass",
        },
        (13, "timeout", WHOLE): {
            "endless load": "while True: pass",
            "endless class": "class XEnv:\n while True: pass",
        },
        (16, "memory|timeout", WHOLE): {
            "memory at load": "x = []\nwhile True: x.append(bytearray(1 << 22))",
        },
        (16, "memory", WHOLE): {
            "memory error at load": "raise MemoryError",
        },
        (17, "error"): {
            "recursion": "return self.attack(action)",
            "nested lists by json": "import json\nreturn json.loads('[' * 100_000)",
        },
        (17, "crash|memory|timeout|error"): {
            "recursion without a limit": "sys.setrecursionlimit(10 ** 9)\nf = lambda n: f(n + 1)\nreturn f(0)",
        },
        (17, "crash|error"): {
            "recursion in C": "sys.setrecursionlimit(10 ** 6)\nclass Nested:\n    __repr__ = lambda self: repr(self)\nreturn repr(Nested())",
        },
        (17, "error|crash", WHOLE): {
            "nested parentheses": "x = " + "(" * 5000 + ")" * 5000,
        },
        (17, "error|crash|memory", WHOLE): {
            "nested signs": "x = " + "-" * 60000 + "1",
        },
        (17, "error", WHOLE): {
            "nested blocks": "".join(" " * i + "if 1:\n" for i in range(120)) + " " * 120 + "x = 1",
        },
        (17, "error|crash|harmless"): {
            "nested pickle": "import pickle\nx = []\nfor _ in range(10 ** 5): x = [x]\nreturn 'harmless' if pickle.dumps(x) else ''",
        },
        (17, "harmless|crash"): {
            "deep destruction": "x = None\nfor _ in range(200_000): x = (x,)\ndel x\nreturn 'harmless'",
        },
        (17, "error|crash|memory|timeout"): {
            "compiler": "return eval('+'.join(['1'] * 200_000))",
        },
        (17, "error|memory|timeout|crash", WHOLE): {
            "constants folded": "x = ((((((1 << 9999) << 9999) << 9999) ** 99) ** 99) ** 99)",
        },
    }
)
