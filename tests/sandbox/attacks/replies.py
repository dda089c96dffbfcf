"""Replies of hostile programs: floods, forged frames, hostile values (cases 19 to 22)."""

from __future__ import annotations

from attacks import WHOLE, Attack, table

_FRAME = """
def frame(body):
    return len(body).to_bytes(4, "little") + body
"""
# The constants of a step in the frame around a body, to be replaced.
_ANSWER = "return str(self.attack(action)), 0.0, False, False, {}"


def forged(data: str, expect: str = "protocol", *, turns: int = 1) -> Attack:
    """Writes ``data`` to the channel in place of an answer and works on."""
    return Attack(20, expect, f"{_FRAME}\nos.write(3, {data})\nwhile True: pass", turns)


def payload(data: str) -> Attack:
    """Sends ``data`` as its answer; nothing of it may be believed."""
    return forged(data)._replace(case=21)


def answering(values: str, expect: str = "error", before: str = "") -> Attack:
    """Answers a step with the five ``values``."""
    source = f"import os, sys\n{before}\nclass XEnv:\n def reset(self, seed): return 'x'\n def step(self, action): return {values}"
    return Attack(22, expect, source, whole=True)


FLOODS = table(
    {
        (19, "harmless"): {
            "long observation": 'return "harmless" + "x" * (20 << 20)',
            "long prints": 'for _ in range(200): print("y" * 100_000)\nreturn "harmless"',
            "descriptor 1": 'for _ in range(100): os.write(1, b"z" * 100_000)\nreturn "harmless"',
            "escapes": 'return "harmless" + "\\0" * (1 << 20)',
            "wide characters": 'return "harmless" + "\\U0001F600" * (1 << 20)',
            "surrogates": 'return "harmless" + "\\ud800" * 1000',
            "terminal": 'return "harmless\\x1b]0;title\\x07\\x1b[2J\\r\\n"',
            "warnings": "import warnings\nfor i in range(1000): warnings.warn('w' * 10_000 + str(i))\nreturn 'harmless'",
            "logging": "import logging\nfor i in range(500): logging.error('w' * 10_000)\nreturn 'harmless'",
        },
        (19, "harmless|timeout"): {
            "many prints": 'for _ in range(20_000): print("y")\nreturn "harmless"',
        },
        (19, "error"): {
            "error text": 'raise ValueError("e" * (10 << 20))',
            "error name": 'raise type("E" * 100_000, (Exception,), {})("x")',
            "traceback": "def deep(n):\n    if n: deep(n - 1)\n    raise ValueError('x' * 10 ** 6) from ExceptionGroup('g', [OSError('y')] * 1000)\ndeep(500)",
        },
        (19, "harmless", WHOLE): {
            "class name": "X = type('E' * 50_000 + 'Env', (), {'reset': lambda s, seed: 'x', 'step': lambda s, a: ('harmless', 0.0, False, False, {})})\n"
            "X.__module__ = __name__\nXEnv = X",
        },
    }
) | {
    "info": answering(
        "'harmless', 0.0, False, False, {f'k{i}': [i] * 99 for i in range(10 ** 4)}", "harmless"
    ),
    "wide info": answering("'harmless', 0.0, False, False, {'k' * 10 ** 6: 'v' * 10 ** 6}", "harmless"),
}

