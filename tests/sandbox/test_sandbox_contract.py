"""The contract and the lint, beside no sandbox: these sources are trusted."""

from __future__ import annotations

import ast
import math
from fractions import Fraction
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from sandbox import contract, tools
from sandbox.lint import lint


def module(source: str) -> ModuleType:
    made = ModuleType(contract.MODULE)
    contract.namespace(made, ToolEnv=tools.ToolEnv)
    exec(source, made.__dict__)
    return made


METHODS = "\n def reset(self,seed): return ''\n def step(self,a): return 0\n"


@pytest.mark.parametrize(
    ("source", "game"),
    [
        ("class AEnv:{M}class Envelope: pass", "AEnv"),
        ("class AEnv:{M}class BEnv(AEnv): pass", "BEnv"),
        ("class AEnv:{M}class BEnv:{M}", "AEnv and BEnv"),
        ("class BaseEnv:{M}class AEnv(BaseEnv): ...\nclass CEnv(BaseEnv): ...", "AEnv and CEnv"),
        ("class AEnv:\n class InnerEnv: ...{M}", "AEnv"),
        ("class AEnv: ...\nclass AEnv:{M}", "AEnv"),
        ("TEXT = QQDerived from\nclass OldEnv: its textQQ\nclass AEnv:{M}", "AEnv"),
    ],
)
def test_one_class_is_the_game(source: str, game: str) -> None:
    made = module(source.replace("{M}", METHODS).replace("QQ", '"""'))
    if " and " not in game:
        assert contract.find_class(made).__name__ == game
        return
    with pytest.raises(contract.ContractError, match=game):
        contract.find_class(made)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("x = 1", "ends in Env"),
        ("class Game: pass", "ends in Env"),
        ("from random import Random as FooEnv", "ends in Env"),
        ("class Env:\n def reset(self, s): pass", "step"),
        ("class Env:\n step = 3\n def reset(self, s): pass", "step"),
    ],
)
def test_missing_class(source: str, word: str) -> None:
    with pytest.raises(contract.ContractError, match=word):
        contract.find_class(module(source))


@pytest.mark.parametrize(
    ("head", "taken"),
    [
        ("", {}),
        ("def __init__(self): pass", {}),
        ("def __init__(self, max_turns=3): self.got = {'max_turns': max_turns}", {"max_turns": 3}),
        ("def __init__(self, max_turns=9): self.got = {'max_turns': max_turns}", {"max_turns": 7}),
        ("def __init__(self, max_turns=None): self.got = {'max_turns': max_turns}", {"max_turns": 7}),
        ("def __init__(self, **kw): self.got = kw", {"max_turns": 7, "other": 1}),
        ("def __init__(self, *, other): self.got = {'other': other}", {"other": 1}),
    ],
)
def test_constructor_gets_what_it_takes(head: str, taken: dict[str, int]) -> None:
    cls = contract.find_class(module(f"class Env:\n {head or 'pass'}{METHODS}"))
    assert getattr(contract.construct(cls, {"max_turns": 7, "other": 1}), "got", {}) == taken


@pytest.mark.parametrize(
    ("signature", "takes"),
    [
        ("seed", True),
        ("seed=None", True),
        ("s", False),
        ("*a", False),
        ("", None),
        ("*, seed", True),
        ("**kw", True),
    ],
)
def test_ways_to_take_a_seed(signature: str, takes: bool | None) -> None:
    scope: dict[str, Any] = {}
    exec(f"def reset({signature}): pass", scope)
    assert contract.takes_seed(scope["reset"]) is takes


@pytest.mark.parametrize("flag", [True, False, np.True_, np.bool_(False)])
def test_flags_are_booleans_of_python_or_numpy(flag: Any) -> None:
    _, _, terminated, truncated = contract.read_step(("x", 1, flag, flag, {}))
    assert type(terminated) is type(truncated) is bool
    assert terminated == bool(flag)


@pytest.mark.parametrize(
    "flag", [0, 1, None, "", "False", [], [1], 1.0, np.int64(1), np.array([True]), object()]
)
def test_what_merely_counts_as_true_is_no_flag(flag: Any) -> None:
    for answer in (("x", 0.0, flag, False, {}), ("x", 0.0, False, flag, {})):
        with pytest.raises(contract.ContractError, match="must be True or False"):
            contract.read_step(answer)


@pytest.mark.parametrize("reward", [1, 0.5, True, -10, 10, np.float32(0.5), np.int64(1), Fraction(1, 2)])
def test_rewards_are_finite_numbers(reward: Any) -> None:
    assert contract.read_step(("x", reward, False, False, None))[1] == float(reward)


@pytest.mark.parametrize("reward", [None, "1", b"1", math.nan, math.inf, -math.inf, 10.5, np.float64("nan")])
def test_other_rewards_are_refused(reward: Any) -> None:
    with pytest.raises(contract.ContractError, match="reward"):
        contract.read_step(("x", reward, False, False, {}))


@pytest.mark.parametrize("answer", [None, "text", ("x", 0.0, False, False), {"observation": "x"}])
def test_other_shapes_of_a_step_are_refused(answer: Any) -> None:
    with pytest.raises(contract.ContractError, match="5"):
        contract.read_step(answer)


def test_injected_names_and_the_base_class() -> None:
    made = module(f"class AEnv:{METHODS}")
    assert made.__dict__["ToolEnv"].__module__ == "sandbox.tools"
    assert contract.find_class(made).__name__ == "AEnv"
    with pytest.raises(contract.ContractError, match="ends in Env"):
        contract.find_class(module("from sandbox.tools import ToolEnv"))
    derived = module("class ShopEnv(ToolEnv): pass")
    assert contract.find_class(derived).__name__ == "ShopEnv"


