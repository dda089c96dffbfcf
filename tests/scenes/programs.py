"""Programs that the sandbox tests run: small games, and a frame around single attacks."""

from __future__ import annotations

import textwrap

PEAK = """import random
class Env:
 def reset(self,seed):
  r=random.Random(seed);self.t=0
  self.s=4+r.randint(0,2)
  return "kites peak in 0..8, 2 tries"
 def step(self,a):
  self.t+=1;d=abs(int(a)-self.s);w=d==0
  return f"off by {d}",float(w),w or self.t>=2,False,{}
"""

LEVERS = """import random
class Env:
 def reset(self,seed):
  r=random.Random(seed);self.t=0
  self.k=(5+r.randint(0,1))%9
  return "wheels has levers 0..8, 4 tries"
 def step(self,a):
  self.t+=1;d=abs(int(a)-self.k);w=d==0
  return "open" if w else f"{a} {'hums' if d<2 else 'fails'}",float(w),w or self.t>=4,False,{}
"""

ECHO = """class EchoEnv:
    def reset(self, seed):
        self.t = 0
        return f"say something, seed {seed}"
    def step(self, a):
        self.t += 1
        return f"{self.t} {a}", 0.5, False, False, {}
"""

SPIN = ECHO.replace("self.t += 1", "while True: pass")

_ATTACK = '''
import ctypes, errno, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
_n = {"x86_64": 0, "aarch64": 1}[MACHINE]

def raw(numbers, *args):
    """Make a system call by number; OSError when it fails."""
    args = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    got = libc.syscall(ctypes.c_long(numbers[_n]), *args)
    if got < 0:
        raise OSError(ctypes.get_errno(), "raw")
    return got

def tried(function):
    """What came of an attempt: the errno's name, or OPEN; a mistake in the attack itself raises."""
    try:
        value = function()
    except OSError as error:
        return "denied:" + errno.errorcode.get(error.errno or 0, "?")
    except (MemoryError, ValueError) as error:
        return "denied:" + type(error).__name__
    return f"OPEN {value!r}"

class AttackEnv:
    def reset(self, seed):
        return "ready"
    def step(self, action):
        return str(self.attack(action)), 0.0, False, False, {}
    def attack(self, action):
BODY
'''


def attack(body: str) -> str:
    """A program whose step runs ``body`` (lines of a function of ``action``) and shows what it returns."""
    import platform

    source = _ATTACK.replace("MACHINE", repr(platform.machine()))
    return source.replace("BODY", textwrap.indent(textwrap.dedent(body).strip(), " " * 8))