FORGERIES = table(
    {
        (20, "protocol|timeout"): {
            "drop by drop": "os.write(3, (200_000).to_bytes(4, 'little'))\nwhile True: os.write(3, b' ')",
        },
        (20, "protocol"): {
            "flood": "while True: os.write(3, b'flood' * 1000)",
        },
        (20, "protocol", 2): {
            "flood while idle": f'{_FRAME}\nos.write(3, frame(b\'{{"i":2,"o":"early"}}\'))\nwhile True: os.write(3, b\'flood\' * 1000)',
        },
        (20, "protocol", WHOLE): {
            "two answers at birth": 'import os\nbody = b\'{"i":1,"o":"forged","m":{"cls":"E","turns":null,"calls":[]}}\'\n'
            "os.write(3, len(body).to_bytes(4, 'little') + body)\n"
            "class XEnv:\n def reset(self, seed): return 'x'\n def step(self, a): return 'x', 0.0, False, False, {}",
            "no description at birth": 'import os\nbody = b\'{"i":1,"o":"forged"}\'\nos.write(3, len(body).to_bytes(4, \'little\') + body)\nwhile True: pass',
            "second hello": "import os\nbody = b'{\"i\":0}'\nos.write(3, len(body).to_bytes(4, 'little') + body)\nwhile True: pass",
        },
        (20, "crash|timeout"): {
            "closed channel": "os.close(3)\nwhile True: pass",
        },
        (20, "crash", 2): {
            "answer, then closed": f"{_FRAME}\nos.write(3, frame(b'{{\"i\":2}}'))\nos.close(3)\nwhile True: pass",
        },
        (20, "memory"): {
            "memory error of its own": f'{_FRAME}\nos.write(3, frame(b\'{{"i":2,"err":["MemoryError","","","step"]}}\'))\nwhile True: pass',
        },
    }
) | {
    "garbage": forged('b"\\xff" * 100'),
    "two gigabytes": forged('(2 << 30).to_bytes(4, "little")'),
    "largest length": forged('b"\\xff" * 4'),
    "empty frame": forged('b"\\0" * 4'),
    "wrong number": forged("frame(b'{\"i\": 77}')"),
    "past number": forged("frame(b'{\"i\": 1}')"),
    "negative number": forged("frame(b'{\"i\": -2}')"),
    "number as boolean": forged("frame(b'{\"i\": true}')"),
    "number as fraction": forged("frame(b'{\"i\": 2.5}')"),
    "answer in advance": forged('frame(b\'{"i": 2}\') + frame(b\'{"i": 3, "r": 9.0}\')', turns=2),
    "answer and garbage": forged("frame(b'{\"i\": 2}') + b'x'", turns=2),
    "half a frame": forged('b"\\x10\\0\\0\\0{"', "timeout"),
    "half a length": forged('b"\\x10\\0"', "timeout"),
    "pickle": payload("frame(b\"cos\\nsystem\\n(S'touch /tmp/spade-attack'\\ntR.\")"),
    "msgpack": payload("frame(b'\\x82\\xa1i\\x02\\xa1o\\xa1x')"),
    "deep": payload("frame(b'{\"i\":2,\"f\":' + b'[' * 100_000 + b']' * 100_000 + b'}')"),
    "long number": payload("frame(b'{\"i\":2,\"r\":' + b'9' * 200_000 + b'}')"),
    "long number in info": payload("frame(b'{\"i\":2,\"f\":{\"k\":' + b'9' * 30 + b'}}')"),
    "not a number": payload('frame(b\'{"i":2,"r":NaN}\')'),
    "infinity": payload('frame(b\'{"i":2,"r":Infinity}\')'),
    "overflow": payload('frame(b\'{"i":2,"r":1e999}\')'),
    "reward out of range": payload('frame(b\'{"i":2,"r":10.5}\')'),
    "reward as text": payload('frame(b\'{"i":2,"r":"1"}\')'),
    "reward as boolean": payload('frame(b\'{"i":2,"r":true}\')'),
    "lone surrogate": payload('frame(b\'{"i":2,"o":"\\\\ud800"}\')'),
    "bad utf-8": payload('frame(b\'{"i":2,"o":"\\xff\\xfe"}\')'),
    "overlong utf-8": payload('frame(b\'{"i":2,"o":"\\xc0\\x80"}\')'),
    "unknown key": payload('frame(b\'{"i":2,"admin":true}\')'),
    "two objects": payload('frame(b\'{"i":2}{"i":2}\')'),
    "byte order mark": payload("frame(b'\\xef\\xbb\\xbf{\"i\":2}')"),
    "comment": payload("frame(b'{\"i\":2/* */}')"),
    "long observation in a frame": payload("frame(b'{\"i\":2,\"o\":\"' + b'x' * 100_000 + b'\"}')"),
    "long error": payload('frame(b\'{"i":2,"err":["E","\' + b\'x\' * 200_000 + b\'","","step"]}\')'),
    "long name of an error": payload(
        'frame(b\'{"i":2,"err":["\' + b\'x\' * 200_000 + b\'","","","step"]}\')'
    ),
    "short error": payload('frame(b\'{"i":2,"err":["E"]}\')'),
    "long info": payload('frame(b\'{"i":2,"f":{"k":"\' + b\'x\' * 200_000 + b\'"}}\')'),
    "long key of info": payload("frame(b'{\"i\":2,\"f\":{\"' + b'k' * 200_000 + b'\":1}}')"),
    "info within info": payload('frame(b\'{"i":2,"f":{"k":{}}}\')'),
    "flag as number": payload('frame(b\'{"i":2,"te":1}\')'),
}