@pytest.mark.parametrize(
    "source",
    [
        "import random, math\nfrom collections import defaultdict\nimport numpy as np\nimport numpy.linalg",
        "import re\nre.compile('a')",
        "from sandbox.tools import ToolEnv, ToolError",
        "open = [1]\nwhile open: open.pop()",
        "def f(exit, compile): return exit, compile",
        "import sys\nsys.setrecursionlimit(5000)\nsys.maxsize",
        "import os\nos.path.join('a', 'b')",
        "class Env:\n def fork(self): self.system = self.modules = 1",
        "x = 'eval(open)'",
        "if __name__ == '__main__':\n import argparse, sys\n print(input(), open('x'))\n sys.exit()",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n from gymnasium import Env",
        "import typing\nif typing.TYPE_CHECKING:\n import gymnasium",
        "try:\n import nowhere_installed as gym\nexcept ImportError:\n gym = None",
        "class A:\n def f(self, os):\n  sys = os.fork()\n  return sys.modules",
        "os, sys = [1], {}\nos.pop()\nsys.update(a=1)",
        "import math, operator\ngetattr(math, 'sq' + 'rt')(4)\ngetattr(operator, name)(1, 2)",
        "import numpy as np\nnp.random.default_rng(1)\nnp.linalg.norm([1])\nnp.datetime64('2020-01-01')",
        "import collections\ncollections.abc.Mapping",
        "class Env:\n def open(self): return 1\n def step(self, a): return self.open()",
        "def compile(rules): return rules\ncompile([])",
        "from re import compile\ncompile('a')",
        "def f():\n open = []\n return [open for _ in open], (lambda: open)",
        "def f(input):\n input = input.strip()\n return input",
        "def f(x):\n match x:\n  case open: return open",
        "from os import path, linesep\nimport os.path as p\np.join('a', path.sep)",
        "import io\nio.StringIO('a')",
        "from pathlib import PurePosixPath\nPurePosixPath('a').name",
        "import pathlib\nclass Env:\n def reset(self):\n  self.open = []\n  self.open.append(1)",
    ],
)
def test_lint_lets_honest_programs_pass(source: str) -> None:
    assert lint(ast.parse(source), (*contract.STDLIB, "numpy")) == ""


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("import requests", "requests"),
        ("import sandbox.kernel", "sandbox.kernel"),
        ("from sandbox import runner", "sandbox"),
        ("import ctypes", "ctypes"),
        ("from inspect import getsource", "inspect"),
        ("import torch.nn", "torch"),
        ("from . import x", "import"),
        ("import subprocess", "subprocess"),
        ("x = 1\ny = eval('x')", "line 2: eval"),
        ("exec('x')", "exec"),
        ("open('x')", "open"),
        ("__import__('os')", "__import__"),
        ("compile('x', '', 'exec')", "compile"),
        ("f = eval\nf('1')", "eval"),
        ("print(__file__)", "own source"),
        ("__builtins__", "own source"),
        ("().__class__.__bases__[0].__subclasses__()", "__subclasses__|__bases__"),
        ("import os\nos.environ", "os.environ"),
        ("import sys\nsys.modules['x']", "sys.modules"),
        ("(lambda: 0).__code__.co_code", "co"),
        ("input()", "input"),
        ("def step(self, a, eval=eval): return eval(a)", "eval()"),
        ("step = lambda a, *, run=exec: run(a)", "exec()"),
        ("open = open\nopen('x')", "line 1: open()"),
        ("class Env:\n eval = eval", "eval()"),
        ("class Env:\n def open(self): pass\n def step(self, a): return open(a)", "line 3: open()"),
        ("import random\nrandom._os", "random._os"),
        ("import logging\nlogging.os.getpid()", "logging.os"),
        ("from random import _os as o", "random._os"),
        ("import typing as t\nt.sys.modules", "typing.sys"),
        ("import random\ngetattr(random, '_o' + 's').times()", "getattr(random"),
        ("import logging\nvars(logging)['os']", "vars(logging"),
        ("import random\nrandom.__dict__['_os']", "random.__dict__"),
        ("print.__self__.eval('1')", "__self__"),
        ("import numpy as np\nnp.datetime64('now')", "clock"),
        ("try:\n import threading\nexcept ImportError:\n pass", "threading"),
        ("import csvv", "may import abc, array"),
        ("from os import system", "os.system"),
        ("from os import path, getenv as g", "os.getenv"),
        ("from os import *", "os.*"),
        ("from sys import modules", "sys.modules"),
        ("import os as o\no.getenv('x')", "os.getenv"),
        ("import os\no = os\no.getenv('x')", "os.getenv"),
        ("import os\nos.open('x', 0)", "os.open"),
        ("import io\nio.open('x')", "io.open"),
        ("import io as i\ni.FileIO('x')", "io.FileIO"),
        ("from io import open as read", "io.open"),
        ("from pathlib import Path\nPath('x').read_text()", "line 2: pathlib's read_text"),
        ("import pathlib as p\np.Path('x').open()", "pathlib's open"),
    ],
)
def test_lint_names_what_it_refuses(source: str, word: str) -> None:
    finding = lint(ast.parse(source), (*contract.STDLIB, "numpy"))
    assert finding.startswith("line ")
    assert any(part in finding for part in word.split("|"))
