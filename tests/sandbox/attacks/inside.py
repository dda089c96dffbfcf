"""Sabotage of what runs beside the program, and attempts on other instances (cases 23, 26 and beyond)."""

from __future__ import annotations

from attacks import table

SABOTAGE = table(
    {
        (23, "crash|error|harmless"): {
            "encoder": 'r = sys.modules["sandbox.runner"]; r._encode = None\nreturn "harmless"',
        },
        (23, "timeout"): {
            "encoder of json, and a read": "import json\njson.JSONEncoder.encode = None\nreturn os.read(3, 4)",
            "writer that is silent": 'r = sys.modules["sandbox.runner"]; r._write = lambda d: None\nreturn "harmless"',
        },
        (23, "protocol", 2): {
            "writer that doubles": """
        r = sys.modules["sandbox.runner"]
        once = r._write
        r._write = lambda d: (once(d), once(d))
        return "harmless"
        """,
        },
        (23, "crash", 2): {
            "reader": 'r = sys.modules["sandbox.runner"]; r._read = lambda: 7\nreturn "harmless"',
        },
        (23, "protocol"): {
            "contract": """
        c = sys.modules["sandbox.contract"]
        c.read_step = lambda answer: ("x", 1e6, False, False)
        return "harmless"
        """,
            "budget of the runner": """
        import gc
        r = sys.modules["sandbox.runner"]
        for one in gc.get_objects():
            if isinstance(one, r.Runner):
                one.limits["max_observation_bytes"] = one.limits["max_reply_bytes"] = 1 << 30
        return "x" * 200_000
        """,
        },
        (23, "harmless|error|crash", 2): {
            "trace": 'sys.settrace(lambda *a: 1 / 0)\nreturn "harmless"',
            "profile": 'sys.setprofile(lambda *a: 1 / 0)\nreturn "harmless"',
            "audit hook": 'def no(*a): raise RuntimeError\nsys.addaudithook(no)\nreturn "harmless"',
            "builtins": 'import builtins\nfor n in ("len", "isinstance", "getattr", "str", "type"): setattr(builtins, n, None)\nreturn "harmless"',
            "no modules": 'sys.modules.clear()\nreturn "harmless"',
        },
        (23, "crash|timeout"): {
            "no descriptors": 'os.closerange(0, 64)\nreturn "harmless"',
        },
        (23, "timeout|crash|protocol", 2): {
            "stolen request": """
        if action == "go":
            frames = sys._getframe
            r = sys.modules["sandbox.runner"]
            data = b'{"i":2,"o":"harmless"}'
            os.write(3, len(data).to_bytes(4, "little") + data)
            os.read(3, 2)
        return "harmless"
        """,
        },
        (23, "harmless"): {
            "frames of the caller": """
        frame, names = sys._getframe(), []
        while frame:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        return "harmless: " + " ".join(names)
        """,
            "heap unfrozen": 'import gc\ngc.unfreeze()\ngc.collect()\nreturn "harmless"',
            "no collection": 'import gc\ngc.disable()\ngc.set_threshold(1)\nreturn "harmless"',
            "switch interval": 'sys.setswitchinterval(1e-9)\nreturn "harmless"',
        },
        (23, "harmless|error", 2): {
            "stdout closed": 'sys.stdout.close()\nprint("x")\nreturn "harmless"',
            "stdout replaced": 'sys.stdout = None\nprint("x")\nreturn "harmless"',
        },
        (23, "error"): {
            "exception hook": "sys.excepthook = sys.unraisablehook = lambda *a: os._exit(9)\nraise ValueError",
        },
        (23, "harmless|crash|error|timeout|protocol", 2): {
            "int of the interpreter": "ctypes.c_long.from_address(id(2) + 24).value = 3\nreturn 'harmless'",
            "true is false": "ctypes.memmove(id(False) + 16, id(True) + 16, 16)\nreturn 'harmless'",
        },
        (23, "answer", 2): {
            "step replaced by reward": "type(self).step = lambda s, a: ('mine', 9.5, True, False, {})\nreturn 'mine'",
        },
        (23, "harmless|error"): {
            "numpy error state": "import numpy as np\nnp.seterr(all='raise')\nnp.set_printoptions(threshold=10 ** 9)\nreturn 'harmless'",
        },
        (23, "denied|error"): {
            "pickle of a call": "import pickle\nreturn tried(lambda: pickle.loads(b'cposix\\nsystem\\n(S\"id\"\\ntR.')) if pickle.loads(b'cposix\\nsystem\\n(S\"id\"\\ntR.') == 0 else 'denied:status'",
            "eval of an action": "return tried(lambda: eval(\"open('/etc/passwd').read()\"))",
        },
        (23, "crash|harmless|error|timeout|memory"): {
            "code object by hand": "f = lambda: 1\nf.__code__ = f.__code__.replace(co_code=bytes([100, 255] * 8 + [83, 0]), co_stacksize=1)\nf()\nreturn 'harmless'",
        },
    }
)