_BAD = "class Bad:\n def no(self, *a): 1 / 0\n __str__ = __float__ = __bool__ = __index__ = __int__ = __iter__ = __len__ = no\n"
VALUES = table(
    {
        (22, "error", WHOLE): {
            "reset that returns bytes": "class XEnv:\n def reset(self, seed): return b'x'\n def step(self, a): pass",
            "class that is no class": "XEnv = 7",
            "metaclass that raises": "class M(type):\n def __call__(cls, *a, **k): 1 / 0\nclass XEnv(metaclass=M):\n def reset(self, seed): return 'x'\n def step(self, a): pass",
            "attribute access that raises": "class XEnv:\n def __getattribute__(self, name): raise SystemExit(name)\n def reset(self, seed): return 'x'\n def step(self, a): pass",
        },
        (22, "error|harmless", WHOLE): {
            "signature that lies": "class XEnv:\n __signature__ = 7\n def reset(self, seed): return 'x'\n def step(self, a): return 'harmless', 0.0, False, False, {}\n"
            "XEnv.reset.__signature__ = 'x'",
        },
        (22, "harmless|error", WHOLE): {
            "number of turns that lies": "class XEnv:\n max_turns = 10 ** 400\n def reset(self, seed): return 'x'\n def step(self, a): return 'harmless', 0.0, False, False, {}",
        },
    }
) | {
    "nan": answering("'x', float('nan'), False, False, {}"),
    "infinite": answering("'x', float('-inf'), False, False, {}"),
    "text reward": answering("'x', '1', False, False, {}"),
    "no reward": answering("'x', None, False, False, {}"),
    "large reward": answering("'x', 1e308, False, False, {}"),
    "complex reward": answering("'x', 1j, False, False, {}"),
    "huge integer reward": answering("'x', 10 ** 400, False, False, {}"),
    "array reward": answering("'x', np.ones(3), False, False, {}"),
    "float that lies": answering(
        "'x', Lie(1), False, False, {}",
        "error",
        "class Lie(float):\n __float__ = lambda s: float('inf')\n __abs__ = lambda s: 0.0\n __gt__ = lambda s, o: False",
    ),
    "float that is text to JSON": answering(
        "'harmless', Lie(1), False, False, {}", "harmless", "class Lie(float):\n __repr__ = lambda s: '999'"
    ),
    "text that lies about its length": answering(
        "Lie('harmless'), 0.0, False, False, {}",
        "harmless|error|protocol",
        "class Lie(str):\n __len__ = lambda s: 1\n __str__ = lambda s: s\n __getitem__ = lambda s, k: s * 100_000\n encode = lambda s, *a: b'x'",
    ),
    "boolean that is none": answering("'x', 0.0, 1, 0, {}"),
    "boolean of numpy that is an array": answering("'x', 0.0, np.array([True]), False, {}"),
    "values that raise": answering("Bad(), Bad(), False, False, {}", "error", _BAD),
    "flags that raise": answering("'x', 0.0, Bad(), Bad(), {}", "error", _BAD),
    "info that raises": answering("'x', 0.0, False, False, {'k': Bad()}", "answer", _BAD),
    "keys that raise": answering("'x', 0.0, False, False, {Bad(): 1}", "answer", _BAD),
    "value that loops": answering(
        "Slow(), 0.0, False, False, {}", "timeout", "class Slow:\n def __str__(self):\n  while True: pass"
    ),
    "tuple that lies": answering(
        "Lie(('harmless', 0.0, False, False, {}))",
        "harmless|error",
        "class Lie(tuple):\n __len__ = lambda s: 5\n __iter__ = lambda s: iter([1] * 10 ** 6)",
    ),
    "mapping without end": answering(
        "'harmless', 0.0, False, False, Endless()",
        "harmless|error",
        "import itertools\nfrom collections.abc import Mapping\nclass Endless(Mapping):\n __len__ = lambda s: 1\n __iter__ = lambda s: map(str, itertools.count())\n __getitem__ = lambda s, k: k",
    ),
    "recursive info": answering("'harmless', 0.0, False, False, D", "harmless", "D = {}\nD['d'] = D"),
    "item that returns itself": answering(
        "'x', 0.0, False, False, {'k': Self()}",
        "answer",
        "class Self:\n shape = ()\n def item(self): return self",
    ),
    "bytes": answering("b'harmless', 0.0, False, False, {b'k': b'v'}", "answer"),
}