# Left behind in one process, looked for in the next one: a fork of the zygote must not know of it.
LITTER = """
import builtins, gc, json, locale, math, os, random, sys, time, warnings
class LitterEnv:
    def reset(self, seed):
        return "x"
    def step(self, action):
        seen = [
            sorted(sys.modules), sorted(vars(builtins)), sorted(os.environ.items()), math.pi,
            random.random(), time.time(), hash("x"), gc.isenabled(), gc.get_threshold(),
            sys.getrecursionlimit(), sys.getswitchinterval(), len(sys.meta_path), str(warnings.filters),
            getattr(json, "litter", None), getattr(random.Random, "litter", None), os.getpid(),
            locale.setlocale(locale.LC_ALL), sorted(vars(sys.modules["sandbox.contract"])), len(gc.callbacks),
        ]
        builtins.litter = math.litter = json.litter = random.Random.litter = 1
        os.environ["LITTER"] = "1"
        math.pi = 4
        sys.modules["litter"] = sys
        sys.modules["sandbox.contract"].litter = 1
        sys.setrecursionlimit(5000)
        sys.meta_path.append(None)
        gc.callbacks.append(print)
        gc.disable()
        random.seed(7)
        return repr(seen), 0.0, False, False, {}
"""

NEIGHBOURS = table(
    {
        (23, "denied"): {
            "CPU clocks of others": """
        class Spec(ctypes.Structure):
            _fields_ = [("s", ctypes.c_long), ("n", ctypes.c_long)]
        me, seen, spec = raw((39, 172)), [], Spec()
        for pid in {*range(1, 60), *range(me - 60, me + 60)} - {me}:
            if pid > 0 and libc.clock_gettime((~pid << 3) | 2, ctypes.byref(spec)) == 0:
                seen.append(pid)
        return f"OPEN {seen}" if seen else "denied:all"
        """,
            "affinity of others": """
        me, mask = raw((39, 172)), ctypes.create_string_buffer(128)
        others = {*range(1, 60), *range(me - 60, me + 60)} - {me}
        seen = [p for p in others if p > 0 and libc.sched_getaffinity(p, 128, mask) == 0]
        return f"OPEN {seen}" if seen else "denied:all"
        """,
            "limits of others": """
        me, old = raw((39, 172)), ctypes.create_string_buffer(16)
        others = {*range(1, 60), *range(me - 60, me + 60)} - {me}
        got = {tried(lambda: raw((302, 261), p, 7, 0, old)) for p in others if p > 0}
        # a different answer for those that exist would count them
        return f"OPEN {got}" if len(got) > 1 or "OPEN" in str(got) else got.pop()
        """,
            "sleep on the clock of another": "return tried(lambda: raw((230, 115), (~1 << 3) | 2, 0, b'\\0' * 16, 0))",
        },
        (23, "denied|harmless"): {
            "children of the zygote": """
        import gc
        n = sys.modules.get("sandbox.fork_server")
        known = [o for o in gc.get_objects() if n and isinstance(o, n.Zygote)]
        # it may know how many siblings there are, and nothing that is theirs
        return "harmless" if not any(hasattr(z, "source") or hasattr(z, "seed") for z in known) else f"OPEN {known}"
        """,
        },
        (26, "denied"): {
            "seed of another": """
        import gc
        gc.unfreeze()
        text = repr([o for o in gc.get_objects() if isinstance(o, dict) and len(o) < 8])
        found = "NEIGHBOUR_" + "SECRET" in text.replace("'NEIGHBOUR_' + 'SECRET'", "")
        return "OPEN" if found else "denied:unknown"
        """,
            "secret in freed memory": """
        wanted = b"NEIGHBOUR_" + b"SECRET"
        blocks = [ctypes.create_string_buffer(1 << 16) for _ in range(200)]
        fresh = [bytes(ctypes.string_at(id(object()) - 4096, 8192)) for _ in range(16)]
        found = any(wanted in b.raw for b in blocks) or any(wanted in f for f in fresh)
        return "OPEN" if found else "denied:unknown"
        """,
        },
    }
)
